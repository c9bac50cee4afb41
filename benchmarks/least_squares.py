"""Robust least squares within bounds, in numpy: what the fits of the benchmarks share."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
STEP = 1e-4
"""Relative step of a derivative."""


def jacobian(residuals: Callable[[Array], Array], x: Array, at: Array) -> Array:
    """[residuals, parameters] derivatives at ``x``, where the residuals are ``at``, by forward differences."""
    columns = []
    for index, value in enumerate(x):
        step = STEP * (abs(value) or STEP)
        moved = x.copy()
        moved[index] += step
        columns.append((residuals(moved) - at) / step)
    return np.stack(columns, axis=1)


def least(
    residuals: Callable[[Array], Array],
    start: Array,
    lowest: Array,
    highest: Array,
    *,
    scale: float = 0.1,
    weights: Array | None = None,
    rounds: int = 80,
    derivatives: Callable[[Array], Array] | None = None,
) -> Array:
    """The parameters of the least sum of w log(1 + (r / scale)^2), by Levenberg and Marquardt's steps."""
    x = np.clip(start, lowest, highest)
    found = residuals(x)
    w = np.ones_like(found) if weights is None else weights
    spread = highest - lowest

    def loss(r: Array) -> float:
        return float(np.sum(w * np.log1p((r / scale) ** 2)))

    lost, damping = loss(found), 1e-2
    for _ in range(rounds):
        slope = jacobian(residuals, x, found) if derivatives is None else derivatives(x)
        robust = w / (1 + (found / scale) ** 2)
        curvature, gradient = slope.T @ (robust[:, None] * slope), slope.T @ (robust * found)
        floor = 1e-12 * np.eye(len(x)) * (1 + np.trace(curvature))
        before = lost
        for _ in range(12):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)) + floor, -gradient)
            moved = np.where(spread > 0, np.clip(x + step, lowest, highest), x)
            tried = residuals(moved)
            if loss(tried) < lost:
                x, found, lost, damping = moved, tried, loss(tried), damping / 3
                break
            damping *= 4
        if before - lost <= 1e-6 * before:
            break
    return x
