"""The parallelism dimensions, one file each.

To add one, write its file here and its implementation in `steelyard.modules.dimensions`, and add a line below. Modes
are written after the levels of a strategy in this order.
"""

import copyreg
from functools import lru_cache

from steelyard.plan.dimensions.cp import CP
from steelyard.plan.dimensions.dimension import Dimension, Mode, Value
from steelyard.plan.dimensions.dp import DP
from steelyard.plan.dimensions.ep import EP
from steelyard.plan.dimensions.fsdp import FSDP
from steelyard.plan.dimensions.tp import TP

DIMENSIONS: dict[str, Dimension] = {dimension.name: dimension for dimension in (DP, FSDP, TP, CP, EP)}
"""Dimensions by name. A test may add one."""
copyreg.pickle(
    Dimension, lambda dimension: (dimension_named, (dimension.name,))
)  # each stays one object, also in other processes and copies


def dimension_named(name: str) -> Dimension:
    """Return the dimension with this name. Raise `KeyError` if it is unknown."""
    return DIMENSIONS[name]


def level_dimensions() -> tuple[Dimension, ...]:
    """Return the dimensions that a level may have."""
    return tuple(dimension for dimension in DIMENSIONS.values() if dimension.is_level)


def modes() -> dict[str, tuple[Dimension, Mode]]:
    """Return every mode by its key, with its dimension."""
    return _modes_of(tuple(DIMENSIONS.values()))


@lru_cache
def _modes_of(dimensions: tuple[Dimension, ...]) -> dict[str, tuple[Dimension, Mode]]:
    return {mode.key: (dimension, mode) for dimension in dimensions for mode in dimension.modes}


__all__ = [
    "CP",
    "DIMENSIONS",
    "DP",
    "EP",
    "FSDP",
    "TP",
    "Dimension",
    "Mode",
    "Value",
    "dimension_named",
    "level_dimensions",
    "modes",
]
