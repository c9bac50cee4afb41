r"""Lower bounds on stage times from prices of memory, for all runs of layers at once.

For any price $\lambda \ge 0$ of a byte, the layers $l..l'-1$ take on stage $i$ at least

$$\underline t_i(l, l') = \max_\lambda \Big[\sum_{j=l}^{l'-1} h_\lambda(k_j)
- \lambda\,\big(B - \underline u(l, l')\big)\Big], \qquad
h_\lambda(k) = \min_s \big(t(k, s) + \lambda\, b_i(k, s)\big)$$

seconds, since a plan that fits saves nothing by paying for its bytes and being paid for the budget. Switches cost
at least nothing and are left out. The bound grows with the run, and is a difference of prefix sums, so a matrix of
bounds costs a few vector operations. The best price is a slope of the lower convex hull of some kind's (bytes,
seconds) points, so only these are tried.

| symbol          | name           | unit  | meaning                                                      |
|-----------------|----------------|-------|--------------------------------------------------------------|
| $b$             | `bytes`        | bytes | `static_bytes` + microbatches in flight × `activation_bytes` |
| $B$             | `room_bytes`   | bytes | budget less overhead                                         |
| $\underline u$  | `floor`        | bytes | the largest over the layers of the least transient           |
| $\lambda$       | `prices`       | s/B   | value of a byte                                              |

Source: weak Lagrangian duality; the hull argument is Dantzig's for the continuous knapsack.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.search.frontier import FloatArray, IntArray, frontier
from steelyard.search.layers import KindOptions, StageCosts

ROUNDING = 1e-9
"""Relative slack on time bounds, so that float rounding never drops an optimum (sums differ by about 1e-13)."""

MAX_PRICES = 64
"""More hull slopes than this are thinned out; the bounds stay valid and become a little weaker."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBounds:
    """Prefix sums from which the bounds of one stage follow."""

    costs: StageCosts
    room_bytes: int
    transfer_s: float
    prices: FloatArray
    """[A] rising, the first is 0"""
    prefix_s: FloatArray
    """[A, L + 1] priced cost of the first layers"""
    floor: IntArray
    """[L] least transient of each layer"""

    def matrix(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """[starts, ends] lower bounds in seconds, transfer included; infinite for empty runs. Both lists are runs."""
        bound = np.zeros((len(starts), len(ends)))
        room = self.room_bytes - self._floors(starts, ends).astype(np.float64)
        for price, prefix in zip(self.prices, self.prefix_s, strict=True):
            np.maximum(bound, prefix[ends] - prefix[starts][:, None] - price * room, out=bound)
        bound += self.transfer_s
        bound[starts[:, None] >= ends] = np.inf
        return bound

    def good_prices(self, start: int, end: int) -> FloatArray:
        """Prices around the one that bounds this run best, and 0."""
        room = self.room_bytes - float(self.floor[start:end].max())
        best = int(np.argmax(self.prefix_s[:, end] - self.prefix_s[:, start] - self.prices * room))
        return np.union1d(self.prices[max(best - 4, 0) : best + 5], 0.0)

    def farthest(self, start: int, limit_s: float) -> int:
        """The largest end whose bound from ``start`` stays within the limit; ``start`` if not even one layer does."""
        num_layers = len(self.floor)
        row = self.matrix(np.array([start]), np.arange(start + 1, num_layers + 1))[0]
        return start + int(np.count_nonzero(row <= limit_s))

    def smallest_start(self, end: int, limit_s: float) -> int:
        """The smallest start whose bound to ``end`` stays within the limit; ``end`` if not even one layer does."""
        column = self.matrix(np.arange(end), np.array([end]))[:, 0]
        return end - int(np.count_nonzero(column <= limit_s))

    def _floors(self, starts: IntArray, ends: IntArray) -> IntArray:
        layers = np.arange(starts[0], ends[-1])
        reached = np.where(layers >= starts[:, None], self.floor[layers], 0)
        running = np.maximum.accumulate(reached, axis=1)
        return running[:, np.maximum(ends - 1 - starts[0], 0)]


def stage_bounds(costs: StageCosts, layers: Sequence[int], room_bytes: int, transfer_s: float) -> StageBounds:
    """The bounds of a stage with these costs for runs of the model's ``layers`` (their kinds)."""
    kinds = np.array(layers)
    prices = _hull_slopes([costs.options[kind] for kind in sorted(set(layers))])
    priced = np.full((len(prices), len(costs.options)), np.inf)
    floor = np.zeros(len(costs.options), dtype=np.int64)
    for kind in set(layers):
        options = costs.options[kind]
        priced[:, kind] = np.min(options.seconds + prices[:, None] * options.bytes, axis=1)
        floor[kind] = options.transient.min()
    prefix = np.zeros((len(prices), len(layers) + 1))
    np.cumsum(priced[:, kinds], axis=1, out=prefix[:, 1:])
    return StageBounds(
        costs=costs,
        room_bytes=room_bytes,
        transfer_s=transfer_s,
        prices=prices,
        prefix_s=prefix,
        floor=floor[kinds],
    )


def _hull_slopes(kinds: Sequence[KindOptions]) -> FloatArray:
    """0 and the slopes of all lower convex hulls, rising, at most `MAX_PRICES` of them."""
    slopes = {0.0}
    for options in kinds:
        points = frontier(options.bytes, options.seconds)
        hull: list[tuple[float, float]] = []
        for point in zip(points.bytes.tolist(), points.seconds.tolist(), strict=True):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        slopes.update(_slope(a, b) for a, b in itertools.pairwise(hull))
    rising = np.array(sorted(slopes))
    if len(rising) > MAX_PRICES:
        rising = rising[np.linspace(0, len(rising) - 1, MAX_PRICES).round().astype(int)]
    return rising


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Seconds saved per byte spent from one point to the next."""
    return (left[1] - right[1]) / (right[0] - left[0])
