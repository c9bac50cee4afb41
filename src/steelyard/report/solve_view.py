"""The result of a search on bare cost tables for the terminal: the choice, what lost and why, and the frontier."""

from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from steelyard.report.tables import number, plain_table
from steelyard.search import ConfigOutcome, SearchResult
from steelyard.search.tradeoff import SampledFrontier
from steelyard.units import format_bytes, format_plural, format_seconds


def solve_view(name: str, result: SearchResult) -> RenderableType:
    """The choice stage by stage, or what is missing, and every configuration with its reason."""
    best = result.best
    parts: list[RenderableType] = [Text(solve_headline(name, result), style="bold")]
    if best is not None:
        parts += [Text(line) for line in choice_lines(best)]
    return Group(*parts, config_table(result))


def solve_headline(name: str, result: SearchResult) -> str:
    """The outcome in a sentence."""
    best = result.best
    if best is None:
        miss = result.nearest_miss
        missing = (
            "no budget helps" if miss is None else f"{format_bytes(miss.miss_bytes)} ({miss.miss_bytes} bytes) short"
        )
        return f"{name}: nothing fits in {format_bytes(result.budget_bytes)}: {missing}"
    proof = "optimal" if result.status == "optimal" else f"best so far, gap {result.gap:.2%}"
    return (
        f"{name}: {format_seconds(best.solution.step_s)} a step, {proof}, "
        f"{format_bytes(best.solution.peak_bytes)} of {format_bytes(result.budget_bytes)}"
    )


def choice_lines(outcome: ConfigOutcome) -> list[str]:
    """The configuration, then the strategies of each stage."""
    tables, solution = outcome.tables, outcome.solution
    lines = [_config(outcome)]
    for stage, (first, end) in zip(solution.stages, pairwise(solution.boundaries), strict=True):
        chosen = [str(tables.strategies[index]) for index in solution.strategies[first:end]]
        counts = {text: chosen.count(text) for text in dict.fromkeys(chosen)}
        used = ", ".join(f"{text} ×{count}" for text, count in counts.items())
        lines.append(f"  layers {first}–{end - 1}: {format_seconds(stage.time_s)} a microbatch: {used}")
    return lines


def config_table(result: SearchResult) -> Table:
    """Every pipeline configuration of the tables, best first, and why it won, lost or does not fit."""
    table = plain_table("Configurations", "configuration", number("step", whole=True), "why")
    unsolved = [outcome for outcome in result.configs if outcome.result.solution is None]
    for outcome in (*result.ranked, *unsolved):
        found = outcome.result.solution
        table.add_row(_config(outcome), "–" if found is None else format_seconds(found.step_s), outcome.reason)
    return table


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
