r"""Lower bounds of what runs of layers take on a stage: seconds, by prices of memory, and bytes.

*Seconds.* For any price $\lambda \ge 0$ of a byte, the layers $l..l'-1$ take on stage $i$ at least

$$\underline t_i(l, l') = \min_\tau \max_\lambda \Big[\sum_{j=l}^{l'-1} h_{\lambda,\tau}(k_j)
- \lambda\,(B - \tau)\Big], \qquad
h_{\lambda,\tau}(k) = \min_{s:\, u(k, s) \le \tau} \big(t(k, s) + \lambda\, b_i(k, s)\big)$$

seconds: a plan that fits, and whose transient peak is $\tau$, saves nothing by paying for its bytes and being paid for
the room that the peak leaves. Neighbouring peaks share a level as in `layers`. Switches are left out. While an inner
layer works, those behind it may have freed what they can; the last layer of the run works first, with nothing freed.
The bound is a difference of prefix sums and grows with the run. The best price is a slope of the lower convex hull of
some type's (bytes, seconds) points, so only these are tried.

*Bytes.* At price infinity time plays no part. Beyond the overhead a run needs at least

$$\min_\tau\Big(\tau + \sum_l \min_{s:\, u(k_l, s) \le \tau} b(k_l, s)\Big)$$

bytes, where $\tau$ runs over the peaks that are worth allowing (`threshold`). This grows with every layer, so stages
are filled greedily: a budget is feasible exactly if the last stage then reaches the last layer. The least feasible
budget follows by bisection over whole bytes, so the miss of an infeasible one is exact. Where layers free what they
hold, or leave buffers beside each other (not `CostTables.is_plain`), only the last layer of a stage counts with what it
works with, which bounds from below; a plan of little memory is sought by the same thresholds and weighed as it is.

| symbol    | name                | unit  | meaning                                                      |
|-----------|---------------------|-------|--------------------------------------------------------------|
| $b$       | `bytes`             | bytes | `static_bytes` + microbatches in flight × `activation_bytes` |
| $u$       | `transient_bytes`   | bytes | largest short-lived memory of a layer                        |
| $B$       | `room_bytes`        | bytes | budget less overhead                                         |
| $\tau$    | `lower`, `upper`, `threshold` | bytes | the transient peak, or a level of it               |
| $\lambda$ | `prices`            | s/B   | value of a byte                                              |

Source: weak Lagrangian duality; the hull argument is Dantzig's for the continuous knapsack.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.limits import MOST_BYTES
from steelyard.search import kernels
from steelyard.search.kernels import FloatArray, IntArray
from steelyard.search.layers import NO_LIMIT_BYTES, StageCosts, distinct, peak_levels

IMPOSSIBLE = MOST_BYTES
"""Bytes of a layer that has no strategy; so large that no device holds it, so small that sums stay in int64."""

MAX_THRESHOLDS = 64
"""Transient peaks told apart here. With more of them (layers all unlike) a budget that is short of the least one by up
to the step between two neighbours may be called too small."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Least bytes of any run of layers on a stage."""

    threshold: IntArray
    """[R] rising"""
    prefix: IntArray
    """[R, L + 1] bytes of the first layers, each under its smallest strategy within the threshold"""
    ended: IntArray
    """[R, L + 1] the same where the last of them is the last of its stage, rising"""

    def farthest(self, start: int, room_bytes: int) -> int:
        """The largest end such that the layers ``start..end-1`` fit into the room; ``start`` if not even one does."""
        return int(self.all_farthest(room_bytes)[start])

    def all_farthest(self, room_bytes: int) -> IntArray:
        """[L] `farthest` from every layer."""
        first = np.arange(self.prefix.shape[1] - 1)
        found = first
        for row, ended, peak in zip(self.prefix, self.ended, self.threshold, strict=True):
            reach = np.searchsorted(ended, room_bytes - peak + row[:-1], side="right") - 1
            found = np.maximum(found, reach)
        return found

    def least_bytes(self, start: int, end: int) -> int:
        """Least bytes of the layers ``start..end-1``."""
        return int((self.ended[:, end] - self.prefix[:, start] + self.threshold).min())

    def smallest_start(self, end: int, room_bytes: int) -> int:
        """The smallest start such that the layers ``start..end-1`` fit into the room; ``end`` if not even one does."""
        more = self.ended[:, end] + self.threshold - room_bytes
        return min(end, int((self.prefix < more[:, None]).sum(axis=1).min()))


def stage_memories(tables: CostTables) -> list[StageMemory]:
    """One for each stage; stages of a pool with equal microbatches in flight share theirs."""
    alike = [tables.likeness(stage)[:2] for stage in range(tables.pipeline.num_stages)]
    shared: dict[tuple[int, int], StageMemory] = {}
    for pool in dict.fromkeys(pool for _, pool in alike):
        flights = sorted({in_flight for in_flight, own in alike if own == pool})
        legal = tables.legal_on(next(stage for stage, (_, own) in enumerate(alike) if own == pool))
        for in_flight, memory in zip(flights, memories_of(tables, legal, flights), strict=True):
            shared[in_flight, pool] = memory
    return [shared[each] for each in alike]


def memories_of(tables: CostTables, legal: NDArray[np.bool_], in_flight: Sequence[int]) -> Iterator[StageMemory]:
    """Those of stages with each of these numbers of microbatches in flight, of the ``legal`` strategies [K, S]."""
    if tables.is_plain:
        threshold, least = _least_by_threshold(tables, legal, in_flight)
        last = least
    else:
        held = np.stack([np.where(legal, tables.held_bytes(each), IMPOSSIBLE) for each in in_flight])
        threshold, least = np.zeros(1, dtype=np.int64), held.min(axis=2, initial=IMPOSSIBLE)[:, None]
        last = (held + np.where(legal, tables.transient_bytes, 0)).min(axis=2, initial=IMPOSSIBLE)[:, None]
    prefix = np.zeros((*least.shape[:2], len(tables.layers) + 1), dtype=np.int64)
    np.cumsum(least[:, :, list(tables.layers)], axis=2, out=prefix[:, :, 1:])
    for each in zip(prefix, _ended(tables, prefix, last), strict=True):
        yield StageMemory(threshold=threshold, prefix=each[0], ended=each[1])


def _ended(tables: CostTables, prefix: IntArray, least: IntArray) -> IntArray:
    """[F, R, L + 1] bytes of the first layers, of which the last one ends a stage and takes ``least`` [F, R, K].

    Where a longer run would take less it counts as much less, so that the bytes rise: they bound from below then.
    """
    if tables.is_plain and not tables.last_types:
        return prefix
    ended, lasts = prefix.copy(), tables.last_types or range(len(tables.layer_types))
    ended[:, :, 1:] = prefix[:, :, :-1] + least[:, :, [lasts[layer_type] for layer_type in tables.layers]]
    ended[:] = np.minimum.accumulate(ended[:, :, ::-1], axis=2)[:, :, ::-1]
    return ended


def _least_by_threshold(
    tables: CostTables, legal: NDArray[np.bool_], in_flight: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """[R] transient peaks worth allowing, rising, and [F, R, K] the least bytes within each, of legal strategies."""
    num_bytes = np.stack([tables.held_bytes(each) for each in in_flight])
    num_bytes = np.where(legal, num_bytes, IMPOSSIBLE)
    transient = np.where(legal, tables.transient_bytes, 0)
    if not transient.any():
        return np.zeros(1, dtype=np.int64), num_bytes.min(axis=2, initial=IMPOSSIBLE)[:, None]
    order = np.argsort(transient, axis=1, kind="stable")
    rising = np.take_along_axis(transient, order, axis=1)
    least = np.full((len(in_flight), len(tables.layer_types), len(tables.strategies) + 1), IMPOSSIBLE)
    by_transient = np.take_along_axis(num_bytes, order[None], axis=2)
    np.minimum.accumulate(by_transient, axis=2, out=least[:, :, 1:])
    gains = (least[:, :, 1:] < least[:, :, :-1]).any(axis=0)
    threshold = distinct(rising[gains])
    if len(threshold) > MAX_THRESHOLDS:
        threshold = threshold[np.linspace(0, len(threshold) - 1, MAX_THRESHOLDS).round().astype(np.int64)]
    if len(threshold) == 0:
        threshold = np.zeros(1, dtype=np.int64)
    places = [np.searchsorted(row, threshold, side="right") for row in rising]
    return threshold, np.stack([least[:, layer_type, place] for layer_type, place in enumerate(places)], axis=2)


def furthest_boundaries(
    tables: CostTables, memories: Sequence[StageMemory], budget_bytes: int
) -> tuple[int, ...] | None:
    """Stage boundaries 0..L with as many layers as fit on each stage in turn; None if some stage is left too few."""
    num_layers, rooms = len(tables.layers), tables.rooms(budget_bytes)
    if tables.pools is not None:
        return boundaries_within(tables, memory_reaches(tables, memories, budget_bytes))
    boundaries = [0]
    for stage, memory in enumerate(memories):
        start = boundaries[-1]
        end = min(memory.farthest(start, rooms[stage]), num_layers - tables.least_layers_behind(stage))
        if end < start + tables.least_layers(stage):
            return None
        boundaries.append(end)
    return tuple(boundaries) if boundaries[-1] == num_layers else None


def memory_reaches(tables: CostTables, memories: Sequence[StageMemory], budget_bytes: int) -> list[IntArray]:
    """[P] of [L] the largest end of a run that fits on a stage, from every first layer; that layer if none does."""
    known: dict[tuple[object, ...], IntArray] = {}
    found = []
    for stage, (memory, room_bytes) in enumerate(zip(memories, tables.rooms(budget_bytes), strict=True)):
        key = tables.likeness(stage)
        if key not in known:
            known[key] = memory.all_farthest(room_bytes)
        found.append(known[key])
    return found


def boundaries_within(tables: CostTables, reaches: Sequence[IntArray]) -> tuple[int, ...] | None:
    """Boundaries where no stage goes beyond what it reaches from its first layer, the last stages as short as can be.

    None if there are none. Where stages are unlike, one that is filled may leave the next a layer that it cannot hold.
    """
    reached = reached_places(tables, reaches)
    place = len(tables.layers)
    if not reached[-1][place]:
        return None
    boundaries = [place]
    for stage in reversed(range(len(reaches))):
        starts = np.flatnonzero(reached[stage][: place - tables.least_layers(stage) + 1])
        place = int(starts[reaches[stage][starts] >= place][-1])
        boundaries.append(place)
    return tuple(reversed(boundaries))


def reached_places(tables: CostTables, reaches: Sequence[IntArray]) -> list[NDArray[np.bool_]]:
    """[P + 1] of [L + 1] whether the first stages may end there, each from where those before it may."""
    num_layers = len(tables.layers)
    reached = [np.arange(num_layers + 1) == 0]
    for stage, reach in enumerate(reaches):
        starts = np.flatnonzero(reached[-1][:num_layers])
        first = starts + tables.least_layers(stage)
        some = first <= reach[starts]
        edges = np.zeros(num_layers + 2, dtype=np.int64)
        np.add.at(edges, first[some], 1)
        np.add.at(edges, reach[starts[some]] + 1, -1)
        reached.append(np.cumsum(edges)[:-1] > 0)
    return reached


def least_budget(tables: CostTables, memories: Sequence[StageMemory]) -> int | None:
    """The smallest budget in bytes for which some plan fits; None if a layer has no legal strategy at all.

    Bisection; a feasible budget shrinks to what its stages take, an infeasible one grows to where some stage takes one
    layer more, so a handful of steps ends it at the exact byte.
    """
    too_few = len(tables.layers) < tables.least_layers_before(tables.pipeline.num_stages)
    if too_few or not tables.legal[list(set(tables.layers))].any(axis=1).all():
        return None
    overheads = [tables.overhead_of(stage) for stage in range(len(memories))]
    whole = ((memory, (0, len(tables.layers))) for memory in memories)
    low, high = min(overheads), _most_bytes(whole, overheads)
    while low < high:
        middle = (low + high) // 2
        boundaries = furthest_boundaries(tables, memories, middle)
        if boundaries is None:
            low = _next_budget(tables, memories, middle)
        else:
            high = _most_bytes(zip(memories, itertools.pairwise(boundaries), strict=False), overheads)
    return None if tables.pools is not None and high >= IMPOSSIBLE else high


def _most_bytes(spans: Iterable[tuple[StageMemory, tuple[int, int]]], overheads: Sequence[int]) -> int:
    """Bytes of the fullest stage that holds its span."""
    return max(memory.least_bytes(*span) + more for (memory, span), more in zip(spans, overheads, strict=False))


def _next_budget(tables: CostTables, memories: Sequence[StageMemory], budget_bytes: int) -> int:
    """The smallest budget in which some stage takes more layers than in this one, in which they do not all fit."""
    num_layers, place, nearest = len(tables.layers), 0, 2**62
    if tables.pools is not None:
        reaches = memory_reaches(tables, memories, budget_bytes)
        for stage, (reached, reach) in enumerate(zip(reached_places(tables, reaches), reaches, strict=False)):
            for start in np.flatnonzero(reached[:num_layers] & (reach < num_layers)).tolist():
                needed = memories[stage].least_bytes(start, int(reach[start]) + 1) + tables.overhead_of(stage)
                nearest = min(nearest, needed if needed > budget_bytes else nearest)
        return nearest
    for stage, (memory, room_bytes) in enumerate(zip(memories, tables.rooms(budget_bytes), strict=True)):
        end = min(memory.farthest(place, room_bytes), num_layers - tables.least_layers_behind(stage))
        if end < num_layers:
            more = memory.least_bytes(place, end + 1)
            nearest = min(nearest, more + tables.overhead_of(stage) if more > room_bytes else nearest)
        place = end
    return nearest


def least_memory_strategies(
    tables: CostTables, memories: Sequence[StageMemory], boundaries: Sequence[int]
) -> tuple[int, ...]:
    """One strategy per layer that takes the fewest bytes on each stage of these boundaries, or few."""
    chosen: list[int] = []
    for stage, (start, end) in enumerate(itertools.pairwise(boundaries)):
        chosen.extend(_small_strategies(tables, stage, tables.run_types(range(start, end))))
    return tuple(chosen)


def _small_strategies(tables: CostTables, stage: int, layer_types: Sequence[int]) -> list[int]:
    """Strategies for the layers of a stage: of those that hold least within each threshold the ones that take least."""
    in_flight = tables.pipeline.in_flight(stage)
    legal, held = tables.legal_on(stage), tables.held_bytes(in_flight)
    works = tables.transient_bytes + tables.buffers_of.sum(axis=0)
    used = sorted(set(layer_types))
    peaks = distinct(works[used][legal[used]])
    found = []
    for peak in peaks[np.linspace(0, len(peaks) - 1, min(len(peaks), MAX_THRESHOLDS)).round().astype(np.int64)]:
        for num_bytes in (held, held + works):
            size = np.where(legal & (works <= peak), num_bytes, np.where(legal, IMPOSSIBLE + works, 2 * IMPOSSIBLE))
            found.append(size.argmin(axis=1)[list(layer_types)])
    chosen = np.stack(found)
    total = held[list(layer_types), chosen].sum(axis=1) + tables.transient_of(layer_types, chosen, in_flight)
    best: list[int] = chosen[int(total.argmin())].tolist()
    return best


MAX_PRICES = 64
"""More hull slopes than this are thinned out; the bounds stay valid and become a little weaker."""

MAX_TYPES = 32
"""With more layer types than this, prices are taken from so many of them, and fewer of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBounds:
    """Prefix sums from which the bounds of one stage follow."""

    costs: StageCosts
    room_bytes: int
    transfer_s: float
    prices: FloatArray
    """[A] rising, the first is 0"""
    lower: IntArray
    """[J] lower edges of the levels of transient peak"""
    prefix_s: FloatArray
    """[J, A, L + 1] priced cost of the first layers, those without an option in the level left out"""
    ended_s: FloatArray
    """[J, A, L + 1] the same where the last of them ends the run"""
    missing: IntArray
    """[J, L + 1] how many of the first layers, as inner ones, have no option in the level"""

    def matrix(self, starts: tuple[int, int], ends: tuple[int, int]) -> FloatArray:
        """[starts, ends] lower bounds in seconds, transfer included; infinite for empty runs.

        Starts and ends are consecutive, given as the first one and how many.
        """
        found = np.empty((starts[1], ends[1]))
        kernels.run_bounds(
            self.prefix_s,
            self.ended_s,
            self.missing,
            self.prices,
            self.lower,
            self.room_bytes,
            starts[0],
            ends[0],
            found,
        )
        found += self.transfer_s
        return found

    def good_prices(self, start: int, end: int) -> FloatArray:
        """Prices around those that bound this run best on each level, and 0."""
        room = (self.room_bytes - self.lower).astype(np.float64)
        paid = self.ended_s[:, :, end] - self.prefix_s[:, :, start] - self.prices * room[:, None]
        around = np.argmax(paid, axis=1)[:, None] + np.arange(-2, 3)
        good: FloatArray = self.prices[distinct(np.append(np.clip(around, 0, len(self.prices) - 1), 0))]
        return good

    def farthest(self, start: int, limit_s: float) -> int:
        """The largest end whose bound from ``start`` stays within the limit; ``start`` if not even one layer does."""
        return int(
            kernels.farthest(
                self.prefix_s,
                self.ended_s,
                self.missing,
                self.prices,
                self.lower,
                self.room_bytes,
                start,
                self.transfer_s,
                limit_s,
            )
        )

    def smallest_start(self, end: int, limit_s: float) -> int:
        """The smallest start whose bound to ``end`` stays within the limit; ``end`` if not even one layer does."""
        starts = range(end - 1, -1, -1)
        return end - bisect_right(starts, limit_s, key=lambda start: float(self.matrix((start, 1), (end, 1))[0, 0]))


def stage_bounds(costs: StageCosts, layers: Sequence[int], room_bytes: int, transfer_s: float) -> StageBounds:
    """The bounds of a stage with these costs for runs of the model's ``layers`` (their types)."""
    order, used = np.array(layers, dtype=np.int64), sorted(set(layers))
    ends = sorted({int(costs.lasts[layer_type]) for layer_type in used})
    prices = _hull_slopes(costs, used)
    reach = costs.transient + costs.rows[:, 6]
    peaks = np.concatenate([reach[layer_type, : costs.count[layer_type]] for layer_type in {*used, *ends}])
    least = np.concatenate([costs.transient[layer_type, : costs.count[layer_type]] for layer_type in ends])
    if len(least) == 0:
        lower, upper = (np.zeros(1, np.int64),) * 2
    else:
        lower, upper = peak_levels(peaks, None if costs.is_plain else int(least.min()))
    prefix, ended = np.zeros((2, len(lower), len(prices), len(layers) + 1))
    missing = np.zeros((len(lower), len(layers) + 1), dtype=np.int64)
    freed = 0 if costs.is_plain else costs.most_freed([*layers, *(int(each) for each in costs.lasts[list(layers)])])
    end = int(least.min(initial=NO_LIMIT_BYTES))
    given = np.array(used), costs.count, costs.rows, costs.seconds, prices, upper, order, costs.lasts, freed, end
    kernels.priced_prefixes(*given, np.empty((len(costs.count), len(prices))), prefix, ended, missing)
    return StageBounds(
        costs=costs,
        room_bytes=room_bytes,
        transfer_s=transfer_s,
        prices=prices,
        lower=lower,
        prefix_s=prefix,
        ended_s=ended,
        missing=missing,
    )


def _hull_slopes(costs: StageCosts, layer_types: Sequence[int]) -> FloatArray:
    """0 and the slopes of the layer types' lower convex hulls, rising, at most `MAX_PRICES` of them."""
    some, options = np.array(layer_types[:: -(-len(layer_types) // MAX_TYPES)]), costs.rows.shape[2]
    slopes, hull = np.zeros(len(some) * options + 1), np.empty(options, dtype=np.int64)
    count = kernels.hull_slopes(some, costs.count, costs.rows, costs.seconds, slopes[1:], hull)
    rising = distinct(slopes[: count + 1])
    most = MAX_PRICES if len(layer_types) <= MAX_TYPES else MAX_PRICES // 4
    if len(rising) > most:
        rising = rising[np.linspace(0, len(rising) - 1, most).round().astype(int)]
    return rising
