"""The page of a plan: the decision in one sentence with figures, then all sections, with inline style and script."""

from importlib.metadata import version

from steelyard.plan.plan import Plan, headline
from steelyard.plan.prediction import shortfall
from steelyard.report.html.assumptions import assumption_section, link_text
from steelyard.report.html.bars import memory_section, time_section
from steelyard.report.html.baselines import baseline_section
from steelyard.report.html.contents import ReportContents, glossary_section, term
from steelyard.report.html.markup import Child, Html, document, join, section, tag
from steelyard.report.html.measured import measured_section
from steelyard.report.html.strategies import strategy_section
from steelyard.report.html.timeline import timeline_section
from steelyard.report.html.trade_off import trade_off_section
from steelyard.report.plan_table import gain_sentence
from steelyard.units import format_bytes, format_count, format_plural, format_seconds, format_tera

_TILE = ("name", "figure", "below")


def summary(found: ReportContents) -> Html:
    """Build the head of the page: the model and cluster, the decision, and the figures."""
    plan = found.plan
    return tag(
        "header",
        tag("p", "Training plan", class_="kicker"),
        tag("h1", plan.model.name, tag("span", " on "), plan.cluster),
        tag("p", network, class_="hint") if (network := network_text(found)) else None,
        tag("p", decision(found), class_="decision", id="decision"),
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


def decision(found: ReportContents) -> Html:
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
            f"Train it {pipeline_words(plan)}, most layers as ",
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
    return document(title, headline(found.plan), content, script="timeline.js")
