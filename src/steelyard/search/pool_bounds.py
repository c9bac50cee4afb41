r"""What no pipeline over unlike stages is faster than, from the layers' times and bytes alone.

On stage $i$ of $P$ a layer of kind $k$ under strategy $s$ takes $t_i(k, s)$ seconds and $b_i(k, s)$ bytes or more of
the $B_i$ that the stage has room for. The slowest stage takes at least any weighted mean of all, with $\mu \ge 0$ and
$\sum_i \mu_i = 1$, and a stage saves nothing by paying a price $\lambda_i \ge 0$ for its bytes and being paid for its
room. So

$$T = \sum_i t_i + (m-1) \max_i t_i \ge \sum_i w_i (c_i - \lambda_i B_i) + \sum_l \min_i w_i\,h_i(k_l), \qquad
h_i(k) = \min_s \big(t_i(k, s) + \lambda_i b_i(k, s)\big), \quad w_i = 1 + (m-1)\,\mu_i$$

with $c_i$ what the stage spends on handing over. The prices taken are the best ones at the least time in which the
stages could hold all layers, each as many as it can, and the weights make all stages equally good for the mean layer:
$w_i \propto 1/H_i$ with $H_i = \sum_l h_i(k_l)$; both are the best where all layers are alike. A stage too slow for
any of them has $\mu_i = 0$.

Layers are whole. Of the $n$ layers of the commonest kind a stage holds, within $\theta$ seconds and its room, at most
$\lfloor \min_\lambda (\theta - c_i + \lambda B_i) / h_i \rfloor$. The slowest stage takes at least the least $\theta$
in which all stages together hold $n$, and a step $(m-1)\,\theta$ more than all layers at their fastest.

Source: weak Lagrangian duality.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.search.frontier import FloatArray, reduce

BISECTIONS = 24
"""Of the least time in which the stages could hold all layers."""
TIES = 1e-9
"""By which a number of layers is taken to be larger, so that rounding loses none."""
NUM_PRICES = 24
"""Prices of memory that are tried for a stage."""


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
    """The layers at the prices that the commonest kind has on its frontier; arrays are [K, S], ``counts`` [K]."""
    layers = np.asarray(counts)
    commonest = int(layers.argmax())
    mine = legal[commonest]
    prices = np.zeros(1)
    if mine.any():
        own_bytes, own_s = num_bytes[commonest, mine], seconds[commonest, mine]
        kept = reduce(own_bytes, own_s)
        prices = np.unique(np.concatenate([prices, -np.diff(own_s[kept]) / np.diff(own_bytes[kept])]))
    prices = prices[np.linspace(0, len(prices) - 1, NUM_PRICES).round().astype(int)]
    paid = np.where(legal, seconds, np.inf)[:, :, None] + num_bytes[:, :, None] * prices
    priced = paid.min(axis=1, initial=np.inf)
    used = layers > 0
    return PricedLayers(prices=prices, priced_s=priced, whole_s=layers[used] @ priced[used])


def least_step_s(
    stages: Sequence[PricedLayers],
    counts: Sequence[int],
    handed_s: Sequence[float],
    num_passes: int,
    rooms: Sequence[float] | None = None,
) -> float:
    """Seconds of a step, at least; without ``rooms``, the bytes of each stage, by the times alone.

    ``counts`` [K] layers of each kind; ``handed_s`` what each stage takes for handing over.
    """
    more, used = num_passes - 1, np.asarray(counts) > 0
    handed = np.asarray(handed_s, dtype=np.float64)
    whole = np.stack([stage.whole_s for stage in stages])
    if rooms is None:
        places = np.zeros(len(stages), dtype=np.int64)
    else:
        paid = np.stack([stage.prices for stage in stages]) * np.asarray(rooms)[:, None]
        places = _best_prices(whole, paid)
        handed = handed - paid[np.arange(len(stages)), places]
    weights = 1 + more * _shares(whole[np.arange(len(stages)), places], more)
    priced = np.stack([stage.priced_s[used, place] for stage, place in zip(stages, places, strict=True)])
    bound_s = float(weights @ handed + (weights[:, None] * priced).min(axis=0) @ np.asarray(counts)[used])
    if rooms is None or not math.isfinite(bound_s):
        return bound_s
    fastest = np.stack([stage.priced_s[used, 0] for stage in stages]).min(axis=0)
    commonest = int(np.argmax(counts))
    block = np.stack([stage.priced_s[commonest] for stage in stages])
    room_s = paid - np.asarray(handed_s)[:, None]
    least_s = sum(handed_s) + float(fastest @ np.asarray(counts)[used])
    return max(bound_s, least_s + more * _whole_layers_s(block, room_s, counts[commonest]))


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


def _shares(whole_s: FloatArray, more: int) -> FloatArray:
    """[P] the weights of the stages; none of those that are too slow for a layer."""
    speeds = 1 / np.maximum(whole_s, 1e-300)
    taking = np.isfinite(whole_s)
    while more and taking.any():
        level = (more + taking.sum()) / speeds[taking].sum()
        slow = taking & (whole_s > level)
        if not slow.any():
            shares = np.where(taking, np.maximum(level * speeds - 1, 0.0), 0.0)
            return np.asarray(shares / shares.sum())
        taking &= ~slow
    return np.full(len(whole_s), 1 / len(whole_s))
