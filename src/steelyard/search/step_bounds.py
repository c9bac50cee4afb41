r"""What no pipeline over unlike stages is faster than, from the layers' times and what fits.

On stage $i$ of $P$ a layer of type $k$ takes $t_i(k)$ seconds or more. The slowest stage takes at least any weighted
mean of all, with $\mu \ge 0$ and $\sum_i \mu_i = 1$. So

$$T = \sum_i t_i + (m-1) \max_i t_i \ge \sum_i w_i c_i + \sum_l \min_i w_i\,t_i(k_l), \qquad w_i = 1 + (m-1)\,\mu_i$$

with $c_i$ what the stage spends on handing over. The weights make all stages equally good for the mean layer:
$w_i \propto 1/H_i$ with $H_i = \sum_l t_i(k_l)$, which is best where all layers are alike. A stage too slow for any of
them has $\mu_i = 0$.

The slowest stage takes at least the least $\theta$ in which the stages, one behind the other, can hold all layers
within their memory (`HeldRuns`). So a step takes $(m-1-\mu)\,\theta$ more than what bounds one of $\mu + 1$
microbatches, whatever $\mu$.

Source: weak Lagrangian duality.
"""

import math
import sys
from collections.abc import Sequence

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.search.bounds import StageMemory, memories_of, stage_bounds
from steelyard.search.kernels import FloatArray, IntArray
from steelyard.search.layers import option_table
from steelyard.units import MIB

PRECISION = 0.001
"""To which the least time of the slowest stage is found, relatively."""


def least_step_s(
    stages: Sequence[FloatArray],
    counts: Sequence[int],
    handed_s: Sequence[float],
    num_passes: int,
    slowest_s: float = 0.0,
) -> float:
    """Seconds of a step, at least, by the times alone.

    ``stages`` are the least seconds [K] of a layer of each type, the same array for stages that are alike; ``counts``
    [K] layers of each type; ``handed_s`` what each stage takes for handing over; ``slowest_s`` what the slowest stage
    takes at least, as far as that is known.
    """
    places: dict[int, int] = {}
    of_stages = [places.setdefault(id(stage), len(places)) for stage in stages]
    alike = np.bincount(of_stages).astype(np.float64)
    handed = np.bincount(of_stages, weights=np.asarray(handed_s, dtype=np.float64))
    layers = np.array(counts)
    used = layers > 0
    seconds = np.stack([stages[of_stages.index(place)][used] for place in range(len(places))])
    more, whole_s = num_passes - 1, seconds @ layers[used]

    def dual_s(passes: int) -> float:
        weights = 1 + passes * _shares(whole_s, alike, passes)
        return float(weights @ handed + (weights[:, None] * seconds).min(axis=0) @ layers[used])

    parts = {0, len(stages) // 2, len(stages), 2 * len(stages)} if slowest_s > 0 else ()
    return max([dual_s(more), *(dual_s(each) + (more - each) * slowest_s for each in parts if each <= more)])


def _shares(whole_s: FloatArray, alike: FloatArray, more: int) -> FloatArray:
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
        in_flight = 1 << (in_flight.bit_length() - 1)  # fewer in flight bound from below
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
