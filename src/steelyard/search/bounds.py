r"""Lower bounds of seconds (by prices of memory) and of bytes for runs of layers on a stage.

*Seconds.* For any price $\lambda \ge 0$ of a byte, the layers $l..l'-1$ take on stage $i$ at least

$$\underline t_i(l, l') = \min_\tau \max_\lambda \Big[\sum_{j=l}^{l'-1} h_{\lambda,\tau}(k_j)
- \lambda\,(B - \tau)\Big], \qquad
h_{\lambda,\tau}(k) = \min_{s:\, u(k, s) \le \tau} \big(t(k, s) + \lambda\, b_i(k, s)\big)$$

seconds: a plan that fits, with transient peak $\tau$, does not get cheaper if it pays for its bytes and is paid for the
memory that the peak leaves. Neighbouring peaks share a level as in `layers`. Resharding is left out. If layers free
memory or leave buffers, only the moment of the last layer of the run counts, which works first, with nothing freed:
$\tau$ is then the size of the largest buffers, $u(k, s)$ that of the inner layers, and the last layer pays for its
working memory like for its other bytes. The bound is a difference of prefix sums and grows with the run. The best price
is a slope of the lower convex hull of some type's (bytes, seconds) points, so only these are tried.

*Bytes.* At an infinite price, time has no influence. Beyond the overhead a run needs at least

$$\min_\tau\Big(\tau + \sum_l \min_{s:\, u(k_l, s) \le \tau} b(k_l, s)\Big)$$

bytes, where $\tau$ runs over the peaks that are worth allowing (`threshold`). This grows with every layer, so stages
are filled greedily: a budget is feasible exactly if the last stage then reaches the last layer. The minimum feasible
budget follows by bisection over whole bytes, so the miss of an infeasible budget is exact. If layers free memory or
leave buffers alongside each other (not `CostTables.is_plain`), only the last layer of a stage counts with its transient
bytes, which is a lower bound; the same thresholds then give a plan of little memory, whose bytes are evaluated exactly.

| symbol    | name                | unit  | meaning                                                      |
|-----------|---------------------|-------|--------------------------------------------------------------|
| $b$       | `bytes`             | bytes | `static_bytes` + microbatches in flight × `activation_bytes` |
| $u$       | `transient_bytes`   | bytes | largest short-lived memory of a layer                        |
| $B$       | `room_bytes`        | bytes | budget minus overhead                                        |
| $\tau$    | `lower`, `upper`, `threshold` | bytes | transient peak, or a level of it                   |
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
from steelyard.search.layers import MAX_LEVELS, StageCosts, distinct, peak_levels

IMPOSSIBLE = MOST_BYTES
"""Bytes of a layer without a strategy: too large for any device, small enough for sums in int64."""

MAX_THRESHOLDS = 64
"""Number of transient peaks that are distinguished here. With more (all layers different), a budget that exceeds the
minimum by less than the step between two neighbours may be reported as too small."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Minimum bytes of any run of layers on a stage."""

    threshold: IntArray
    """[R] in rising order"""
    prefix: IntArray
    """[R, L + 1] bytes of the first layers, each under its smallest strategy within the threshold"""
    ended: IntArray
    """[R, L + 1] the same if the last of them ends its stage, in rising order"""

    def farthest(self, start: int, room_bytes: int) -> int:
        """Return the largest end such that the layers ``start..end-1`` fit; ``start`` if not even one does."""
        return int(self.all_farthest(room_bytes)[start])

    def all_farthest(self, room_bytes: int) -> IntArray:
        """Return [L] `farthest` from every layer."""
        first = np.arange(self.prefix.shape[1] - 1)
        found = first
        for row, ended, peak in zip(self.prefix, self.ended, self.threshold, strict=True):
            reach = np.searchsorted(ended, room_bytes - peak + row[:-1], side="right") - 1
            found = np.maximum(found, reach)
        return found

    def least_bytes(self, start: int, end: int) -> int:
        """Minimum bytes of the layers ``start..end-1``."""
        return int((self.ended[:, end] - self.prefix[:, start] + self.threshold).min())

    def smallest_start(self, end: int, room_bytes: int) -> int:
        """Return the smallest start such that the layers ``start..end-1`` fit; ``end`` if not even one does."""
        more = self.ended[:, end] + self.threshold - room_bytes
        return min(end, int((self.prefix < more[:, None]).sum(axis=1).min()))


def stage_memories(tables: CostTables) -> list[StageMemory]:
    """Return the memory of each stage; stages of a pool with equal microbatches in flight share one object."""
    alike = [tables.likeness(stage)[:2] for stage in range(tables.pipeline.num_stages)]
    shared: dict[tuple[int, int], StageMemory] = {}
    for pool in dict.fromkeys(pool for _, pool in alike):
        flights = sorted({in_flight for in_flight, own in alike if own == pool})
        legal = tables.legal_on(next(stage for stage, (_, own) in enumerate(alike) if own == pool))
        for in_flight, memory in zip(flights, memories_of(tables, legal, flights), strict=True):
            shared[in_flight, pool] = memory
    return [shared[each] for each in alike]


def memories_of(tables: CostTables, legal: NDArray[np.bool_], in_flight: Sequence[int]) -> Iterator[StageMemory]:
    """Yield the memory of a stage with ``legal`` strategies [K, S] for each number of microbatches in flight."""
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
    """Return [F, R, L + 1] bytes of the first layers, of which the last one ends a stage and takes ``least`` [F, R, K].

    A run counts at most the bytes of every longer run, so the bytes rise and are lower bounds.
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
    """Return [R] transient peaks worth allowing, rising, and [F, R, K] minimum bytes of legal strategies in each."""
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
    """Return stage boundaries 0..L that fill each stage in turn; None if too few layers are left for some stage."""
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
    """Return [P] of [L] the largest end of a run that fits on a stage by first layer; that layer if none does."""
    known: dict[tuple[object, ...], IntArray] = {}
    found = []
    for stage, (memory, room_bytes) in enumerate(zip(memories, tables.rooms(budget_bytes), strict=True)):
        key = tables.likeness(stage)
        if key not in known:
            known[key] = memory.all_farthest(room_bytes)
        found.append(known[key])
    return found


def boundaries_within(tables: CostTables, reaches: Sequence[IntArray]) -> tuple[int, ...] | None:
    """Return boundaries within the reach of every stage from its first layer; None if there are none.

    The last stages are as short as possible. Greedy filling does not work if stages differ: a filled stage may leave
    the next one a layer that it cannot hold.
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
    """Return [P + 1] of [L + 1] whether the first stages may end at this place."""
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
    """Return the smallest budget in bytes for which some plan fits; None if a layer has no legal strategy.

    Bisection: a feasible budget shrinks to the bytes of its stages, an infeasible one grows until some stage takes one
    more layer, so that a few steps find the exact byte.
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
    """Bytes of the fullest stage, overhead included."""
    return max(memory.least_bytes(*span) + more for (memory, span), more in zip(spans, overheads, strict=False))


def _next_budget(tables: CostTables, memories: Sequence[StageMemory], budget_bytes: int) -> int:
    """Return the smallest budget with which some stage takes more layers than with this infeasible one."""
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
    """Return one strategy per layer with the fewest bytes, or few, on each stage of these boundaries."""
    chosen: list[int] = []
    for stage, (start, end) in enumerate(itertools.pairwise(boundaries)):
        chosen.extend(_small_strategies(tables, stage, tables.run_types(range(start, end))))
    return tuple(chosen)


def _small_strategies(tables: CostTables, stage: int, layer_types: Sequence[int]) -> list[int]:
    """Return strategies for the layers of a stage: the best of the smallest ones within each threshold."""
    in_flight, used = tables.pipeline.in_flight(stage), sorted(set(layer_types))
    places, held = np.searchsorted(used, layer_types), tables.held_bytes(in_flight)
    works = (tables.transient_bytes + tables.buffers_of.sum(axis=0))[used]
    legal, own = tables.legal_on(stage)[used], held[used]
    peaks = distinct(works[legal])
    found = []
    for peak in peaks[np.linspace(0, len(peaks) - 1, min(len(peaks), MAX_THRESHOLDS)).round().astype(np.int64)]:
        for num_bytes in (own, own + works):
            size = np.where(legal & (works <= peak), num_bytes, np.where(legal, IMPOSSIBLE + works, 2 * IMPOSSIBLE))
            found.append(size.argmin(axis=1)[places])
    chosen = np.stack(found)
    total = held[list(layer_types), chosen].sum(axis=1) + tables.transient_of(layer_types, chosen, in_flight)
    best: list[int] = chosen[int(total.argmin())].tolist()
    return best


MAX_PRICES = 64
"""Maximum number of hull slopes; more are thinned out, and the bounds stay valid but become slightly weaker."""

MAX_BUFFER_LEVELS = 32
"""Number of sizes of buffers that are distinguished; more are grouped, which only weakens the bounds."""

MAX_TYPES = 32
"""Maximum number of layer types that prices are taken from; with more types, fewer prices are kept too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBounds:
    """Prefix sums that give the bounds of one stage."""

    costs: StageCosts
    room_bytes: int
    transfer_s: float
    prices: FloatArray
    """[A] in rising order, the first is 0"""
    lower: IntArray
    """[J] lower edges of the levels of transient peak, or of buffers (see the module)"""
    prefix_s: FloatArray
    """[J, A, L + 1] priced cost of the first layers, except those without an option in the level"""
    ended_s: FloatArray
    """[J, A, L + 1] the same if the last of them ends the run"""
    missing: IntArray
    """[J, L + 1] number of the first layers that, as inner layers, have no option in the level"""

    def matrix(self, starts: tuple[int, int], ends: tuple[int, int]) -> FloatArray:
        """Return [starts, ends] lower bounds in seconds, transfer included; infinite for empty runs.

        Starts and ends are consecutive, given as the first one and their number.
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
        """Return the prices around those that bound this run best on each level, and 0."""
        room = (self.room_bytes - self.lower).astype(np.float64)
        paid = self.ended_s[:, :, end] - self.prefix_s[:, :, start] - self.prices * room[:, None]
        around = np.argmax(paid, axis=1)[:, None] + np.arange(-2, 3)
        good: FloatArray = self.prices[distinct(np.append(np.clip(around, 0, len(self.prices) - 1), 0))]
        return good

    def farthest(self, start: int, limit_s: float) -> int:
        """Return the largest end whose bound from ``start`` is within the limit; ``start`` if no layer is."""
        ends = range(start + 1, self.prefix_s.shape[2])
        return start + bisect_right(ends, limit_s, key=lambda end: float(self.matrix((start, 1), (end, 1))[0, 0]))

    def smallest_start(self, end: int, limit_s: float) -> int:
        """Return the smallest start whose bound to ``end`` is within the limit; ``end`` if no layer is."""
        starts = range(end - 1, -1, -1)
        return end - bisect_right(starts, limit_s, key=lambda start: float(self.matrix((start, 1), (end, 1))[0, 0]))


def stage_bounds(costs: StageCosts, layers: Sequence[int], room_bytes: int, transfer_s: float) -> StageBounds:
    """Return the bounds of a stage with these costs for runs of the model's ``layers`` (their types)."""
    order, used = np.array(layers, dtype=np.int64), sorted(set(layers))
    ends = sorted({int(costs.lasts[layer_type]) for layer_type in used})
    prices = _hull_slopes(costs, used)
    transient, held = costs.transient, costs.rows[:, 6]
    if costs.is_plain:
        reach, working = np.stack([transient, transient]), np.zeros_like(transient)
    else:
        reach, working = np.stack([held, np.zeros_like(held)]), transient
    own = [reach[turn, each, : costs.count[each]] for turn, row in enumerate((used, ends)) for each in row]
    lower, upper = peak_levels(
        np.concatenate([np.zeros(1, np.int64), *own]), most=MAX_LEVELS if costs.is_plain else MAX_BUFFER_LEVELS
    )
    prefix, ended = np.zeros((2, len(lower), len(prices), len(layers) + 1))
    missing = np.zeros((len(lower), len(layers) + 1), dtype=np.int64)
    given = np.array(used), costs.count, costs.rows, costs.seconds, prices, upper, order, costs.lasts, reach, working
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
    """Return 0 and the slopes of the layer types' lower convex hulls in rising order, at most `MAX_PRICES`."""
    some, options = np.array(layer_types[:: -(-len(layer_types) // MAX_TYPES)]), costs.rows.shape[2]
    slopes, hull = np.zeros(len(some) * options + 1), np.empty(options, dtype=np.int64)
    count = kernels.hull_slopes(some, costs.count, costs.rows, costs.seconds, slopes[1:], hull)
    rising = distinct(slopes[: count + 1])
    most = MAX_PRICES if len(layer_types) <= MAX_TYPES else MAX_PRICES // 4
    if len(rising) > most:
        rising = rising[np.linspace(0, len(rising) - 1, most).round().astype(int)]
    return rising
