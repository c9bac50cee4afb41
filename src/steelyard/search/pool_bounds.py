r"""What no pipeline over unlike pools of devices is faster than, from the layers' fastest times alone.

Pool $p$ takes $P_p$ of the $P$ stages, and in it a layer of kind $k$ takes $t_p(k)$. The slowest stage takes at least
the mean of the stages of any pool, so any weighted mean of these means, with $\mu \ge 0$ and $\sum_p \mu_p = 1$:

$$T = \sum_i t_i + (m-1) \max_i t_i \ge \sum_p w_p \Big(c_p + \sum_{l \in p} t_p(k_l)\Big)
\ge \sum_p w_p\,c_p + \sum_l \min_p w_p\,t_p(k_l), \qquad w_p = 1 + \frac{(m-1)\,\mu_p}{P_p}$$

where $c_p$ is what the stages of the pool spend on handing over. The weights that make every pool equally good for the
mean layer, $w_p \propto 1/W_p$ with $W_p = \sum_l t_p(k_l)$, are the best where all layers are alike; a pool too slow
for any of them has $\mu_p = 0$.

Source: weak Lagrangian duality.
"""

from collections.abc import Sequence

import numpy as np

from steelyard.search.frontier import FloatArray


def least_step_s(
    fastest_s: FloatArray, counts: Sequence[int], stages: Sequence[int], handed_s: Sequence[float], num_passes: int
) -> float:
    """Seconds of a step, at least: ``fastest_s`` [p, K] of a pass through a layer, ``counts`` [K] layers of each kind.

    ``stages`` and ``handed_s`` are of each pool its stages and what all of them take for handing over.
    """
    layers = np.asarray(counts)
    used = layers > 0
    times = fastest_s[:, used]
    shares = _shares(times @ layers[used], np.asarray(stages, dtype=np.float64), num_passes - 1)
    weights = 1 + (num_passes - 1) * shares / np.asarray(stages)
    return float(weights @ np.asarray(handed_s) + (weights[:, None] * times).min(axis=0) @ layers[used])


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
