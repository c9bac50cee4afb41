"""Activation checkpointing: which activations of a layer are computed again instead of being kept.

Source: Korthikanti et al. 2022 for the selective choice.
"""

from enum import StrEnum


class Remat(StrEnum):
    """Which activations of a layer are recomputed in the backward pass instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
