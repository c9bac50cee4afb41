r"""Lower bounds of the step time of pipelines over different stages, from the layers' times and bytes alone.

On stage $i$ of $P$ a layer of type $k$ under strategy $s$ takes $t_i(k, s)$ seconds and at least $b_i(k, s)$ of the
$B_i$ bytes of the stage. The slowest stage takes at least any weighted mean of all, with $\mu \ge 0$ and
$\sum_i \mu_i = 1$, and a stage does not get cheaper if it pays a price $\lambda_i \ge 0$ for its bytes and is paid for
its budget. Hence

$$T = \sum_i t_i + (m-1) \max_i t_i \ge \sum_i w_i (c_i - \lambda_i B_i) + \sum_l \min_i w_i\,h_i(k_l), \qquad
h_i(k) = \min_s \big(t_i(k, s) + \lambda_i b_i(k, s)\big), \quad w_i = 1 + (m-1)\,\mu_i$$

with $c_i$ the transfer time of the stage. The prices are the best ones at the minimum time in which the stages could
hold all layers, each as many as it can. The weights make all stages equally good for the mean layer:
$w_i \propto 1/H_i$ with $H_i = \sum_l h_i(k_l)$. Both are the best if all layers are identical. A stage too slow for
any of them has $\mu_i = 0$.

Layers are whole. A stage holds, within $\theta$ seconds and its memory, at most
$\lfloor \min_\lambda (\theta - c_i + \lambda B_i) / h_i \rfloor$ of the $n$ layers of the commonest layer type. The
slowest stage takes at least the minimum $\theta$ in which all stages together hold $n$, and at least the minimum in
which the stages, one after the other, can hold all layers (`HeldRuns`). A step therefore takes $(m-1-\mu)\,\theta$ more
than the bound of one of $\mu + 1$ microbatches, for any $\mu$.

Source: weak Lagrangian duality.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.search.bounds import StageMemory, memories_of, stage_bounds
from steelyard.search.kernels import FloatArray, IntArray
from steelyard.search.layers import option_table
from steelyard.units import MIB

BISECTIONS = 12
"""Bisection steps for the minimum time in which the stages could hold all layers."""
TIES = 1e-9
"""Relative increase of a number of layers, so that rounding loses none."""
NUM_PRICES = 24
"""Number of memory prices tried for a stage."""
PRECISION = 0.001
"""Relative precision of the minimum time of the slowest stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayers:
    """The layers of a stage at several prices of a byte, the first of them 0."""

    prices: FloatArray
    """[A] s/B"""
    priced_s: FloatArray
    """[K, A] $h$"""
    whole_s: FloatArray
    """[A] $H$"""

    @classmethod
    def unpriced(cls, seconds: Sequence[float], counts: Sequence[int]) -> "PricedLayers":
        """Build layers of these times whose bytes are not counted."""
        priced = np.repeat(np.array(seconds)[:, None], NUM_PRICES, axis=1)
        layers = np.asarray(counts)
        return cls(prices=np.zeros(NUM_PRICES), priced_s=priced, whole_s=layers[layers > 0] @ priced[layers > 0])


def priced_layers(
    legal: NDArray[np.bool_], seconds: FloatArray, num_bytes: NDArray[np.int64], counts: Sequence[int]
) -> PricedLayers:
    """Return the layers at the frontier prices of the commonest layer type; arrays are [K, S], ``counts`` [K]."""
    layers, frontiers = np.asarray(counts), list[tuple[FloatArray, IntArray]]()
    for row, mine in enumerate(legal):
        own_s, own_bytes = seconds[row, mine], num_bytes[row, mine]
        order = np.lexsort((own_s, own_bytes))
        own_s, own_bytes = own_s[order], own_bytes[order]
        kept = np.append(True, own_s[1:] < np.minimum.accumulate(own_s)[:-1])[: len(order)]
        frontiers.append((own_s[kept], own_bytes[kept]))
    own_s, own_bytes = frontiers[layers.argmax()]
    prices = np.unique(np.append(0.0, -np.diff(own_s) / np.diff(own_bytes)))
    prices = prices[np.linspace(0, len(prices) - 1, NUM_PRICES).round().astype(int)]
    paid = [(each_s + prices[:, None] * each_bytes).min(axis=1, initial=np.inf) for each_s, each_bytes in frontiers]
    priced, used = np.stack(paid), layers > 0
    return PricedLayers(prices=prices, priced_s=priced, whole_s=layers[used] @ priced[used])


def least_within_s(tables: CostTables, budget_bytes: int) -> float:
    """Lower bound of the step time of one pool's tables within a budget, in seconds.

    Only the bytes that the layers of a stage hold throughout are counted.
    """
    pipeline, counts = tables.pipeline, np.bincount(tables.layers, minlength=len(tables.layer_types)).tolist()
    lasts = list(tables.last_types or range(len(tables.layer_types)))
    flights, known = [pipeline.in_flight(stage) for stage in range(pipeline.num_stages)], dict[int, PricedLayers]()
    for in_flight in {*flights}:
        held = tables.held_bytes(in_flight)
        known[in_flight] = priced_layers(tables.legal, tables.time_s, np.minimum(held, held[lasts]), counts)
    stages, handed = [known[each] for each in flights], [tables.received_s(each) for each in range(len(flights))]
    ends = (tables.layers[0], tables.layers[-1]) if len(tables.layers) > 1 else None
    return least_step_s(stages, counts, handed, tables.num_passes, tables.rooms(budget_bytes), ends=ends)


def least_step_s(
    stages: Sequence[PricedLayers],
    counts: Sequence[int],
    handed_s: Sequence[float],
    num_passes: float,
    rooms: Sequence[float] | None = None,
    slowest_s: float = 0.0,
    ends: tuple[int, int] | None = None,
) -> float:
    """Lower bound of the step time in seconds.

    ``counts`` [K]: layers of each type; ``handed_s``: transfer time of each stage; ``rooms``: memory of each stage in
    bytes, None to bound by times alone; ``slowest_s``: known lower bound of the slowest stage; ``ends``: layer types of
    the first and the last layer, if the stages are in order.
    """
    more, layers = num_passes - 1, np.array(counts)
    handed = np.asarray(handed_s, dtype=np.float64)
    whole = np.stack([stage.whole_s for stage in stages])
    places = np.zeros(len(stages), dtype=np.int64)
    paid = np.zeros_like(whole)
    if rooms is not None:
        paid = np.stack([stage.prices for stage in stages]) * np.asarray(rooms)[:, None]
        places = _best_prices(whole, paid)
    own = np.arange(len(stages)), places
    fixed = np.zeros_like(whole)
    for place, layer_type in zip((0, -1), ends or (), strict=False):
        fixed[place] += stages[place].priced_s[layer_type]
        layers[layer_type] -= 1
    free = layers > 0
    priced = np.stack([stage.priced_s[free, place] for stage, place in zip(stages, places, strict=True)])

    def dual_s(passes: float) -> float:
        weights = 1 + passes * _shares(whole[own], passes)
        layers_s = (weights[:, None] * priced).min(axis=0) @ layers[free]
        return float(weights @ (handed + fixed[own] - paid[own]) + layers_s)

    bound_s = dual_s(more)
    if rooms is None or not free.any() or not math.isfinite(bound_s):
        return bound_s
    commonest = int(layers.argmax())
    block = np.stack([stage.priced_s[commonest] for stage in stages])
    slowest_s = max(slowest_s, _whole_layers_s(block, paid - fixed - handed[:, None], int(layers[commonest])))
    parts = {0, len(stages) // 2, len(stages), 2 * len(stages)}
    return max(bound_s, *(dual_s(each) + (more - each) * slowest_s for each in parts if each <= more))


def _whole_layers_s(block_s: FloatArray, room_s: FloatArray, count: int) -> float:
    """Minimum time in which all stages hold ``count`` whole layers, by [P, A] priced time of a layer and of memory."""

    def held(limit_s: float) -> float:
        most = np.floor((limit_s + room_s) / block_s * (1 + TIES)).min(axis=1)
        return float(np.maximum(most, 0).sum())

    return _around(float(block_s[:, 0].min()), lambda limit_s: held(limit_s) >= count)[0]


def _around(high: float, is_enough: Callable[[float], bool]) -> tuple[float, float]:
    """Return two times around the minimum that is enough, found from ``high`` by doubling and bisection."""
    low = 0.0
    for _ in range(BISECTIONS):
        if is_enough(high):
            break
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low, high


def _best_prices(whole_s: FloatArray, paid_s: FloatArray) -> NDArray[np.int64]:
    """Return [P] the index of each stage's price, of [P, A], that allows the fewest layers in the minimum time."""

    def held(limit_s: float) -> FloatArray:
        """Return [P, A] the maximum fraction of all layers that a stage holds in this time, by price."""
        return np.asarray((limit_s + paid_s) / whole_s)

    shortest_s = float(whole_s[:, 0].min())
    if not np.isfinite(shortest_s):
        return np.zeros(len(whole_s), dtype=np.int64)
    _, enough_s = _around(shortest_s, lambda limit_s: bool(held(limit_s).min(axis=1).sum() >= 1))
    return np.asarray(held(enough_s).argmin(axis=1))


def _shares(whole_s: FloatArray, more: float) -> FloatArray:
    """Return [P] the weights of the stages; 0 for stages that are too slow for a layer."""
    taking = np.isfinite(whole_s)
    speeds = 1 / np.maximum(whole_s, 1e-300)
    while more and taking.any():
        level = (more + taking.sum()) / speeds[taking].sum()
        slow = taking & (whole_s > level)
        if not slow.any():
            shares = np.where(taking, np.maximum(level * speeds - 1, 0.0), 0.0)
            return np.asarray(shares / shares.sum())
        taking &= ~slow
    return np.full(len(whole_s), 1 / len(whole_s))


class HeldRuns:
    """The runs of layers that stages of one size of a pool can hold, with lower bounds of their times.

    They follow from the lower-bound tables of that pool alone, for any stages before and after; computed on first use.
    """

    def __init__(self, floor: CostTables, room_bytes: int) -> None:
        self._floor, self._room_bytes = floor, room_bytes - floor.overhead_bytes
        self._options = option_table(floor)
        self._least_s: dict[int, FloatArray] = {}
        self._memories: dict[int, StageMemory] = {}

    def farthest(self, in_flight: int, first: int, limit_s: float) -> int:
        """Return the largest end of a run within ``limit_s`` from ``first`` or an earlier layer; ``first`` if none."""
        if in_flight not in self._least_s:
            self._least_s[in_flight] = self._ending(in_flight)
        return max(first, int(self._least_s[in_flight][first].searchsorted(limit_s, side="right")))

    def fitting(self, in_flight: int, more_bytes: int) -> list[int]:
        """Return [L] the largest end from each or an earlier layer, without a time limit and with ``more_bytes``."""
        found: list[int] = np.maximum.accumulate(self._farthest_held(in_flight, more_bytes)).tolist()
        return found

    def _ending(self, in_flight: int) -> FloatArray:
        """Return [L, L] the minimum seconds of runs that fit from a layer or earlier to an end or beyond, rising."""
        bounds = stage_bounds(self._options.costs([in_flight])[0], self._floor.layers, self._room_bytes, 0.0)
        count = len(self._floor.layers)
        seconds = bounds.matrix((0, count), (1, count))
        seconds[np.arange(1, count + 1) > self._farthest_held(in_flight, 0)[:, None]] = np.inf
        from_any = np.minimum.accumulate(seconds, axis=0)
        return np.ascontiguousarray(np.minimum.accumulate(from_any[:, ::-1], axis=1)[:, ::-1])

    def _farthest_held(self, in_flight: int, more_bytes: int) -> IntArray:
        """Return [L] the largest end from each layer with ``more_bytes`` of additional memory."""
        if in_flight not in self._memories:
            (self._memories[in_flight],) = memories_of(self._floor, self._floor.legal, [in_flight])
        return self._memories[in_flight].all_farthest(self._room_bytes + more_bytes)


def least_slowest_s(
    stages: Sequence[tuple[HeldRuns, int]], handed_s: Sequence[float], num_layers: int, least_s: float, enough_s: float
) -> float:
    """Lower bound of the slowest of these stages: the minimum seconds in which they can hold all layers.

    ``stages`` are runs and microbatches in flight; ``least_s``, above 0, is a known lower bound. Results of
    ``enough_s`` or more need not be exact. Infinite if no time is enough.
    """

    def is_enough(limit_s: float) -> bool:
        place = 0
        for (runs, in_flight), spent_s in zip(stages, handed_s, strict=True):
            place = runs.farthest(in_flight, place, limit_s - spent_s)
            if place == num_layers:
                return True
        return False

    if not is_enough(sys.float_info.max):
        return math.inf
    low, high = least_s, 2 * least_s
    while not is_enough(high):
        if high >= enough_s:
            return high
        low, high = high, 2 * high
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low


def missing_bytes(stages: Sequence[tuple[HeldRuns, int]], num_layers: int, most: int) -> int:
    """Lower bound of the additional bytes per device that these stages need to hold all layers, to a MiB.

    ``most`` if it is not smaller.
    """

    def is_enough(more_bytes: int) -> bool:
        reaches, place = {stage: stage[0].fitting(stage[1], more_bytes) for stage in dict.fromkeys(stages)}, 0
        for stage in stages:
            place = reaches[stage][place]
            if place == num_layers:
                return True
        return False

    low, high = 0, most
    if not is_enough(most - 1):
        return most
    while high - low > MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low
