"""The plan that takes least memory by the walk: the nearest miss where no plan is accepted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from steelyard.cost.pools import usable_of
from steelyard.cost.tables import CostTables
from steelyard.planning.plan_from_search import grouped_plan
from steelyard.planning.walked_settings import WalkedSettings, outcome_of, walked_bytes
from steelyard.search import NearestMiss, SettingOutcome, SettingResult
from steelyard.search.evaluate import evaluate
from steelyard.search.least_memory import IMPOSSIBLE, least_memory_strategies, nearest_miss, stage_memories

NUM_SMALL = 8
"""Strategies of least memory by a floor that are tried for the layers of the plan of least memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Least:
    """The plan of least memory of a setting, by the walk."""

    outcome: SettingOutcome
    walked_bytes: int
    miss: NearestMiss


def least_plan(settings: WalkedSettings) -> Least | None:
    """The plan that takes least of all settings; None where some layer has no legal strategy in any.

    Of each setting the plans of least memory by its tables are walked; those whose floor is above the best are left.
    Then the layers of the best one are changed, those of a kind on a stage together, as long as the walk takes less.
    """
    best: Least | None = None
    needed = {index: miss.needed_bytes for index, miss in misses(settings)}
    for index in sorted(needed, key=lambda index: needed[index]):
        if best is not None and needed[index] >= best.walked_bytes:
            break
        for tables in (settings.given[index].tables, *settings.floors(index)):
            least = _least_of(settings, index, tables)
            if least is not None and (best is None or least.walked_bytes < best.walked_bytes):
                best = least
    return None if best is None else _lessened(settings, best)


def _lessened(settings: WalkedSettings, least: Least) -> Least:
    """A plan of the same cuts that takes less by the walk, where one is found by changing some layers at a time."""
    tables = settings.floors(least.outcome.index)[0]
    cuts = least.outcome.solution.boundaries
    best, is_better = least, True
    while is_better:
        is_better = False
        for stage, span in enumerate(pairwise(cuts)):
            for kind in dict.fromkeys(tables.layers[slice(*span)]):
                own = [layer for layer in range(*span) if tables.layers[layer] == kind]
                for strategy in _small_strategies(settings, least.outcome.index, kind, stage):
                    chosen = list(best.outcome.solution.strategies)
                    for layer in own:
                        chosen[layer] = strategy
                    tried = _walked(settings, least, tables, cuts, chosen)
                    if tried.walked_bytes < best.walked_bytes:
                        best, is_better = tried, True
    return best


def _small_strategies(settings: WalkedSettings, index: int, kind: int, stage: int) -> list[int]:
    """The strategies of a kind that take least by some floor of a setting."""
    found: dict[int, None] = {}
    for tables in settings.floors(index):
        num_bytes = tables.held_bytes(tables.pipeline.in_flight(stage))[kind]
        legal = tables.legal_on(stage)[kind]
        order = np.argsort(np.where(legal, num_bytes, IMPOSSIBLE), kind="stable")
        found.update(dict.fromkeys(each for each in order[:NUM_SMALL].tolist() if legal[each]))
    return list(found)


def misses(settings: WalkedSettings) -> Iterator[tuple[int, NearestMiss]]:
    """By the index of each setting, what its floor needs at least; of none without a legal strategy for each layer."""
    for index, each in enumerate(settings.given):
        if settings.left_s == 0 and not each.is_made:
            continue
        miss = nearest_miss(settings.floors(index)[0], 0)
        if miss is not None:
            yield index, miss


def _least_of(settings: WalkedSettings, index: int, tables: CostTables) -> Least | None:
    memories = stage_memories(tables)
    miss = nearest_miss(tables, 0, memories)
    if miss is None:
        return None
    chosen = least_memory_strategies(tables, memories, miss.boundaries)
    solution = evaluate(tables, miss.boundaries, chosen)
    outcome = outcome_of(index, tables, SettingResult(status="feasible", solution=solution, lower_bound_s=0.0))
    return _weighed(settings, outcome, miss)


def _walked(
    settings: WalkedSettings, least: Least, tables: CostTables, cuts: Sequence[int], chosen: Sequence[int]
) -> Least:
    result = SettingResult(status="feasible", solution=evaluate(tables, cuts, chosen), lower_bound_s=0.0)
    return _weighed(settings, outcome_of(least.outcome.index, tables, result), least.miss)


def _weighed(settings: WalkedSettings, outcome: SettingOutcome, miss: NearestMiss) -> Least:
    """An outcome with the bytes that the walk of its plan finds, and what they miss."""
    walked = walked_bytes(grouped_plan(settings.job, outcome), settings.job)
    missing = walked - usable_of(settings.job)
    return Least(outcome=outcome, walked_bytes=walked, miss=replace(miss, needed_bytes=walked, miss_bytes=missing))
