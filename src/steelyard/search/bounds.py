r"""Lower bounds on stage times from prices of memory, for all runs of layers at once.

For any price $\lambda \ge 0$ of a byte, the layers $l..l'-1$ take on stage $i$ at least

$$\underline t_i(l, l') = \min_\tau \max_\lambda \Big[\sum_{j=l}^{l'-1} h_{\lambda,\tau}(k_j)
- \lambda\,(B - \tau)\Big], \qquad
h_{\lambda,\tau}(k) = \min_{s:\, u(k, s) \le \tau} \big(t(k, s) + \lambda\, b_i(k, s)\big)$$

seconds, since a plan that fits, and whose transient peak is $\tau$, saves nothing by paying for its bytes and being
paid for the room that the peak leaves. Neighbouring peaks share a level as in `layers`. Switches cost at least nothing
and are left out. While an inner layer works, those behind it may have freed what they can; the last layer of the run
works first, with nothing freed. The bound grows with the run, and is a difference of prefix sums. The best price is a
slope of the lower convex hull of some type's (bytes, seconds) points, so only these are tried.

| symbol          | name           | unit  | meaning                                                      |
|-----------------|----------------|-------|--------------------------------------------------------------|
| $b$             | `bytes`        | bytes | `static_bytes` + microbatches in flight × `activation_bytes` |
| $B$             | `room_bytes`   | bytes | budget less overhead                                         |
| $\tau$          | `lower`, `upper` | bytes | level of the transient peak                                |
| $\lambda$       | `prices`       | s/B   | value of a byte                                              |

Source: weak Lagrangian duality; the hull argument is Dantzig's for the continuous knapsack.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.search import kernels
from steelyard.search.frontier import FloatArray, IntArray, distinct
from steelyard.search.layers import NO_LIMIT_BYTES, StageCosts, peak_levels

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
