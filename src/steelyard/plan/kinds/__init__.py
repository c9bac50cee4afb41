"""The kinds of parallelism, one file each.

To add one: its file here, its twin in `steelyard.modules.kinds`, and a line below.

The order is that in which variants are written behind the levels of a strategy.
"""

import copyreg
from functools import lru_cache

from steelyard.plan.kinds.cp import CP
from steelyard.plan.kinds.dp import DP
from steelyard.plan.kinds.ep import EP
from steelyard.plan.kinds.fsdp import FSDP
from steelyard.plan.kinds.kind import Kind, Value, Variant
from steelyard.plan.kinds.tp import TP

KINDS: dict[str, Kind] = {kind.name: kind for kind in (DP, FSDP, TP, CP, EP)}
"""By name. A test may add one of its own."""
copyreg.pickle(Kind, lambda kind: (kind_named, (kind.name,)))  # each is one value, also in other processes and copies


def kind_named(name: str) -> Kind:
    """The kind of a name; raises `KeyError` for an unknown one."""
    return KINDS[name]


def level_kinds() -> tuple[Kind, ...]:
    """The kinds that a level may have."""
    return tuple(kind for kind in KINDS.values() if kind.is_level)


def variants() -> dict[str, tuple[Kind, Variant]]:
    """Every variant by its key, with the kind that it comes with."""
    return _variants_of(tuple(KINDS.values()))


@lru_cache
def _variants_of(kinds: tuple[Kind, ...]) -> dict[str, tuple[Kind, Variant]]:
    return {variant.key: (kind, variant) for kind in kinds for variant in kind.variants}


__all__ = ["CP", "DP", "EP", "FSDP", "KINDS", "TP", "Kind", "Value", "Variant", "kind_named", "level_kinds", "variants"]
