"""What a strategy may not do to a layer: the rules that plans are checked by and that the search obeys.

One rule, one reason in words; the same function serves a plan that a user wrote and every candidate of a search.
"""

from steelyard.model.chain import LayerKind, LayerRole
from steelyard.plan.strategy import Remat, Strategy

_PRODUCTS = {
    LayerRole.EMBEDDING: "an embedding has none",
    LayerRole.HEAD: "those of the head are the logits, most of what it holds",
}


def illegal_reason(kind: LayerKind, strategy: Strategy, *, microbatch_samples: int, seq_len: int) -> str | None:
    """Why ``strategy`` cannot run a layer of this ``kind``, or None where it can.

    ``microbatch_samples`` counts the samples of a microbatch over all ranks of the stage. Nothing is ever rounded:
    a degree that does not divide is illegal.
    """
    if microbatch_samples % strategy.data_degree:
        return (
            f"data degree {strategy.data_degree} ({strategy.parallel}) does not divide "
            f"the {microbatch_samples} samples of a microbatch"
        )
    if strategy.tp > 1 and (reason := _no_tp(kind, strategy, seq_len)) is not None:
        return reason
    if strategy.remat is Remat.SELECTIVE and kind.role is not LayerRole.BLOCK:
        return f"selective remat, which keeps matrix products, is for blocks: {_PRODUCTS[kind.role]}"
    if not strategy.is_aligned:
        return f"the levels of {strategy.parallel} are not runs of the stage mesh"
    return None


def _no_tp(kind: LayerKind, strategy: Strategy, seq_len: int) -> str | None:
    """Why a layer cannot be divided over the strategy's tensor-parallel ranks."""
    if kind.no_tp:
        return f"tp is not for the {kind.name} layers: {kind.no_tp}"
    if strategy.sp and kind.no_sp:
        return f"sp is not for the {kind.name} layers: {kind.no_sp}"
    for name, size in kind.tp_divides:
        if size % strategy.tp:
            return f"tp {strategy.tp} does not divide the {size} {name}" + ("" if name[-1] == "s" else " entries")
    if strategy.sp and seq_len % strategy.tp:
        return f"sp over {strategy.tp} ranks does not divide the sequence length {seq_len}"
    return None
