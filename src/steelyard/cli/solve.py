"""``steelyard solve``: search on cost tables from a file, without a model and without torch."""

from pathlib import Path
from typing import Annotated, NotRequired

import typer
from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.plan.choices import StrategyVerdict
from steelyard.report.explain_view import solve_view, step_table, verdict_table
from steelyard.report.tables import console
from steelyard.search import TIME_LIMIT_S, SearchResult
from steelyard.search.problem import load_problem, solve_problem
from steelyard.search.reasons import strategy_verdicts
from steelyard.search.tradeoff import SampledFrontier, sampled_frontier
from steelyard.units import parse_bytes

MAX_SEARCHES = 32


class Searched(TypedDict):
    """The best plan of a pipeline configuration, or the reason why there is none."""

    setting: int
    num_stages: int
    num_microbatches: int
    schedule: str
    step_s: float | None
    reason: str


class FrontierStep(TypedDict):
    """The fastest choice within some memory."""

    peak_bytes: int
    step_s: float
    score_s: float
    setting: int


class Solved(TypedDict):
    """The fastest choice, or the bytes that the nearest one lacks."""

    status: str
    budget_bytes: int | None
    gap: float | None
    missing_bytes: NotRequired[int | None]
    setting: NotRequired[int]
    step_s: NotRequired[float]
    peak_bytes: NotRequired[int]
    boundaries: NotRequired[list[int]]
    strategies: NotRequired[list[str]]
    settings: list[Searched]
    frontier_is_complete: NotRequired[bool]
    frontier: NotRequired[list[FrontierStep]]
    verdicts: NotRequired[tuple[StrategyVerdict, ...]]


_FILE = "Problem file, as `steelyard plan --save-problem` writes it."
_ALL = "Also list illegal and dominated strategies, with reasons."


@options.prints(Solved)
def solve(
    path: Annotated[Path, typer.Argument(help=_FILE, metavar="PROBLEM")],
    memory: options.Memory = None,
    time_limit: options.TimeLimit = TIME_LIMIT_S,
    with_frontier: Annotated[bool, options.option("--frontier", None, "Also show time against memory.")] = False,
    points: Annotated[int, options.points("Number of memory budgets of --frontier.", "32")] = MAX_SEARCHES,
    everything: Annotated[bool, options.option("--all", None, _ALL)] = False,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest plan for cost tables of your own."""
    problem = load_problem(path)
    budget = None if memory is None else parse_bytes(memory)
    with options.progress("searching", silent=as_json):
        result = solve_problem(problem, budget, time_limit_s=time_limit)
        frontier = (
            sampled_frontier(problem.configs, samples=problem.samples, max_searches=points, time_limit_s=time_limit)
            if with_frontier
            else None
        )
        shown = result.best or result.configs[0]
        verdicts = strategy_verdicts(shown.tables) if everything else ()
    if as_json:
        options.print_json(_as_json(result, frontier, verdicts))
    else:
        terminal = console()
        terminal.print(solve_view(problem.name, result))
        if frontier is not None:
            terminal.print(step_table(frontier))
        if verdicts:
            terminal.print(verdict_table(verdicts))
    if result.best is None:
        raise typer.Exit(1)


def _as_json(result: SearchResult, frontier: SampledFrontier | None, verdicts: tuple[StrategyVerdict, ...]) -> Solved:
    best, miss = result.best, result.nearest_miss
    settings: list[Searched] = [
        {
            "setting": each.index,
            "num_stages": each.pipeline.num_stages,
            "num_microbatches": each.pipeline.num_microbatches,
            "schedule": each.pipeline.schedule.name,
            "step_s": each.solution.step_s if each.result.solution else None,
            "reason": each.reason,
        }
        for each in result.configs
    ]
    content = Solved(status=result.status, budget_bytes=result.budget_bytes, gap=result.gap, settings=settings)
    if best is None:
        content["missing_bytes"] = None if miss is None else miss.miss_bytes
    else:
        content["setting"] = best.index
        content["step_s"] = best.solution.step_s
        content["peak_bytes"] = best.solution.peak_bytes
        content["boundaries"] = list(best.solution.boundaries)
        content["strategies"] = [str(best.tables.strategies[index]) for index in best.solution.strategies]
    if frontier is not None:
        content["frontier_is_complete"] = frontier.is_complete
        content["frontier"] = [
            {
                "peak_bytes": step.peak_bytes,
                "step_s": step.outcome.solution.step_s,
                "score_s": step.score_s,
                "setting": step.outcome.index,
            }
            for step in frontier.steps
        ]
    if verdicts:
        content["verdicts"] = verdicts
    return content
