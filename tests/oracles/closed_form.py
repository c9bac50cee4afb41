"""Closed form of the step time of a synchronous pipeline without transfers."""

from collections.abc import Sequence


def closed_form_s(stage_times_s: Sequence[float], num_microbatches: int) -> float:
    """Σ tᵢ + (m − 1) max tᵢ: the step time of a synchronous pipeline whose stages take tᵢ per microbatch."""
    return sum(stage_times_s) + (num_microbatches - 1) * max(stage_times_s)
