"""The page of a plan: the decision in one sentence with figures, then all sections, with inline style and script."""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from statistics import median

from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.plan import Plan, decision
from steelyard.plan.prediction import Alternative, shortfall
from steelyard.profiles.record import RankRecord, RunRecord
from steelyard.report.html.assumptions import assumption_section, link_text
from steelyard.report.html.bars import memory_section, time_section
from steelyard.report.html.chart import Chart, Line, chart
from steelyard.report.html.contents import ReportContents, glossary_section, term
from steelyard.report.html.markup import Child, Html, document, folded, join, section, table, tag
from steelyard.report.html.strategies import strategy_section
from steelyard.report.html.timeline import timeline_section
from steelyard.report.html.trade_off import trade_off_section
from steelyard.report.plan_table import as_good_line, gain_sentence, no_plan_text, step_text, why_lost
from steelyard.report.run_table import beside
from steelyard.report.tables import cell
from steelyard.units import format_bytes, format_change, format_count, format_plural, format_seconds, format_tera

_TILE = ("name", "figure", "below")


def summary(found: ReportContents) -> Html:
    """Build the head of the page: the model and cluster, the decision, and the figures."""
    plan = found.plan
    return tag(
        "header",
        tag("p", "Training plan", class_="kicker"),
        tag("h1", plan.model.name, tag("span", " on "), plan.cluster),
        tag("p", network, class_="hint") if (network := network_text(found)) else None,
        tag("p", result_text(found), class_="decision", id="decision"),
        tag(
            "div",
            [
                tag("div", [tag("div", part, class_=look) for part, look in zip(each, _TILE, strict=True)])
                for each in _tiles(found)
            ],
            class_="tiles",
            id="figures",
        ),
        [
            tag("p", note, class_="note")
            for note in (*found.prediction.warnings, *found.notes, *found.study.explanation.notes)
        ],
    )


def result_text(found: ReportContents) -> Html:
    """Return the plan and its result in one sentence."""
    plan, prediction = found.plan, found.prediction
    left = found.budget_bytes - found.peak_bytes
    verdict = (
        f"fits with {format_bytes(left)} to spare"
        if left >= 0
        else shortfall(found.peak_bytes, found.budget_bytes, prediction.stage_margins()[prediction.fullest])
    )
    tokens = format_count(plan.global_batch * plan.seq_len)
    step = format_seconds(prediction.step_time_s).replace(" ", " ")  # the unit stays on the line
    return join(
        [
            f"Train it {f'with {plan.engine} ' if plan.engine else ''}{pipeline_words(plan)}, most layers as ",
            tag("b", main_strategy(plan), class_="whole"),
            f": a step of {tokens} tokens takes {step} and {verdict}.",
            f" {gained}." if (gained := gain_sentence(plan)) else "",
            f" Changed: {plan.chosen_levers}." if plan.levers else "",
            f" Not trained: {plan.model.frozen}." if plan.model.frozen else "",
        ]
    )


def network_text(found: ReportContents) -> str:
    """Return the names and rates of the links between devices; empty if the cluster is unavailable or measured."""
    if len(found.pools) > 1:
        outer = {link_text(each.group.outer_link): None for each in found.pools if each.group.outer_link is not None}
        return f"Between device groups: {'; '.join(outer)}"
    cluster = found.pools[0].cluster if found.pools else None
    if cluster is None or cluster.device.needs_profile:
        return ""
    between = cluster.inter_link if cluster.num_nodes > 1 else None
    inside = f"a node {link_text(cluster.intra_link, cluster.devices_per_node)}"
    return f"Inside {inside}" if between is None else f"Between nodes {link_text(between)}; inside {inside}"


def main_strategy(plan: Plan) -> str:
    """Return the strategy of most layers."""
    names = [str(strategy) for strategy in plan.strategies]
    return max(dict.fromkeys(names), key=names.count)


def pipeline_words(plan: Plan) -> str:
    """Describe stages, schedule, devices and microbatches."""
    sizes, devices = plan.stage_sizes, format_plural(plan.stage_sizes[0], "device")
    stages = f"without a pipeline on {devices}"
    if plan.num_stages > 1:
        chunks = f" of {format_plural(plan.num_chunks, 'chunk')}" if plan.num_chunks > 1 else ""
        each = f"{devices} each" if len(set(sizes)) == 1 else f"{', '.join(map(str, sizes))} devices"
        count = format_plural(plan.num_stages, "pipeline stage")
        stages = f"in {count}{chunks} ({plan.pipeline.schedule.title}) of {each}"
    count = format_plural(plan.num_microbatches, "microbatch", "microbatches")
    return f"{stages}, with {count} of {plan.microbatch_samples} × {plan.seq_len:,} tokens"


def _tiles(found: ReportContents) -> list[tuple[Child, str, Child]]:
    """Return the tiles: name, figure and the text below it."""
    plan, prediction, record = found.plan, found.prediction, found.record
    share = found.peak_bytes / found.budget_bytes if found.budget_bytes else 1.0
    all_devices = format_count(prediction.tokens_per_s_per_device * plan.num_devices)
    below_time = f"{plan.global_batch:,} samples a step"
    below_speed = f"{all_devices} on {format_plural(plan.num_devices, 'device')}"
    if record is not None:
        below_time = f"measured {format_seconds(record.median_step_s)}"
        below_speed = f"measured {record.tokens_per_s / record.num_devices:,.0f}"
    tiles: list[tuple[Child, str, Child]] = [
        ("step time", format_seconds(prediction.step_time_s), f"{below_time}; {prediction.accuracy}"),
        ("tokens/s/device", f"{prediction.tokens_per_s_per_device:,.0f}", below_speed),
    ]
    if prediction.model_flop_per_s is not None:
        tiles.append(("TFLOP/s per device", format_tera(prediction.model_flop_per_s), "model FLOP, as in MFU"))
    if prediction.mfu is not None:
        attention = f"{prediction.mfu_attention} attention, " if prediction.mfu_attention else ""
        tiles.append((term("MFU"), f"{prediction.mfu:.1%}", f"model FLOP, {attention}remat not counted"))
    tiles.append(
        (
            "memory of the fullest device",
            format_bytes(found.peak_bytes),
            [
                f"{share:.0%} of {format_bytes(found.budget_bytes)}"
                + (f"; {prediction.margin_text}" if prediction.margin_text else ""),
                tag(
                    "span",
                    tag("i", style=f"width:{min(share, 1.0):.1%}", class_="over" if share > 1 else None),
                    class_="gauge",
                    aria_hidden="true",
                ),
            ],
        )
    )
    if plan.training is not None:
        tiles.append((f"{format_count(plan.training.tokens)} tokens", *plan.training.brief))
    if found.timeline is not None and plan.num_stages > 1:
        tiles.append(("bubbles", f"{found.timeline.bubble_share():.1%}", "of all stages' time"))
    return [*tiles, ("proof", *prediction.certificate.brief)]


def report_page(found: ReportContents) -> str:
    """Return the complete page as the text of one self-contained file."""
    explored = None
    if found.explore_page is not None:  # a frame keeps names of the two pages apart
        hint = "Other memory, devices and sequence lengths, each solved. As a separate page: steelyard explore."
        frame = tag("iframe", srcdoc=found.explore_page, title="Explore other choices", class_="explored")
        explored = section("explore", "Explore", tag("p", hint, class_="hint"), frame)
    sections = (
        summary(found),
        measured_section(found),
        strategy_section(found),
        time_section(found),
        memory_section(found),
        timeline_section(found),
        None if found.plan.is_mixed else trade_off_section(found),
        baseline_section(found),
        assumption_section(found),
        glossary_section(found),
        explored,
    )
    title, name = f"{found.plan.model.name} on {found.plan.cluster}", found.plan_file
    commands = {
        "why this plan": f"steelyard explain {name}",
        "does it fit, on the real runtime": f"steelyard check {name}",
        "run it": f"steelyard train {name} --data PATH",
    }
    facts = [
        tag("div", tag("dt", what), tag("dd", tag("code", each)), class_="fact") for what, each in commands.items()
    ]
    written = tag("p", f"Written by steelyard {version('steelyard')} from {name}.")
    content = (*sections, tag("footer", tag("dl", facts), written))
    return document(title, decision(found.plan), content, script="timeline.js")


MOST_RANKS = 16
"""Maximum number of ranks shown. With more, only the fullest of each stage is shown."""


def measured_section(found: ReportContents) -> Html | None:
    """Build the section of step time, throughput and memory, predicted and measured, and the course of the run.

    None without a record.
    """
    record = found.record
    if record is None:
        return None
    ratio = found.prediction.step_time_s / record.median_step_s
    verdict = "as predicted" if abs(ratio - 1) < 0.01 else f"{abs(ratio - 1):.0%} {'less' if ratio < 1 else 'more'}"
    over = [rank for rank in record.ranks if rank.peak_bytes > _predicted_bytes(found, rank)]
    memory = (
        f"{format_plural(len(over), 'rank')} held more than the bound"
        if over
        else "no rank held more than was predicted"
    )
    typical = median(step.time_s for step in record.steps)
    losses = tuple((float(step.step), step.loss) for step in record.steps)
    rows = [
        (str(step.step), f"{step.loss:.4f}", format_seconds(step.time_s), f"{step.time_s / typical:.2f}")
        for step in record.steps
    ]
    lead = (
        f"{format_plural(len(record.steps), 'step')} on {record.num_devices} × {record.device}, median "
        f"{format_seconds(record.median_step_s)}; predicted {verdict}; {memory}."
    )
    return section(
        "measured",
        "Predicted and measured",
        tag("p", lead),
        table(("", "predicted", "measured", "predicted / measured"), _rows(found, record), numeric=(1, 2, 3)),
        chart(Chart(title="Loss of every step", x_label="step", y_label="loss", lines=(Line(points=losses),)))
        if len(losses) > 1
        else None,
        folded("Every step", table(("step", "loss", "time", "time / median"), rows, numeric=range(4))),
    )


def _rows(found: ReportContents, record: RunRecord) -> Iterable[tuple[str, ...]]:
    prediction = found.prediction
    yield beside("step time", prediction.step_time_s, record.median_step_s, format_seconds)
    speed = record.tokens_per_s / record.num_devices
    yield beside("tokens/s/device", prediction.tokens_per_s_per_device, speed, "{:,.0f}".format)
    if prediction.mfu is not None and record.mfu:
        yield beside("MFU", prediction.mfu, record.mfu, "{:.1%}".format)
    yield from _busy_rows(found, record)
    fullest = {rank.stage: rank for rank in sorted(record.ranks, key=lambda rank: (rank.peak_bytes, -rank.rank))}
    for rank in record.ranks if len(record.ranks) <= MOST_RANKS else (fullest[stage] for stage in sorted(fullest)):
        name = f"memory of rank {rank.rank} (stage {rank.stage})"
        yield beside(name, _predicted_bytes(found, rank), rank.peak_bytes, format_bytes)


def _busy_rows(found: ReportContents, record: RunRecord) -> Iterable[tuple[str, ...]]:
    """Yield a row per stage of a pipeline with the busy time per step of its busiest rank, predicted and measured."""
    busy: dict[int, float] = {}
    for rank in record.ranks:
        if rank.busy_s is not None:
            busy[rank.stage] = max(busy.get(rank.stage, 0.0), rank.busy_s)
    if found.plan.num_stages == 1:
        return
    for stage, seconds in sorted(busy.items()):
        if record.predicted_busy_s is not None:
            expected = record.predicted_busy_s[stage]
        else:
            expected = found.prediction.stages[stage].total_time_s * found.plan.num_microbatches
        yield beside(f"stage {stage} at work", expected, seconds, format_seconds)


def _predicted_bytes(found: ReportContents, rank: RankRecord) -> int:
    return found.prediction.stages[rank.stage].total_bytes


SHOWN = 8
WIDEST = 0.5
"""Slowdown from which on a plan has the longest bar, as a fraction."""


def baseline_section(found: ReportContents) -> Html:
    """Build the section of the baselines that were searched, and of the plan's own alternatives with their reasons."""
    study, alternatives = found.study, found.prediction.alternatives
    parts: list[Child] = []
    if study.explanation.binds:
        parts.append(tag("p", study.explanation.binds))
    if study.explanation.rivals or study.explanation.budgets:
        parts += [
            tag("h3", "The best plan instead"),
            tag("p", f"Each line was searched again, among {study.scope}.", class_="hint"),
            _baseline_table((*study.explanation.rivals, *study.explanation.budgets)),
            tag("p", line) if (line := as_good_line(found.prediction, study.explanation.rivals)) else None,
        ]
    if study.left_out:
        parts.append(
            tag(
                "p",
                f"No time was left for {', '.join(study.left_out)}: steelyard report {found.plan_file} "
                "without --time-limit searches them, steelyard explain shows them too.",
                class_="hint",
            )
        )
    if alternatives:
        parts += [tag("h3", "Other pipeline configurations"), _alternative_table(found, alternatives[:SHOWN])]
        if len(alternatives) > SHOWN:
            rest = alternatives[SHOWN:]
            parts.append(folded(f"{len(rest)} more that lost", _alternative_table(found, rest)))
    if not parts:
        parts.append(
            tag(
                "p", f"Nothing was compared with this plan: steelyard explain {found.plan_file} searches its baselines."
            )
        )
    return section("rivals", "Why the others lost", *parts)


def _baseline_table(baselines: Sequence[ComparedBaseline]) -> Html:
    rows: list[tuple[Child, ...]] = []
    configs = {baseline.setting for baseline in baselines if baseline.setting}
    for baseline in baselines:
        if baseline.step_time_s is None:
            rows.append((baseline.name, "–", "–", no_plan_text(baseline)))
        else:
            slowdown = baseline.slowdown or 0.0
            look, width = "slower" if slowdown >= 0 else "faster", min(abs(slowdown) / WIDEST, 1.0) * 4
            rows.append(
                (
                    baseline.name,
                    step_text(baseline),
                    [tag("i", class_=look, style=f"width:{width:.2f}em", aria_hidden="true"), format_change(slowdown)],
                    baseline.strategies if len(configs) == 1 else f"{baseline.setting}: {baseline.strategies}",
                )
            )
    return table(("", "step", "slower", "plan"), rows, numeric=(1, 2))


def _alternative_table(found: ReportContents, alternatives: Sequence[Alternative]) -> Html:
    rows = [
        (each.description, step_text(each), cell(each.memory_bytes, format_bytes), why_lost(found.prediction, each))
        for each in alternatives
    ]
    return table(("candidate", "step", "memory", "why it lost"), rows, numeric=(1, 2))
