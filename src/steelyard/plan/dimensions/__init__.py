"""The parallelism dimensions, one file each.

To add one: its file here, its twin in `steelyard.modules.dimensions`, and a line below.

The order is that in which modes are written behind the levels of a strategy.
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
"""By name. A test may add one of its own."""
copyreg.pickle(
    Dimension, lambda dimension: (dimension_named, (dimension.name,))
)  # each is one value, also in other processes and copies


def dimension_named(name: str) -> Dimension:
    """The dimension of a name; raises `KeyError` for an unknown one."""
    return DIMENSIONS[name]


def level_dimensions() -> tuple[Dimension, ...]:
    """The dimensions that a level may have."""
    return tuple(dimension for dimension in DIMENSIONS.values() if dimension.is_level)


def modes() -> dict[str, tuple[Dimension, Mode]]:
    """Every mode by its key, with the dimension that it comes with."""
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
