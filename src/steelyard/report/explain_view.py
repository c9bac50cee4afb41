"""Explanations for the terminal: of a plan, short or complete, of a search on cost tables, and of two plans.

Two plans are shown side by side: time by term, memory by term, and the layers that differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from steelyard.plan.choices import ANY_PLAN, ComparedBaseline, Explanation, SlowNode, StrategyVerdict, Verdict, WhyNot
from steelyard.plan.plan import Plan, answer_lines, decision, pipeline_text
from steelyard.plan.prediction import SAME_SHARE, Prediction, gain_text, layers_text
from steelyard.report.plan_table import (
    MAX_STAGE_COLUMNS,
    alternative_table,
    as_good_line,
    link_lines,
    no_plan_text,
    pool_lines,
    reason_lines,
    stage_table,
    stage_texts,
    step_text,
    term_table,
    total_table,
    warning_lines,
)
from steelyard.report.tables import Paragraph, name, number, plain_table
from steelyard.search import ConfigOutcome, SearchResult
from steelyard.search.tradeoff import SampledFrontier
from steelyard.units import format_bytes, format_change, format_plural, format_seconds


def solve_view(title: str, result: SearchResult) -> RenderableType:
    """Return the choice stage by stage, or the bytes that are missing, and every configuration with its reason."""
    best, budget = result.best, format_bytes(result.budget_bytes)
    if best is None:
        miss = result.nearest_miss
        missing = (
            "no budget helps" if miss is None else f"{format_bytes(miss.miss_bytes)} ({miss.miss_bytes} bytes) short"
        )
        lines = [f"{title}: nothing fits in {budget}: {missing}"]
    else:
        solution = best.solution
        proof = "optimal" if result.status == "optimal" else f"best so far, gap {result.gap:.2%}"
        step, taken = format_seconds(solution.step_s), format_bytes(solution.peak_bytes)
        lines = [f"{title}: {step} per step, {proof}, {taken} of {budget}", _config(best)]
        for stage, (first, end) in zip(solution.stages, pairwise(solution.boundaries), strict=True):
            used = _counted([str(best.tables.strategies[index]) for index in solution.strategies[first:end]])
            lines.append(f"  layers {first}–{end - 1}: {format_seconds(stage.time_s)} per microbatch: {used}")
    table = plain_table("Configurations", "configuration", number("step"), "why")
    unsolved = [outcome for outcome in result.configs if outcome.result.solution is None]
    for outcome in (*result.ranked, *unsolved):
        found = outcome.result.solution
        table.add_row(_config(outcome), "–" if found is None else format_seconds(found.step_s), outcome.reason)
    return Group(Text(lines[0], style="bold"), *map(Text, lines[1:]), table)


def _counted(texts: list[str]) -> str:
    return ", ".join(f"{text} ×{texts.count(text)}" for text in dict.fromkeys(texts))


def step_table(frontier: SampledFrontier) -> Table:
    """Return time against memory, most memory first."""
    title = "Time against memory" + ("" if frontier.is_complete else " (sampled)")
    table = plain_table(title, *(number(column) for column in ("memory", "bytes", "step")), "configuration")
    for step in frontier.steps:
        table.add_row(
            format_bytes(step.peak_bytes),
            str(step.peak_bytes),
            format_seconds(step.outcome.solution.step_s),
            _config(step.outcome),
        )
    return table


def _config(outcome: ConfigOutcome) -> str:
    tables = outcome.tables
    stages = format_plural(tables.pipeline.num_stages, "stage")
    microbatches = format_plural(tables.pipeline.num_microbatches, "microbatch", "microbatches")
    return f"{stages}, {microbatches}, {tables.pipeline.schedule}"


SHOWN_ROWS = 14
"""Maximum rows of the table of strategies; a larger table is summed up, so that an explanation fits on a screen."""
SHOWN_PLAN = 48
"""Maximum characters of a plan in a table of 100 columns."""
SMALL_SHARE = 0.01
"""Terms below this share are summed up."""


def explain_view(plan: Plan, explanation: Explanation, *, everything: bool = False) -> RenderableType:
    """Return three sentences (what the plan is, why it wins, what limits it), then the details; with ``everything``
    also all that lost."""
    prediction = plan.prediction
    parts: list[RenderableType] = [_line(text, "bold") for text in leading_sentences(plan, explanation)]
    parts += warning_lines(prediction)
    parts += [_line(slow_sentence(each), "yellow") for each in explanation.slow_nodes]
    parts += [_line(f"Note: {note}", "yellow") for note in explanation.notes]
    num_rows = sum(len(part.runs) for part in plan.parts)
    if everything or num_rows <= SHOWN_ROWS:
        parts.append(stage_table(plan))
    else:
        names = [str(strategy) for strategy in plan.strategies]
        parts.append(_line(f"Strategies: {_counted(sorted(names, key=lambda name: -names.count(name)))}."))
        parts.append(_line(f"Stages: {'; '.join(stage_texts(plan))} (all layers: --all)."))
    if prediction is not None:
        parts += [_line(text) for text in prediction_lines(plan, prediction)] + pool_lines(prediction)
        parts += reason_lines(prediction)
    if explanation.rivals:
        parts.append(baseline_table("Best plan under a restriction", explanation.rivals, whole=everything))
        if prediction is not None and (line := as_good_line(prediction, explanation.rivals)):
            parts.append(_line(line))
    if explanation.budgets:
        # these plans are the fastest; one with less memory may beat the plan, if that is the simplest instead
        is_faster_with_less = (explanation.budgets[-1].slowdown or 0.0) < 0
        free = [each.model_copy(update={"name": "this budget"}) for each in explanation.rivals if each.name == ANY_PLAN]
        rows = (*free * is_faster_with_less, *explanation.budgets)
        parts.append(baseline_table("Best plan with another memory budget", rows, whole=everything))
    if everything:
        parts += _everything(plan, explanation)
    return Group(*parts)


def leading_sentences(plan: Plan, explanation: Explanation) -> Iterator[str]:
    """Yield what the plan is, why it wins, and what limits it, a sentence each, as far as they are known."""
    yield f"The plan: {decision(plan)}; {pipeline_text(plan)}."
    if plan.prediction is not None:
        without = [each for each in explanation.rivals if each.name.startswith("without ") and each.slowdown]
        best = max(without, key=lambda each: each.slowdown or 0.0, default=None)
        most = "" if best is None else f"; {best.name} the best plan takes {step_text(best)} per step"
        change = "" if best is None else f" ({format_change(best.slowdown or 0.0)})"
        if gain := gain_text(plan.prediction, has_decisions=plan.asked is not None):
            yield f"Why it wins: it is {gain}{most}{change}."
    if explanation.binds:
        yield explanation.binds


def _line(text: str, style: str = "") -> Paragraph:
    return Paragraph(text=text, indent=0, style=style)


def slow_sentence(slow: SlowNode) -> str:
    """Return the cost of a slow rank, and the gain of other stages for it and of leaving out its node."""
    costs = (
        f"{slow.rank[0].upper()}{slow.rank[1:]} as predicted, relative to the others: a step takes "
        f"{format_seconds(slow.slowed_step_s)} instead of {format_seconds(slow.step_time_s)}"
    )
    recut, parts = slow.recut, [costs]
    if recut is not None:
        stages = zip(recut.layers, recut.is_slow, strict=True)
        layers = ", ".join(f"{count}{' (slow)' if is_slow else ''}" for count, is_slow in stages)
        parts.append(
            f"with stages of {layers} layers it takes {format_seconds(recut.step_time_s)} ({recut.setting}; "
            f"{recut.strategies}), {_gain(recut.step_time_s, slow.slowed_step_s)}"
        )
    if slow.without_step_s is None:
        return "; ".join([*parts, f"no plan fits without its {slow.lost}."])
    without = f"{format_seconds(slow.without_step_s)} on {slow.cluster} ({slow.setting}; {slow.strategies})"
    gain = _gain(slow.without_step_s, slow.slowed_step_s)
    parts.append(f"the best plan without its {slow.lost} takes {without}, {gain}")
    return "; ".join(parts) + "."


def _gain(step_s: float, slowed_s: float) -> str:
    gain = 1 - step_s / slowed_s
    return f"{gain:.1%} faster" if gain > 0 else f"{-gain:.1%} slower than going on"


def why_not_view(plan: Plan, asked: WhyNot) -> RenderableType:
    """Return the plan next to the best plan with what was asked for, or the reasons why there is none."""
    if asked.plan is None:
        return Group(
            _line(decision(plan), "bold"),
            _line(f"No plan has {asked.asked}:", "bold"),
            *(Paragraph(text=reason, indent=2) for reason in asked.reasons),
        )
    lines = [_line(f"{asked.asked}: {reason}", "bold") for reason in asked.reasons]
    mine, theirs = (each.prediction.step_time_s if each.prediction else None for each in (plan, asked.plan))
    if mine is not None and theirs is not None and theirs < mine * (1 - SAME_SHARE) and not asked.reasons:
        lines.append(_line(f"{asked.asked}: found a faster plan; take it with --pin '{asked.asked}'", "bold"))
    if asked.beyond:
        lines.append(_line(f"{asked.asked}: {asked.beyond}"))
    compared = compare_view(plan, asked.plan, ("this plan", asked.asked))
    return Group(*lines, compared) if lines else compared


def prediction_lines(plan: Plan, prediction: Prediction) -> list[str]:
    """Return lines on the slowest stage, pipeline bubble, memory of the fullest stage, certificate and costs."""
    stages = prediction.stages
    slowest = max(range(len(stages)), key=lambda index: stages[index].total_time_s)
    fullest, busy_s = prediction.fullest, stages[slowest].total_time_s
    left, margin = min(prediction.left_bytes()), prediction.margin_bytes
    spare = f"{format_bytes(-left - margin)} too much."
    if left >= 0:
        spare = f"headroom {format_bytes(left)}" + f", and {prediction.margin_text}" * bool(margin) + "."
    elif -left <= margin:
        spare = f"it uses {format_bytes(-left)} of the {format_bytes(margin)} to be kept free."
    lines = [
        f"Time: {_stage(plan, slowest, 'is the slowest')}{format_seconds(busy_s)} per microbatch: "
        f"{shares(stages[slowest].time_s)}."
    ]
    idle = 1 - plan.num_microbatches * busy_s / prediction.step_time_s
    if plan.num_stages > 1 and idle > 0:
        lines.append(f"Pipeline: stage {slowest} idles for {idle:.1%} of a step while the pipeline fills and drains.")
    elif idle > SMALL_SHARE:
        fixed = format_seconds(idle * prediction.step_time_s)
        lines.append(f"Fixed: {fixed} of a step, {idle:.1%}: the loop, reading data, gradient norm.")
    lines.append(
        f"Memory: {_stage(plan, fullest, 'is the fullest')}{format_bytes(stages[fullest].total_bytes)}: "
        f"{shares(stages[fullest].memory_bytes)}; {spare}"
    )
    above = ("", "Plan", "Gain", "Memory")
    return [
        *lines,
        *(f"{label}: {text}." for label, text in answer_lines(plan, everything=True) if label not in above),
        *(f"{line}." for line in link_lines(plan, prediction)),
    ]


def shares(terms: Mapping[str, float]) -> str:
    """Return the shares of terms, the largest first, small ones summed up."""
    total = sum(terms.values()) or 1.0
    ordered = sorted(terms.items(), key=lambda item: -item[1])
    shown = [(name, value / total) for name, value in ordered if value / total >= SMALL_SHARE]
    rest = 1 - sum(share for _, share in shown)
    texts = [f"{name} {share:.0%}" for name, share in shown]
    return ", ".join(texts + ([f"other {rest:.1%}"] if rest >= 0.0005 else []))


def baseline_table(title: str, baselines: Sequence[ComparedBaseline], *, whole: bool = True) -> Table:
    """Return a row per restriction: step time, difference, and the plan, or the bytes that are missing.

    The plan is cut off after `SHOWN_PLAN` characters unless ``whole``.
    """
    table = plain_table(title, name(), number("step"), number("vs. plan"), "plan")
    for baseline in baselines:
        if baseline.step_time_s is None:
            table.add_row(baseline.name, "–", "–", no_plan_text(baseline))
        else:
            text = f"{baseline.setting}: {baseline.strategies}"
            shown = text if whole or len(text) <= SHOWN_PLAN else text[:SHOWN_PLAN].rpartition(" ")[0] + " …"
            table.add_row(baseline.name, step_text(baseline), format_change(baseline.slowdown or 0.0), shown)
    return table


def verdict_table(verdicts: Sequence[StrategyVerdict]) -> Table:
    """Return every strategy for a stage: the layers for which it is useful, and why it is not for the others."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in verdicts:
        alike.setdefault((each.verdict, each.reason, each.strategy), []).append(each.kind or "any")
    strategies: dict[tuple[str, str, str], list[str]] = {}
    for (verdict, reason, strategy), found in alike.items():
        strategies.setdefault((verdict, reason, ", ".join(found)), []).append(strategy)
    title = "Strategies in this pipeline configuration"
    table = plain_table(title, "verdict", "layers", "strategies", "why")
    order = list(get_args(Verdict))
    for (verdict, reason, layers), found in sorted(strategies.items(), key=lambda item: -order.index(item[0][0])):
        table.add_row(verdict, layers, ", ".join(found), reason)
    return table


def _everything(plan: Plan, explanation: Explanation) -> list[RenderableType]:
    parts: list[RenderableType] = []
    prediction = plan.prediction
    if prediction is not None:
        wide = len(prediction.stages) <= MAX_STAGE_COLUMNS
        parts.append(term_table(prediction) if wide else total_table(prediction))
        if prediction.alternatives:
            parts.append(alternative_table(prediction, len(prediction.alternatives)))
    if explanation.not_searched:
        table = plain_table("Not searched", "", "values", "why")
        for each in explanation.not_searched:
            table.add_row(each.what, each.values, each.reason)
        parts.append(table)
    if explanation.verdicts:
        parts.append(verdict_table(explanation.verdicts))
    return parts


def _stage(plan: Plan, index: int, what: str) -> str:
    return f"stage {index} {what}, " if plan.num_stages > 1 else ""


LEAST = 1e-9
"""Seconds or bytes below this count as zero."""
ALIKE = "All layers have the same stage and strategy in both plans."


def compare_view(first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")) -> RenderableType:
    """Return both headlines, then the differences; terms only if both plans have a prediction."""
    parts: list[RenderableType] = [
        Paragraph(text=f"{name}: {decision(plan)}. {pipeline_text(plan)}", indent=0, style="bold")
        for name, plan in zip(names, (first, second), strict=True)
    ]
    for title, terms, show in compared_terms(first, second):
        table = plain_table(title, "", *(number(column) for column in (*names, "difference")))
        *rows, total = term_rows(terms, show)
        for row in rows:
            table.add_row(*row)
        table.add_row(*total, style="bold")
        parts.append(table)
    return Group(*parts, layer_table(first, second, names))


Terms = tuple[dict[str, float], dict[str, float]]


def compared_terms(first: Plan, second: Plan) -> Iterator[tuple[str, Terms, Callable[[float], str]]]:
    """Yield time and memory of both plans by term, if both have a prediction."""
    if first.prediction is not None and second.prediction is not None:
        times = step_terms(first, first.prediction), step_terms(second, second.prediction)
        yield "Step time, slowest stage", times, format_seconds
        sizes = fullest_terms(first.prediction), fullest_terms(second.prediction)
        yield "Memory of the fullest stage", sizes, format_bytes


def term_rows(terms: Terms, show: Callable[[float], str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name of each term, its amount in both plans, and the difference; the total last."""
    names = dict.fromkeys(name for each in terms for name in each)
    amounts = {name: tuple(each.get(name, 0.0) for each in terms) for name in names}
    kept = {name: both for name, both in amounts.items() if max(map(abs, both)) > LEAST}
    for term, (before, after) in (*kept.items(), ("total", tuple(sum(each.values()) for each in terms))):
        difference = ("+" if after >= before else "−") + show(abs(after - before))
        yield term, show(before), show(after), "–" if abs(after - before) < LEAST else difference


def step_terms(plan: Plan, prediction: Prediction) -> dict[str, float]:
    """Return seconds per step on the slowest stage by term; ``waiting and fixed`` is the rest."""
    slowest = max(prediction.stages, key=lambda stage: stage.total_time_s)
    terms = {name: seconds * plan.num_microbatches for name, seconds in slowest.time_s.items()}
    return terms | {"waiting and fixed": max(0.0, prediction.step_time_s - sum(terms.values()))}


def fullest_terms(prediction: Prediction) -> dict[str, float]:
    """Return bytes of the fullest stage by term."""
    fullest = max(prediction.stages, key=lambda stage: stage.total_bytes)
    return {name: float(size) for name, size in fullest.memory_bytes.items()}


def changed_layers(first: Plan, second: Plan) -> Iterator[tuple[int, int, str, str]]:
    """Yield runs of layers that differ: first and last layer, and their stage and strategy in each plan."""
    pairs = list(zip(_layers(first), _layers(second), strict=True))
    for (before, after), run in groupby(enumerate(pairs), key=lambda item: item[1]):
        places = [index for index, _ in run]
        if before != after:
            yield places[0], places[-1], before, after


def layer_table(first: Plan, second: Plan, names: tuple[str, str]) -> RenderableType:
    """Return a row per run of layers that differs."""
    chain, rows = first.chain(), list(changed_layers(first, second))
    if not rows:
        return Text(ALIKE)
    table = plain_table("Layers that differ", "layers", *names)
    for start, end, before, after in rows:
        table.add_row(layers_text(chain, start, end), before, after)
    return table


def _layers(plan: Plan) -> list[str]:
    return [
        f"stage {plan.pipeline.stage_of(index)}: {strategy}"
        for index, part in enumerate(plan.parts)
        for strategy in part.strategies
    ]
