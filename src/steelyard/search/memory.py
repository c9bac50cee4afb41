r"""Least memory: does anything fit, and if not, by how many bytes does it miss?

Time plays no part here. A run of layers needs at least

$$\min_\tau\Big(\tau + \sum_l \min_{s:\, u(k_l, s) \le \tau} b(k_l, s)\Big)$$

bytes on stage $i$ beyond the overhead $o$, where $\tau$ runs over the transient peaks that are worth allowing. This
grows with every layer added, so for a budget $M$ the stages are filled greedily, each with as many layers as fit:
the budget is feasible exactly if the last stage reaches the last layer. The least feasible budget follows by
bisection over whole bytes, so the miss is exact.

| symbol | name              | unit  | meaning                                                      |
|--------|-------------------|-------|--------------------------------------------------------------|
| $b$    | –                 | bytes | `static_bytes` + microbatches in flight × `activation_bytes` |
| $u$    | `transient_bytes` | bytes | largest short-lived memory of a layer                        |
| $\tau$ | `threshold`       | bytes | allowed transient peak of the stage                          |
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.search.frontier import IntArray

IMPOSSIBLE = 2**48
"""Bytes of a layer that has no strategy; so large that no device holds it, so small that sums stay in int64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Least bytes of any run of layers on a stage."""

    threshold: IntArray
    """[R] rising"""
    prefix: IntArray
    """[R, L + 1] bytes of the first layers, each under its smallest strategy within the threshold"""

    def farthest(self, start: int, room_bytes: int) -> int:
        """The largest end such that the layers ``start..end-1`` fit into the room; ``start`` if not even one does."""
        need = self.prefix - self.prefix[:, start : start + 1] + self.threshold[:, None]
        fits = np.any(need <= room_bytes, axis=0)
        fits[: start + 1] = True
        return int(np.flatnonzero(fits)[-1])

    def least_bytes(self, start: int, end: int) -> int:
        """Least bytes of the layers ``start..end-1``."""
        return int(np.min(self.prefix[:, end] - self.prefix[:, start] + self.threshold))

    def smallest_start(self, end: int, room_bytes: int) -> int:
        """The smallest start such that the layers ``start..end-1`` fit into the room; ``end`` if not even one does."""
        need = self.prefix[:, end : end + 1] - self.prefix + self.threshold[:, None]
        fits = np.any(need <= room_bytes, axis=0)
        fits[end:] = True
        return int(np.flatnonzero(fits)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """How far the budget is from the least one that holds some plan, and what stands in the way.

    ``layer`` is the layer of the binding stage that takes most bytes when the stage takes as few as it can.
    """

    needed_bytes: int
    miss_bytes: int
    stage: int
    layer: int
    boundaries: tuple[int, ...]


def stage_memories(tables: CostTables) -> list[StageMemory]:
    """One for each stage; stages with equal microbatches in flight share theirs."""
    shared = {n: _stage_memory(tables, n) for n in {tables.in_flight(stage) for stage in range(tables.num_stages)}}
    return [shared[tables.in_flight(stage)] for stage in range(tables.num_stages)]


def _stage_memory(tables: CostTables, in_flight: int) -> StageMemory:
    num_bytes = np.where(tables.legal, tables.static_bytes + in_flight * tables.activation_bytes, IMPOSSIBLE)
    transient = np.where(tables.legal, tables.transient_bytes, 0)
    order = np.lexsort((num_bytes, transient), axis=1)
    by_transient = np.take_along_axis(num_bytes, order, axis=1)
    least = np.minimum.accumulate(by_transient, axis=1)
    gains = np.ones_like(least, dtype=bool)
    gains[:, 1:] = least[:, 1:] < least[:, :-1]
    threshold = np.unique(np.take_along_axis(transient, order, axis=1)[gains])
    allowed = tables.transient_bytes[None] <= threshold[:, None, None]
    per_kind = np.where(allowed, num_bytes[None], IMPOSSIBLE).min(axis=2)
    prefix = np.zeros((len(threshold), len(tables.layers) + 1), dtype=np.int64)
    np.cumsum(per_kind[:, list(tables.layers)], axis=1, out=prefix[:, 1:])
    return StageMemory(threshold=threshold, prefix=prefix)


def furthest_boundaries(memories: Sequence[StageMemory], room_bytes: int) -> tuple[int, ...] | None:
    """Stage boundaries 0..L with as many layers as fit on each stage in turn, at least one each; None if none fit."""
    num_layers, num_stages = memories[0].prefix.shape[1] - 1, len(memories)
    boundaries = [0]
    for stage, memory in enumerate(memories):
        start = boundaries[-1]
        end = min(memory.farthest(start, room_bytes), num_layers - (num_stages - 1 - stage))
        if end <= start:
            return None
        boundaries.append(end)
    return tuple(boundaries) if boundaries[-1] == num_layers else None


def least_budget(tables: CostTables, memories: Sequence[StageMemory]) -> int | None:
    """The smallest budget in bytes for which some plan fits; None if a layer has no legal strategy at all."""
    if len(tables.layers) < tables.num_stages or not tables.legal[list(set(tables.layers))].any(axis=1).all():
        return None
    low, high = -1, max(memory.least_bytes(0, len(tables.layers)) for memory in memories)
    while high - low > 1:
        middle = (low + high) // 2
        if furthest_boundaries(memories, middle) is None:
            low = middle
        else:
            high = middle
    return high + tables.overhead_bytes


def nearest_miss(tables: CostTables, budget_bytes: int) -> NearestMiss | None:
    """What the smallest feasible budget is and where it binds; None if no budget would do."""
    memories = stage_memories(tables)
    needed = least_budget(tables, memories)
    if needed is None:
        return None
    boundaries = furthest_boundaries(memories, needed - tables.overhead_bytes)
    assert boundaries is not None, "the least budget is feasible by its definition"
    used = [memory.least_bytes(a, b) for memory, a, b in zip(memories, boundaries, boundaries[1:], strict=False)]
    stage = int(np.argmax(used))
    start, end = boundaries[stage], boundaries[stage + 1]
    alone = [memories[stage].least_bytes(layer, layer + 1) for layer in range(start, end)]
    return NearestMiss(
        needed_bytes=needed,
        miss_bytes=needed - budget_bytes,
        stage=stage,
        layer=start + int(np.argmax(alone)),
        boundaries=boundaries,
    )


def least_memory_strategies(
    tables: CostTables, memories: Sequence[StageMemory], boundaries: Sequence[int]
) -> tuple[int, ...]:
    """One strategy per layer that takes the fewest bytes on each stage of these boundaries."""
    chosen: list[int] = []
    for stage, (start, end) in enumerate(itertools.pairwise(boundaries)):
        memory = memories[stage]
        best = int(np.argmin(memory.prefix[:, end] - memory.prefix[:, start] + memory.threshold))
        num_bytes = tables.static_bytes + tables.in_flight(stage) * tables.activation_bytes
        allowed = tables.legal & (tables.transient_bytes <= memory.threshold[best])
        smallest = np.where(allowed, num_bytes, IMPOSSIBLE).argmin(axis=1)
        chosen.extend(int(smallest[tables.layers[layer]]) for layer in range(start, end))
    return tuple(chosen)
