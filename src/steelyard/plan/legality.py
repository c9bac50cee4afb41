"""What a strategy may not do to a layer: the rules that plans are checked by and that the search obeys.

One rule, one reason in words; the same function serves a plan that a user wrote and every candidate of a search. The
rules of a kind of parallelism stand in its own file (`steelyard.plan.kinds`).
"""

from steelyard.model.chain import LayerKind, LayerRole
from steelyard.plan.kinds import KINDS
from steelyard.plan.kinds.kind import Batch
from steelyard.plan.strategy import Remat, Strategy

_PRODUCTS = {
    LayerRole.EMBEDDING: "an embedding has none",
    LayerRole.HEAD: "those of the head are the logits, most of what it holds",
}


def illegal_reason(kind: LayerKind, strategy: Strategy, batch: Batch) -> str | None:
    """Why ``strategy`` cannot run a layer of this ``kind``, or None where it can.

    Nothing is ever rounded: a degree that does not divide is illegal.
    """
    for each in KINDS.values():
        if each in strategy.kinds:
            found = each.illegal(kind, strategy, batch)
            if found is not None:
                return found
    if strategy.remat is Remat.SELECTIVE and kind.role is not LayerRole.BLOCK:
        return f"selective remat, which keeps matrix products, is for blocks: {_PRODUCTS[kind.role]}"
    if not strategy.is_aligned:
        return f"the levels of {strategy.parallel} are not runs of the stage mesh"
    return None
