r"""Other ways to cut a model into stages, for comparison: even, balanced in memory, and Galvatron-BMW's adjustment.

Strategies are still chosen exactly for given cuts; only the cuts are not searched. Galvatron-BMW starts from the
memory-balanced cuts $p_m$ and moves a boundary layer of the slowest stage to a neighbour. A move from $p$ to $p'$ is
accepted if

- (a) no stage of $p'$ is slower than the slowest stage of $p$,
- (b) every stage of $p'$ fits into the budget, and
- (c) no stage of $p'$ takes more memory than the fullest stage of the time-balanced cuts $p_t$.

Moves are tried from every accepted partition until none is left. Here $p_m$ is the partition whose fullest stage needs
the fewest bytes, and $p_t$ the one whose slowest stage is fastest if memory is ignored.

Source: Wang et al. 2023 (arXiv 2307.02031), section 4.2. The method is greedy: in contrast to `partition_exact` it is
not monotone in the budget or in the space, and it proves nothing.
"""

from collections import deque
from typing import Literal

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProblemError
from steelyard.plan.decisions import Partition
from steelyard.schedules import names_of
from steelyard.search.bounds import furthest_boundaries, least_budget, stage_memories
from steelyard.search.evaluate import Solution
from steelyard.search.partition import ConfigResult, assess_chain, best_for_boundaries
from steelyard.search.runs import PreparedTables


def partition_by(method: Partition, tables: CostTables, budget_bytes: int) -> ConfigResult:
    """Return the plan that an inexact method of cutting finds.

    The status is at most feasible, because other cuts may be faster, and infeasible without a miss if only these cuts
    do not fit.
    """
    if tables.pipeline.num_chunks > 1:
        raise InvalidProblemError(
            field="schedule",
            found=tables.pipeline.schedule.name,
            expected=f"{' or '.join(names_of(with_chunks=False))} for the partition {method!r}",
        )
    prospect = assess_chain(tables, budget_bytes)
    if isinstance(prospect, ConfigResult):
        return prospect
    cuts = even_boundaries if method == "even" else memory_balanced_boundaries
    start = best_for_boundaries(prospect.prepared, cuts(tables))
    if method == "bmw" and start is not None:
        start = _adjusted(prospect.prepared, start)
    status: Literal["feasible", "infeasible"] = "feasible" if start else "infeasible"
    return ConfigResult(status=status, solution=start, lower_bound_s=prospect.lower_bound_s)


def even_boundaries(tables: CostTables) -> tuple[int, ...]:
    """Return stages of equal numbers of layers; the sizes differ by one if the number does not divide."""
    layers, stages = len(tables.layers), tables.pipeline.num_stages
    return tuple(stage * layers // stages for stage in range(stages + 1))


def memory_balanced_boundaries(tables: CostTables) -> tuple[int, ...]:
    """Return the cuts whose fullest stage needs the fewest bytes if every layer has its smallest strategy."""
    memories = stage_memories(tables)
    needed = least_budget(tables, memories)
    found = furthest_boundaries(tables, memories, needed) if needed is not None else None
    return found or even_boundaries(tables)


def time_balanced_boundaries(tables: CostTables) -> tuple[int, ...]:
    """Return the cuts whose slowest stage is fastest if every layer has its fastest strategy, without resharding."""
    fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]
    prefix = np.concatenate(([0.0], np.cumsum(fastest)))
    spans = np.where(np.tri(len(prefix), k=0, dtype=bool).T, prefix - prefix[:, None], np.inf)
    np.fill_diagonal(spans, np.inf)
    slowest, chosen = spans[0], []
    for _ in range(1, tables.pipeline.num_stages):
        worst = np.maximum(slowest[:, None], spans + tables.transfer_s)
        chosen.append(worst.argmin(axis=0))
        slowest = worst.min(axis=0)
    boundaries = [len(tables.layers)]
    for best in reversed(chosen):
        boundaries.append(int(best[boundaries[-1]]))
    return (0, *reversed(boundaries))


def _adjusted(prepared: PreparedTables, start: Solution) -> Solution:
    """Return the fastest partition that Galvatron-BMW's adjustment visits from the memory-balanced cuts."""
    by_time = best_for_boundaries(prepared, time_balanced_boundaries(prepared.tables))
    most_bytes = by_time.peak_bytes if by_time else prepared.budget_bytes
    best, queue, seen = start, deque([start]), {start.boundaries}
    while queue:
        current = queue.popleft()
        for boundaries in neighbours(current):
            if boundaries in seen:
                continue
            seen.add(boundaries)
            found = best_for_boundaries(prepared, boundaries)
            if found is not None and is_accepted(found, current, most_bytes):
                queue.append(found)
                best = min(best, found, key=lambda plan: plan.step_s)
    return best


def is_accepted(found: Solution, current: Solution, most_bytes: int) -> bool:
    """Return whether a partition that fits, one move from ``current``, meets (a), and (c) with ``most_bytes``."""
    is_slower = max(stage.time_s for stage in found.stages) > max(stage.time_s for stage in current.stages)
    return not is_slower and found.peak_bytes <= most_bytes


def neighbours(current: Solution) -> list[tuple[int, ...]]:
    """Return the boundaries that move a boundary layer of the slowest stage to a neighbouring stage."""
    slowest = int(np.argmax([stage.time_s for stage in current.stages]))
    first, end = current.boundaries[slowest], current.boundaries[slowest + 1]
    if end - first < 2:
        return []
    found = []
    if slowest > 0:
        found.append((*current.boundaries[:slowest], first + 1, *current.boundaries[slowest + 1 :]))
    if slowest < len(current.stages) - 1:
        found.append((*current.boundaries[: slowest + 1], end - 1, *current.boundaries[slowest + 2 :]))
    return found
