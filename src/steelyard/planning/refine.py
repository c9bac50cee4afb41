"""Gives layers of an accepted plan faster strategies as long as the walk accepts them, first layers of a stage first.

What the layers behind one have saved is freed before it works backwards. So the first layers of a stage have room for
strategies that no sum over its layers grants them, and the tables and floors that a search adds up are such sums.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.search.evaluate import Solution, evaluate

LEAST_GAIN = 1e-6
"""Changes that save no more than this fraction of a step are not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A strategy for layers of one kind on one stage, of which it may suit the first few."""

    strategy: int
    layers: tuple[int, ...]
    step_s: float
    """About what a step takes when all of them have it."""


def refined(
    tables: CostTables,
    solution: Solution,
    *,
    is_refused: Callable[[Sequence[int]], bool],
    fits: Callable[[Solution], bool],
    is_over: Callable[[], bool],
) -> Solution:
    """The solution with faster strategies for as many first layers as fit, the change that saves most first.

    ``fits`` judges a solution; of strategies that are known not to fit ``is_refused`` says so before they are priced.
    Ends when no change saves anything, or when the time ``is_over``.
    """
    refused: set[tuple[int, int]] = set()
    while True:
        best = solution
        for change in sorted(_changes(tables, solution), key=lambda each: each.step_s):
            if change.step_s >= best.step_s * (1 - LEAST_GAIN) or is_over():
                break
            place = change.strategy, change.layers[0]
            if place in refused:
                continue
            found = _most(tables, solution, change, fits, is_refused)
            if found is None:
                refused.add(place)
            elif found.step_s < best.step_s * (1 - LEAST_GAIN):
                best = found
        if best is solution:
            return solution
        solution = best


def _changes(tables: CostTables, solution: Solution) -> Iterator[_Change]:
    times, more = [stage.time_s for stage in solution.stages], tables.pipeline.num_passes - 1
    for stage, (first, end) in enumerate(itertools.pairwise(solution.boundaries)):
        others_s, slowest_s = sum(times) - times[stage], max(times[:stage] + times[stage + 1 :], default=0.0)
        for kind in sorted(set(tables.layers[first:end])):
            own = np.array([layer for layer in range(first, end) if tables.layers[layer] == kind])
            now_s = tables.time_s[kind, [solution.strategies[layer] for layer in own]]
            for strategy in np.flatnonzero(tables.legal_on(stage)[kind]).tolist():
                saved_s = now_s - tables.time_s[kind, strategy]
                stage_s = times[stage] - float(saved_s[saved_s > 0].sum())
                layers = tuple(own[saved_s > 0].tolist())
                if layers:
                    step_s = others_s + stage_s + more * max(slowest_s, stage_s)
                    yield _Change(strategy=strategy, layers=layers, step_s=step_s)


def _most(
    tables: CostTables,
    solution: Solution,
    change: _Change,
    fits: Callable[[Solution], bool],
    is_refused: Callable[[Sequence[int]], bool],
) -> Solution | None:
    """The solution with a change for as many layers as fit; None where not even the first does."""
    best, low, high, count = None, 0, len(change.layers), 1
    while low < high:
        strategies = list(solution.strategies)
        for layer in change.layers[:count]:
            strategies[layer] = change.strategy
        changed = None if is_refused(strategies) else evaluate(tables, solution.boundaries, strategies)
        if changed is not None and fits(changed):
            best, low = changed, count
        elif count == 1:
            return None
        else:
            high = count - 1
        count = math.ceil((low + high) / 2)
    return best
