"""What a plan may be asked to do without: a kind of parallelism, a variant of one, or recomputation."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.plan.kinds import KINDS, Kind, variants
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat, Strategy

Keeps = Callable[[Strategy], bool]


def means_of(plan: Plan) -> dict[str, Keeps]:
    """What can be taken away from a plan: kinds, variants and remat that it uses, by the rival's name."""
    found: dict[str, Keeps] = {f"without {kind}": partial(_lacks, kind) for kind in reversed(KINDS.values())}
    for key, (kind, variant) in variants().items():
        if kind.is_level:
            texts = [text.lstrip("+") for text in variant.texts.values() if text]
            found[f"without {' or '.join(texts)}"] = partial(_is_default, key)
    found["without remat"] = lambda strategy: strategy.remat is Remat.NONE
    return {name: keeps for name, keeps in found.items() if not all(keeps(each) for each in plan.strategies)}


def _lacks(kind: Kind, strategy: Strategy) -> bool:
    return kind not in strategy.kinds


def _is_default(key: str, strategy: Strategy) -> bool:
    return strategy.variant(key) == variants()[key][1].default


def restricted(tables: CostTables, keeps: Keeps) -> CostTables:
    """The tables with only those strategies legal that are kept."""
    kept = np.array([keeps(strategy) for strategy in tables.strategies], dtype=bool)
    return replace(tables, legal=tables.legal & kept)
