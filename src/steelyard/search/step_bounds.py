r"""What no pipeline over unlike stages is faster than, from the layers' times and bytes alone.

On stage $i$ of $P$ a layer of type $k$ under strategy $s$ takes $t_i(k, s)$ seconds and $b_i(k, s)$ bytes or more of
the $B_i$ that the stage has room for. The slowest stage takes at least any weighted mean of all, with $\mu \ge 0$ and
$\sum_i \mu_i = 1$, and a stage saves nothing by paying a price $\lambda_i \ge 0$ for its bytes and being paid for its
room. So

$$T = \sum_i t_i + (m-1) \max_i t_i \ge \sum_i w_i (c_i - \lambda_i B_i) + \sum_l \min_i w_i\,h_i(k_l), \qquad
h_i(k) = \min_s \big(t_i(k, s) + \lambda_i b_i(k, s)\big), \quad w_i = 1 + (m-1)\,\mu_i$$

with $c_i$ what the stage spends on handing over. The prices taken are the best ones at the least time in which the
stages could hold all layers, each as many as it can, and the weights make all stages equally good for the mean layer:
$w_i \propto 1/H_i$ with $H_i = \sum_l h_i(k_l)$; both are the best where all layers are alike. A stage too slow for
any of them has $\mu_i = 0$.

Layers are whole. Of the $n$ layers of the commonest layer type a stage holds, within $\theta$ seconds and its room, at
most $\lfloor \min_\lambda (\theta - c_i + \lambda B_i) / h_i \rfloor$. The slowest stage takes at least the least
$\theta$ in which all stages together hold $n$, and at least the least in which the stages, one behind the other, can
hold all layers (`HeldRuns`). So a step takes $(m-1-\mu)\,\theta$ more than what bounds one of $\mu + 1$ microbatches,
whatever $\mu$.

Source: weak Lagrangian duality.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.search.bounds import StageMemory, memories_of, stage_bounds
from steelyard.search.kernels import FloatArray, IntArray
from steelyard.search.layers import option_table
from steelyard.units import MIB

BISECTIONS = 12
"""Of the least time in which the stages could hold all layers."""
TIES = 1e-9
"""By which a number of layers is taken to be larger, so that rounding loses none."""
NUM_PRICES = 24
"""Prices of memory that are tried for a stage."""
PRECISION = 0.001
"""To which the least time of the slowest stage is found, relatively."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayers:
    """The layers on a stage at several prices of a byte, the first of them 0."""

    prices: FloatArray
    """[A] s/B"""
    priced_s: FloatArray
    """[K, A] $h$"""
    whole_s: FloatArray
    """[A] $H$"""

    @classmethod
    def unpriced(cls, seconds: Sequence[float], counts: Sequence[int]) -> "PricedLayers":
        """Layers of these times whose bytes are not counted."""
        priced = np.repeat(np.array(seconds)[:, None], NUM_PRICES, axis=1)
        layers = np.asarray(counts)
        return cls(prices=np.zeros(NUM_PRICES), priced_s=priced, whole_s=layers[layers > 0] @ priced[layers > 0])


def priced_layers(
    legal: NDArray[np.bool_], seconds: FloatArray, num_bytes: NDArray[np.int64], counts: Sequence[int]
) -> PricedLayers:
    """The layers at the prices that the commonest layer type has on its frontier; arrays are [K, S], ``counts`` [K]."""
    layers = np.asarray(counts)
    commonest = int(layers.argmax())
    mine = legal[commonest]
    prices = np.zeros(1)
    if mine.any():
        own_bytes, own_s = num_bytes[commonest, mine], seconds[commonest, mine]
        order = np.lexsort((own_s, own_bytes))
        rising = own_s[order]
        kept = order[np.append(True, rising[1:] < np.minimum.accumulate(rising)[:-1])[: len(order)]]
        prices = np.unique(np.concatenate([prices, -np.diff(own_s[kept]) / np.diff(own_bytes[kept])]))
    prices = prices[np.linspace(0, len(prices) - 1, NUM_PRICES).round().astype(int)]
    paid = np.where(legal, seconds, np.inf)[:, :, None] + num_bytes[:, :, None] * prices
    priced = paid.min(axis=1, initial=np.inf)
    used = layers > 0
    return PricedLayers(prices=prices, priced_s=priced, whole_s=layers[used] @ priced[used])


def least_within_s(tables: CostTables, budget_bytes: int) -> float:
    """Return what no plan of one pool's tables within a budget is faster than, in seconds of a step.

    Of what a stage holds at a moment only what its layers hold throughout is counted.
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
    """Seconds of a step, at least; without ``rooms``, the bytes of each stage, by the times alone.

    ``counts`` [K] layers of each type; ``handed_s`` what each stage takes for handing over; ``slowest_s`` what the
    slowest stage takes at least, as far as that is known; ``ends`` the layer types of the first and the last layer,
    where the stages are in their order.
    """
    more, layers = num_passes - 1, np.array(counts)
    handed = np.asarray(handed_s, dtype=np.float64)
    alike = np.ones(len(stages))
    if rooms is None:
        stages, alike, handed = _alike(stages, handed)
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
        weights = 1 + passes * _shares(whole[own], alike, passes)
        layers_s = (weights[:, None] * priced).min(axis=0) @ layers[free]
        return float(weights @ (handed + fixed[own] - paid[own]) + layers_s)

    bound_s = dual_s(more)
    if rooms is None or not math.isfinite(bound_s):
        return bound_s
    commonest = int(layers.argmax())
    block = np.stack([stage.priced_s[commonest] for stage in stages])
    slowest_s = max(slowest_s, _whole_layers_s(block, paid - fixed - handed[:, None], int(layers[commonest])))
    parts = {0, len(stages) // 2, len(stages), 2 * len(stages)}
    return max(bound_s, *(dual_s(each) + (more - each) * slowest_s for each in parts if each <= more))


def _whole_layers_s(block_s: FloatArray, room_s: FloatArray, count: int) -> float:
    """The least time in which all stages hold so many whole layers, of [P, A] what one and the room count by price."""

    def held(limit_s: float) -> float:
        most = np.floor((limit_s + room_s) / block_s * (1 + TIES)).min(axis=1)
        return float(np.maximum(most, 0).sum())

    low, high = 0.0, float(block_s[:, 0].min())
    for _ in range(BISECTIONS):
        if held(high) >= count:
            break
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < count else (low, middle)
    return low


def _best_prices(whole_s: FloatArray, paid_s: FloatArray) -> NDArray[np.int64]:
    """[P] the place of the price of each stage, of [P, A], that leaves it least of the layers in the least time."""

    def held(limit_s: float) -> FloatArray:
        """[P, A] the part of all layers that a stage holds at most in this time, by each price."""
        return np.asarray((limit_s + paid_s) / whole_s)

    low, high = 0.0, float(whole_s[:, 0].min())
    if not np.isfinite(high):
        return np.zeros(len(whole_s), dtype=np.int64)
    for _ in range(BISECTIONS):
        if held(high).min(axis=1).sum() >= 1:
            break
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle).min(axis=1).sum() < 1 else (low, middle)
    return np.asarray(held(high).argmin(axis=1))


def _alike(
    stages: Sequence[PricedLayers], handed_s: FloatArray
) -> tuple[Sequence[PricedLayers], FloatArray, FloatArray]:
    """Each kind of stage, how many there are of it, and what these together take for handing over."""
    places: dict[PricedLayers, int] = {}
    of_stages = [places.setdefault(stage, len(places)) for stage in stages]
    counts, handed = np.bincount(of_stages), np.bincount(of_stages, weights=handed_s)
    return list(places), counts.astype(np.float64), handed.astype(np.float64)


def _shares(whole_s: FloatArray, alike: FloatArray, more: float) -> FloatArray:
    """[P] the weights of the stages, of which so many are ``alike``; none of those that are too slow for a layer."""
    taking = np.isfinite(whole_s)
    speeds = 1 / np.maximum(whole_s, 1e-300)
    while more and taking.any():
        level = (more + alike[taking].sum()) / (alike * speeds)[taking].sum()
        slow = taking & (whole_s > level)
        if not slow.any():
            shares = np.where(taking, np.maximum(level * speeds - 1, 0.0), 0.0)
            return np.asarray(shares / (alike @ shares))
        taking &= ~slow
    return np.full(len(whole_s), 1 / alike.sum())


class HeldRuns:
    """Which runs of layers the stages of one size of a pool can hold, and in what time at least.

    Of the floors of that pool alone, whatever the stages before and behind; made when first asked for.
    """

    def __init__(self, floor: CostTables, room_bytes: int) -> None:
        self._floor, self._room_bytes = floor, room_bytes - floor.overhead_bytes
        self._options = option_table(floor)
        self._least_s: dict[int, FloatArray] = {}
        self._memories: dict[int, StageMemory] = {}

    def farthest(self, in_flight: int, first: int, limit_s: float) -> int:
        """The largest end of a run within so many seconds from ``first`` or a layer before; ``first`` if none is."""
        if in_flight not in self._least_s:
            self._least_s[in_flight] = self._ending(in_flight)
        return max(first, int(self._least_s[in_flight][first].searchsorted(limit_s, side="right")))

    def fitting(self, in_flight: int, more_bytes: int) -> list[int]:
        """[L] the same from any layer of runs that take any time, with so much more memory."""
        found: list[int] = np.maximum.accumulate(self._farthest_held(in_flight, more_bytes)).tolist()
        return found

    def _ending(self, in_flight: int) -> FloatArray:
        """[L, L] rising, the least seconds from a layer or one before to an end or beyond, of runs that fit."""
        bounds = stage_bounds(self._options.costs([in_flight])[0], self._floor.layers, self._room_bytes, 0.0)
        count = len(self._floor.layers)
        seconds = bounds.matrix((0, count), (1, count))
        seconds[np.arange(1, count + 1) > self._farthest_held(in_flight, 0)[:, None]] = np.inf
        from_any = np.minimum.accumulate(seconds, axis=0)
        return np.ascontiguousarray(np.minimum.accumulate(from_any[:, ::-1], axis=1)[:, ::-1])

    def _farthest_held(self, in_flight: int, more_bytes: int) -> IntArray:
        """[L] the largest end from each layer with so much more memory."""
        if in_flight not in self._memories:
            (self._memories[in_flight],) = memories_of(self._floor, self._floor.legal, [in_flight])
        return self._memories[in_flight].all_farthest(self._room_bytes + more_bytes)


def least_slowest_s(
    stages: Sequence[tuple[HeldRuns, int]], handed_s: Sequence[float], num_layers: int, least_s: float, enough_s: float
) -> float:
    """What the slowest of these stages takes at least: the least in which they can hold all layers.

    ``stages`` are runs and microbatches in flight; ``least_s``, above 0, is known to be taken, and more than
    ``enough_s`` need not be told apart. Infinite where no time is enough.
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
    """How much more memory these stages need on every device to hold all layers, at least, to a MiB.

    ``most`` if not less.
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
