r"""What no pipeline over unlike pools of devices is faster than, from the layers' times and bytes alone.

Pool $p$ takes $P_p$ of the $P$ stages, and in it a layer of kind $k$ under strategy $s$ takes $t_p(k, s)$ seconds and
$b_p(k, s)$ bytes or more of the $B_p$ that a stage has room for. The slowest stage takes at least the mean of those of
any pool, so any weighted mean of these means, with $\mu \ge 0$ and $\sum_p \mu_p = 1$. And a pool saves nothing by
paying a price $\lambda_p \ge 0$ for its bytes and being paid for its room. So

$$T = \sum_i t_i + (m-1) \max_i t_i \ge \sum_p w_p (c_p - \lambda_p P_p B_p) + \sum_l \min_p w_p\,h_p(k_l), \qquad
h_p(k) = \min_s \big(t_p(k, s) + \lambda_p b_p(k, s)\big), \quad w_p = 1 + \frac{(m-1)\,\mu_p}{P_p}$$

with $c_p$ what the stages of the pool spend on handing over. The prices taken are the best ones at the least time in
which the pools could hold all layers, each as many as it can, and the weights make all pools equally good for the mean
layer: $w_p \propto 1/H_p$ with $H_p = \sum_l h_p(k_l)$; both are the best ones where all layers are alike. A pool too
slow for any of them has $\mu_p = 0$.

Source: weak Lagrangian duality.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.search.frontier import FloatArray, frontier

BISECTIONS = 24
"""Of the least time in which the pools could hold all layers."""
MAX_PRICES = 24
"""Prices of memory that are tried for a pool."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayers:
    """The layers of a pool at several prices of a byte, the first of them 0."""

    prices: FloatArray
    """[A] s/B"""
    priced_s: FloatArray
    """[K, A] $h$"""
    whole_s: FloatArray
    """[A] $H$"""


def priced_layers(
    legal: NDArray[np.bool_], seconds: FloatArray, num_bytes: NDArray[np.int64], counts: Sequence[int]
) -> PricedLayers:
    """The layers at the prices that the commonest kind has on its frontier; arrays are [K, S], ``counts`` [K]."""
    layers = np.asarray(counts)
    commonest = int(layers.argmax())
    mine = legal[commonest]
    prices = np.zeros(1)
    if mine.any():
        points = frontier(num_bytes[commonest, mine], seconds[commonest, mine])
        slopes = -np.diff(points.seconds) / np.diff(points.bytes)
        prices = np.unique(np.concatenate([prices, slopes]))
        if len(prices) > MAX_PRICES:
            prices = prices[np.linspace(0, len(prices) - 1, MAX_PRICES).round().astype(int)]
    paid = np.where(legal, seconds, np.inf)[:, :, None] + num_bytes[:, :, None] * prices
    priced = paid.min(axis=1, initial=np.inf)
    used = layers > 0
    return PricedLayers(prices=prices, priced_s=priced, whole_s=layers[used] @ priced[used])


def least_step_s(
    pools: Sequence[PricedLayers],
    counts: Sequence[int],
    stages: Sequence[int],
    handed_s: Sequence[float],
    num_passes: int,
    rooms: Sequence[float] | None = None,
) -> float:
    """Seconds of a step, at least; without ``rooms``, bytes of a stage of each pool, by the times alone.

    ``counts`` [K] layers of each kind, ``stages`` and ``handed_s`` of each pool its stages and what all of them take
    for handing over.
    """
    own, layers, more = np.asarray(stages, dtype=np.float64), np.asarray(counts), num_passes - 1
    chosen = [0] * len(pools) if rooms is None else _best_prices(pools, own, np.asarray(rooms))
    places = list(zip(pools, chosen, strict=True))
    whole = np.array([pool.whole_s[place] for pool, place in places])
    weights = 1 + more * _shares(whole, own, more) / own
    paid_s = np.asarray(handed_s, dtype=np.float64)
    if rooms is not None:
        paid_s = paid_s - own * rooms * [pool.prices[place] for pool, place in places]
    used = layers > 0
    each = np.stack(
        [weight * pool.priced_s[used, place] for weight, (pool, place) in zip(weights, places, strict=True)]
    )
    return float(weights @ paid_s + each.min(axis=0) @ layers[used])


def _best_prices(pools: Sequence[PricedLayers], stages: FloatArray, rooms: FloatArray) -> list[int]:
    """The place of the price of each pool that bounds its share of the layers most, in the least time for all."""
    low, high = 0.0, float(min(pool.whole_s[0] for pool in pools))
    paid = [room * pool.prices for pool, room in zip(pools, rooms, strict=True)]

    def shares(limit_s: float) -> list[FloatArray]:
        """[A] of each pool the part of all layers that its stages hold at most in this time."""
        return [count * (limit_s + more) / pool.whole_s for pool, count, more in zip(pools, stages, paid, strict=True)]

    if not np.isfinite(high):
        return [0] * len(pools)
    while sum(float(each.min()) for each in shares(high)) < 1 and high < 1e12:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(float(each.min()) for each in shares(middle)) < 1 else (low, middle)
    return [int(each.argmin()) for each in shares(high)]


def _shares(whole_s: FloatArray, stages: FloatArray, more: int) -> FloatArray:
    """[p] the weights of the pools; none of those that are too slow for a layer."""
    speeds = stages / np.maximum(whole_s, 1e-300)
    taking = np.isfinite(whole_s)
    while more and taking.any():
        level = (more + stages[taking].sum()) / speeds[taking].sum()
        slow = taking & (whole_s > level)
        if not slow.any():
            shares = np.where(taking, np.maximum(level * speeds - stages, 0.0), 0.0)
            return np.asarray(shares / shares.sum())
        taking &= ~slow
    return np.full(len(stages), 1 / len(stages))
