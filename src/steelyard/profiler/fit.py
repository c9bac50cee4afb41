r"""Fits the seconds of a collective over message sizes to latency plus bytes over rate.

$$t(b) = \alpha + \beta\,b, \qquad \min_{\alpha,\beta \ge 0} \sum_i \big((\alpha + \beta\,b_i - t_i) / t_i\big)^2$$

| symbol   | name          | unit   | meaning                                                        |
|----------|---------------|--------|----------------------------------------------------------------|
| $b$      | tensor bytes  | bytes  | the whole tensor that is reduced, gathered or exchanged        |
| $t$      | seconds       | s      | of one call                                                    |
| $\alpha$ | latency       | s      | what a call takes before the first byte                        |
| $\beta$  | 1 / rate      | s/byte | reciprocal of `bytes_per_s`                                    |

Errors are relative, so that 16 KiB counts as much as 16 MiB. Source: the α–β model of Hockney 1994; the weights are
ours. Not modelled: the change of algorithm between small and large messages (seen in ``max_relative_error``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_S_PER_BYTE = 1e-15
"""A rate of 10^15 bytes per second stands for a time that does not grow with the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFit:
    """Seconds = ``latency_s`` + bytes / ``bytes_per_s``; ``max_relative_error`` over the fitted points."""

    latency_s: float
    bytes_per_s: float
    max_relative_error: float

    def time_s(self, num_bytes: float) -> float:
        """Seconds for this many bytes."""
        return self.latency_s + num_bytes / self.bytes_per_s


def fit_latency_and_rate(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> LinearFit:
    """The latency (s, not negative) and rate (bytes/s, positive) of least relative error over the measured points.

    Raises `ValueError` for fewer than two different sizes or a time that is not positive.
    """
    if len(set(sizes_bytes)) < 2 or len(sizes_bytes) != len(times_s):
        raise ValueError(f"two or more different sizes with a time each, not {sizes_bytes} and {times_s}")
    if min(times_s) <= 0:
        raise ValueError(f"positive seconds, not {min(times_s)}")
    points = list(zip(sizes_bytes, times_s, strict=True))
    latency_s, s_per_byte = min(_candidates(points), key=lambda candidate: _misfit(points, *candidate))
    worst = max(abs(latency_s + size * s_per_byte - time) / time for size, time in points)
    return LinearFit(latency_s=latency_s, bytes_per_s=1 / s_per_byte, max_relative_error=worst)


def _candidates(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """The solution inside the allowed quadrant if there is one, and those on its two edges."""
    uu = sum(1 / time**2 for _, time in points)
    ub = sum(size / time**2 for size, time in points)
    bb = sum((size / time) ** 2 for size, time in points)
    u = sum(1 / time for _, time in points)
    b = sum(size / time for size, time in points)
    edges = [(0.0, max(b / bb, _LEAST_S_PER_BYTE)), (u / uu, _LEAST_S_PER_BYTE)]
    determinant = uu * bb - ub * ub
    if determinant <= 0:
        return edges
    latency_s, s_per_byte = (u * bb - b * ub) / determinant, (b * uu - u * ub) / determinant
    return [*edges, (latency_s, s_per_byte)] if latency_s >= 0 and s_per_byte > _LEAST_S_PER_BYTE else edges


def _misfit(points: Sequence[tuple[int, float]], latency_s: float, s_per_byte: float) -> float:
    return sum(((latency_s + size * s_per_byte - time) / time) ** 2 for size, time in points)
