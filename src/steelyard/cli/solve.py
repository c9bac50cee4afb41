"""``steelyard solve``: the search on cost tables from a file, with no model and no torch."""

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import AsJson, Memory, print_json
from steelyard.search import SearchResult, load_problem, solve_problem
from steelyard.units import format_bytes, format_seconds, parse_bytes


def solve(
    path: Annotated[
        Path, typer.Argument(help="A problem file; see `steelyard plan --save-problem`.", metavar="PROBLEM")
    ],
    memory: Memory = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds after which the best so far is taken.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest choice for cost tables of your own."""
    problem = load_problem(path)
    budget = None if memory is None else parse_bytes(memory)
    result = solve_problem(problem, budget, time_limit_s=time_limit)
    if as_json:
        print_json(_as_json(result))
    else:
        for line in _as_lines(problem.name, result):
            print(line)
    if result.best is None:
        raise typer.Exit(1)


def _as_json(result: SearchResult) -> dict[str, object]:
    best = result.best
    content: dict[str, object] = {"status": result.status, "budget_bytes": result.budget_bytes, "gap": result.gap}
    if best is None:
        miss = result.nearest_miss
        return content | {"missing_bytes": None if miss is None else miss.miss_bytes}
    solution = best.solution
    return content | {
        "setting": best.index,
        "step_s": solution.step_s,
        "peak_bytes": solution.peak_bytes,
        "boundaries": list(solution.boundaries),
        "strategies": [str(best.tables.strategies[index]) for index in solution.strategies],
    }


def _as_lines(name: str, result: SearchResult) -> list[str]:
    best = result.best
    if best is None:
        miss = result.nearest_miss
        missing = (
            "no budget helps" if miss is None else f"{format_bytes(miss.miss_bytes)} ({miss.miss_bytes} bytes) short"
        )
        return [f"{name}: nothing fits in {format_bytes(result.budget_bytes)}: {missing}"]
    tables, solution = best.tables, best.solution
    lines = [
        f"{name}: {format_seconds(solution.step_s)} a step, {result.status}, "
        f"{format_bytes(solution.peak_bytes)} of {format_bytes(result.budget_bytes)}",
        f"{tables.num_stages} stages, {tables.num_microbatches} microbatches, {tables.schedule}",
    ]
    for stage in solution.stages:
        first, end = stage.first_layer, stage.first_layer + stage.num_layers
        chosen = [str(tables.strategies[index]) for index in solution.strategies[first:end]]
        counts = {text: chosen.count(text) for text in dict.fromkeys(chosen)}
        used = ", ".join(f"{text} ×{count}" for text, count in counts.items())
        lines.append(f"  layers {first}–{end - 1}: {format_seconds(stage.time_s)} a microbatch: {used}")
    return lines
