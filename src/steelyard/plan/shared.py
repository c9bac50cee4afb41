"""How the gradients of a shared parameter's copies meet under a plan; the runtime does it, the cost model counts it."""

from collections.abc import Sequence

from steelyard.model.chain import LayerRole, ModelChain, SharedWeight
from steelyard.plan.strategy import Strategy

SLICES_PER_RANK = 4
"""Three slices of fp32 are then less than what a rank's part of a matrix takes in its own backward pass."""


def num_slices(shared: SharedWeight, strategies: Sequence[Strategy], chain: ModelChain) -> int | None:
    """In how many slices the gradients are gathered whole and summed, or None where each rank sums its own parts.

    Ranks need no others where all copies are divided alike. Matrices of the vocabulary are divided by rows alone, so
    slices of their columns can be gathered; what blocks share is small and gathered at once. ``strategies`` are those
    of all layers.
    """
    used = [strategies[layer] for layer, _ in shared.copies]
    if len({strategy.levels for strategy in used}) == 1:
        return None
    if any(chain.type_of(layer).role is LayerRole.BLOCK for layer, _ in shared.copies):
        return 1
    return SLICES_PER_RANK * max(strategy.tensor_degree for strategy in used)
