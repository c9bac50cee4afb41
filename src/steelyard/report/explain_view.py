"""Explanations for the terminal: of a plan, a screenful or all that was not chosen, and of a search on bare tables."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from steelyard.plan.choices import ComparedBaseline, Explanation, SlowNode, StrategyVerdict, Verdict, WhyNot
from steelyard.plan.plan import Plan, headline
from steelyard.plan.prediction import SAME_SHARE, Prediction
from steelyard.report.compare_view import compare_view
from steelyard.report.plan_table import (
    MAX_STAGE_COLUMNS,
    alternative_table,
    as_good_line,
    link_lines,
    pool_lines,
    reason_lines,
    stage_table,
    step_text,
    term_table,
    total_table,
    warning_lines,
)
from steelyard.report.tables import number, plain_table
from steelyard.search import ConfigOutcome, SearchResult
from steelyard.search.tradeoff import SampledFrontier
from steelyard.units import format_bytes, format_change, format_plural, format_seconds


def solve_view(name: str, result: SearchResult) -> RenderableType:
    """The choice stage by stage, or what is missing, and every configuration with its reason."""
    best, budget = result.best, format_bytes(result.budget_bytes)
    if best is None:
        miss = result.nearest_miss
        missing = (
            "no budget helps" if miss is None else f"{format_bytes(miss.miss_bytes)} ({miss.miss_bytes} bytes) short"
        )
        lines = [f"{name}: nothing fits in {budget}: {missing}"]
    else:
        solution = best.solution
        proof = "optimal" if result.status == "optimal" else f"best so far, gap {result.gap:.2%}"
        step, taken = format_seconds(solution.step_s), format_bytes(solution.peak_bytes)
        lines = [f"{name}: {step} a step, {proof}, {taken} of {budget}", _config(best)]
        for stage, (first, end) in zip(solution.stages, pairwise(solution.boundaries), strict=True):
            used = _counted([str(best.tables.strategies[index]) for index in solution.strategies[first:end]])
            lines.append(f"  layers {first}–{end - 1}: {format_seconds(stage.time_s)} a microbatch: {used}")
    table = plain_table("Configurations", "configuration", number("step", whole=True), "why")
    unsolved = [outcome for outcome in result.configs if outcome.result.solution is None]
    for outcome in (*result.ranked, *unsolved):
        found = outcome.result.solution
        table.add_row(_config(outcome), "–" if found is None else format_seconds(found.step_s), outcome.reason)
    return Group(Text(lines[0], style="bold"), *map(Text, lines[1:]), table)


def _counted(texts: list[str]) -> str:
    """Each text once, with how often it is there."""
    return ", ".join(f"{text} ×{texts.count(text)}" for text in dict.fromkeys(texts))


def step_table(frontier: SampledFrontier) -> Table:
    """Time against memory, most memory first."""
    title = "Time against memory" + ("" if frontier.is_complete else " (sampled)")
    table = plain_table(title, *(number(column, whole=True) for column in ("memory", "bytes", "step")), "configuration")
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
"""Of the table of strategies; one of more is drawn together, so that an explanation stays a screenful."""
SMALL_SHARE = 0.01
"""Terms that take less than this share are drawn together."""


def explain_view(plan: Plan, explanation: Explanation, *, everything: bool = False) -> RenderableType:
    """The decision, where time and memory go, what binds, and the baselines; with ``everything`` all that lost too."""
    num_rows = sum(len(part.runs) for part in plan.parts)
    if everything or num_rows <= SHOWN_ROWS:
        layers: RenderableType = stage_table(plan)
    else:  # how many layers have each strategy, the most used first
        names = [str(strategy) for strategy in plan.strategies]
        sizes = ", ".join(str(len(part.layers)) for part in plan.parts)
        words = f"Layers of the {'stages' if plan.num_chunks == 1 else 'chunks'}: {sizes} (--all shows which)."
        layers = Text(f"Strategies: {_counted(sorted(names, key=lambda name: -names.count(name)))}.\n{words}")
    parts: list[RenderableType] = [Text(headline(plan), style="bold"), *warning_lines(plan.prediction), layers]
    if plan.prediction is not None:
        parts += [Text(line) for line in prediction_lines(plan, plan.prediction)] + pool_lines(plan.prediction)
        parts += reason_lines(plan.prediction, len(plan.prediction.reasons))
    if explanation.binds:
        parts.append(Text(explanation.binds))
    parts += [Text(slow_sentence(each), style="yellow") for each in explanation.slow_nodes]
    parts += [Text(f"Note: {note}", style="yellow") for note in explanation.notes]
    if explanation.rivals:
        parts.append(baseline_table("Best plan instead", explanation.rivals, whole=everything))
        if plan.prediction is not None and (line := as_good_line(plan.prediction, explanation.rivals)):
            parts.append(Text(line))
    if explanation.budgets:
        parts.append(baseline_table("Best plan with another memory per device", explanation.budgets, whole=everything))
    if everything:
        parts += _everything(plan, explanation)
    return Group(*parts)


def slow_sentence(slow: SlowNode) -> str:
    """What a slow rank costs, and what planning around it gains over going on: cut for it, and without its node."""
    costs = (
        f"{slow.rank[0].upper()}{slow.rank[1:]} as predicted next to the others: a step of "
        f"{format_seconds(slow.step_time_s)} takes {format_seconds(slow.slowed_step_s)} with it"
    )
    recut, parts = slow.recut, [costs]
    if recut is not None:
        stages = zip(recut.layers, recut.is_slow, strict=True)
        layers = ", ".join(f"{count}{' (slow)' if is_slow else ''}" for count, is_slow in stages)
        parts.append(
            f"cut for its node, stages of {layers} layers take {format_seconds(recut.step_time_s)} ({recut.setting}; "
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
    return f"a gain of {gain:.1%}" if gain > 0 else f"{-gain:.1%} more than to go on"


def why_not_view(plan: Plan, asked: WhyNot) -> RenderableType:
    """The plan beside the best one that does what was asked for, or what stands in the way."""
    if asked.plan is None:
        return Group(
            Text(headline(plan), style="bold"),
            Text(f"No plan has {asked.asked}:", style="bold"),
            *(Text(f"  {reason}") for reason in asked.reasons),
        )
    lines = [Text(f"{asked.asked}: {reason}", style="bold") for reason in asked.reasons]
    mine, theirs = (each.prediction.step_time_s if each.prediction else None for each in (plan, asked.plan))
    if mine is not None and theirs is not None and theirs < mine * (1 - SAME_SHARE) and not asked.reasons:
        lines.append(Text(f"{asked.asked}: found a faster plan; --pin '{asked.asked}' takes it", style="bold"))
    if asked.beyond:
        lines.append(Text(f"{asked.asked}: {asked.beyond}"))
    compared = compare_view(plan, asked.plan, ("this plan", asked.asked))
    return Group(*lines, compared) if lines else compared


def prediction_lines(plan: Plan, prediction: Prediction) -> list[str]:
    """Where the time of the slowest stage goes, what the pipeline adds, what fills the fullest stage, proof, costs."""
    stages = prediction.stages
    slowest = max(range(len(stages)), key=lambda index: stages[index].total_time_s)
    fullest, busy_s = prediction.fullest, stages[slowest].total_time_s
    left, margin = min(prediction.left_bytes()), prediction.margin_bytes
    spare = f"{format_bytes(-left - margin)} too much."
    if left >= 0:
        spare = f"{format_bytes(left)} left" + f", beside {prediction.margin_text}" * bool(margin) + "."
    elif -left <= margin:
        spare = f"{format_bytes(-left)} of the {format_bytes(margin)} to be left free."
    lines = [
        f"Time: {_stage(plan, slowest, 'is the slowest')}{format_seconds(busy_s)} a microbatch, of it "
        f"{shares(stages[slowest].time_s)}."
    ]
    idle = 1 - plan.num_microbatches * busy_s / prediction.step_time_s
    if plan.num_stages > 1 and idle > 0:
        lines.append(f"Pipeline: that stage waits for {idle:.1%} of a step while the pipeline fills and drains.")
    lines.append(
        f"Memory: {_stage(plan, fullest, 'is the fullest')}{format_bytes(stages[fullest].total_bytes)}, of it "
        f"{shares(stages[fullest].memory_bytes)}; {spare}"
    )
    return [
        *lines,
        f"Proof: {prediction.certificate}.",
        f"Costs: {prediction.costs}.",
        *(f"{line}." for line in link_lines(plan, prediction)),
    ]


def shares(terms: Mapping[str, float]) -> str:
    """The largest terms first with their share of the sum, small ones drawn together."""
    total = sum(terms.values()) or 1.0
    ordered = sorted(terms.items(), key=lambda item: -item[1])
    shown = [(name, value / total) for name, value in ordered if value / total >= SMALL_SHARE]
    rest = 1 - sum(share for _, share in shown)
    texts = [f"{name} {share:.0%}" for name, share in shown]
    return ", ".join(texts + ([f"the rest {rest:.1%}"] if rest >= 0.0005 else []))


def baseline_table(title: str, baselines: Sequence[ComparedBaseline], *, whole: bool = True) -> Table:
    """A row for each restriction: step time, how much slower, and the plan, or the bytes that are missing.

    A row takes one line, cut off where it is longer, unless ``whole``.
    """
    plan = Column("plan", no_wrap=not whole, overflow="fold" if whole else "ellipsis", ratio=1)
    table = plain_table(title, Column("", no_wrap=True), number("step", whole=True), number("slower", whole=True), plan)
    table.expand = True  # a ratio has a meaning then: the last column takes what the others leave
    for baseline in baselines:
        if baseline.step_time_s is None:
            missing = baseline.missing_bytes
            reason = "no legal strategy" if missing is None else f"does not fit: misses {format_bytes(missing)}"
            table.add_row(baseline.name, "–", "–", reason)
        else:
            slower = format_change(baseline.slowdown or 0.0)
            table.add_row(baseline.name, step_text(baseline), slower, f"{baseline.setting}: {baseline.strategies}")
    return table


def verdict_table(verdicts: Sequence[StrategyVerdict]) -> Table:
    """Every strategy of the tree for a stage: for which layers it could be of use, and why not for the others."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in verdicts:
        alike.setdefault((each.verdict, each.reason, each.strategy), []).append(each.kind or "any")
    strategies: dict[tuple[str, str, str], list[str]] = {}
    for (verdict, reason, strategy), found in alike.items():
        strategies.setdefault((verdict, reason, ", ".join(found)), []).append(strategy)
    title = "Strategies in the pipeline configuration of this plan"
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
        table = plain_table("Never searched", "", "values", "why")
        for each in explanation.not_searched:
            table.add_row(each.what, each.values, each.reason)
        parts.append(table)
    if explanation.verdicts:
        parts.append(verdict_table(explanation.verdicts))
    return parts


def _stage(plan: Plan, index: int, what: str) -> str:
    return f"stage {index} {what}, " if plan.num_stages > 1 else ""
