"""Puts equal strategies next to each other where that costs nothing, so that a plan reads well.

Layers of one type are interchangeable within a stage: any order of their strategies takes the same time but for the
switches between them, and about the same memory. The search returns one of many equal orders; this picks one with the
fewest changes of strategy among those that are no slower and fit.
"""

from itertools import groupby

from steelyard.cost.tables import CostTables
from steelyard.search.evaluate import Solution, evaluate


def group_equal_strategies(tables: CostTables, solution: Solution, room_bytes: int = 0) -> Solution:
    """The solution with the strategies of every run of equal layers grouped, else unchanged.

    So it is if that is slower, or takes more than before and than ``room_bytes``.
    """
    chosen = list(solution.strategies)
    for start, end in _runs_of_equal_layers(tables, solution):
        order = list(dict.fromkeys(chosen[start:end]))
        if start > 0 and chosen[start - 1] in order:
            order.remove(chosen[start - 1])
            order.insert(0, chosen[start - 1])
        chosen[start:end] = sorted(chosen[start:end], key=order.index)
    tidy = evaluate(tables, solution.boundaries, chosen)
    is_no_worse = tidy.peak_bytes <= max(room_bytes, solution.peak_bytes)
    return tidy if is_no_worse and tidy.step_s <= solution.step_s * (1 + 1e-12) else solution


def _runs_of_equal_layers(tables: CostTables, solution: Solution) -> list[tuple[int, int]]:
    """First layer and end of every run of layers of one type within one stage."""
    runs = []
    for stage in solution.stages:
        layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        for _, run in groupby(layers, key=lambda layer: tables.layers[layer]):
            members = list(run)
            runs.append((members[0], members[-1] + 1))
    return runs
