"""What a strategy may not do to a layer: the rules that plans are checked by and that the search obeys.

One rule, one reason in words; the same function serves a plan that a user wrote and every candidate of a search. The
rules of a parallelism dimension stand in its own file (`steelyard.plan.dimensions`).
"""

from steelyard.model.chain import LayerRole, LayerType
from steelyard.plan.dimensions import DIMENSIONS
from steelyard.plan.dimensions.dimension import Batch
from steelyard.plan.strategy import Remat, Strategy

_PRODUCTS = {
    LayerRole.EMBEDDING: "an embedding has none",
    LayerRole.HEAD: "those of the head are the logits, most of what it holds",
}


def illegal_reason(layer_type: LayerType, strategy: Strategy, batch: Batch) -> str | None:
    """Why ``strategy`` cannot run a layer of this ``layer_type``, or None where it can.

    Nothing is ever rounded: a degree that does not divide is illegal.
    """
    for each in DIMENSIONS.values():
        if each in strategy.dimensions:
            found = each.illegal(layer_type, strategy, batch)
            if found is not None:
                return found
    if strategy.remat is Remat.SELECTIVE and layer_type.role is not LayerRole.BLOCK:
        return f"selective remat, which keeps matrix products, is for blocks: {_PRODUCTS[layer_type.role]}"
    if not strategy.is_aligned:
        return f"the levels of {strategy.parallel} are not runs of the stage mesh"
    return None
