"""Tensor parallelism: each rank has a part of every matrix of the layer, and computes with it on all samples.

Its collectives are in the trace of the layer: without sequence parallelism an all-reduce after attention and after the
feed-forward part, with it an all-gather before and a reduce-scatter after each. Sequence parallelism also divides the
hidden state between the matrices. If there are fewer key-value heads than ranks, every rank holds the weights of all
heads and computes with one; the ranks sum the gradients of these weights in every backward pass. Example: Qwen2.5-1.5B
has 2 of 128 entries. A block under tp 4 then holds 2 · (1536 + 1) · 256 weights for keys and values on every rank,
12.29 M in all instead of the 11.70 M of a quarter, and sums 1.57 MB of their gradients in bf16 for each microbatch.

Source: Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al. 2022, section 4.2, for sequence parallelism.
"""

from collections.abc import Iterator, Mapping

from steelyard.model.chain import LayerType
from steelyard.plan.dimensions.dimension import (
    Batch,
    Dimension,
    Divides,
    Load,
    Mode,
    Placed,
    States,
    StrategyView,
    Traffic,
)

SP = Mode(key="sp", texts={False: "", True: "+sp"}, pin={"on": True, "off": False})
"""Sequence parallelism: the ranks divide the sequence outside the matrices."""


def _illegal(layer_type: LayerType, strategy: StrategyView, batch: Batch) -> str | None:
    degree, sp = strategy.degree(TP), strategy.mode("sp")
    if layer_type.no_tp:
        return f"the {layer_type.name} layers do not support tp: {layer_type.no_tp}"
    if sp and layer_type.no_sp:
        return f"the {layer_type.name} layers do not support sp: {layer_type.no_sp}"
    for name, size in layer_type.tp_divides:
        if size % degree and not (name in layer_type.tp_shares and degree % size == 0):
            return f"tp {degree} does not divide the {size} {name}" + ("" if name[-1] == "s" else " entries")
    if sp and batch.seq_len % strategy.sequence_degree:
        return f"sp over {strategy.sequence_degree} ranks does not divide the sequence length {batch.seq_len}"
    return None


def _traffic(load: Load) -> Iterator[Traffic]:
    for phase, collectives in load.traced.items():
        for collective, count, num_bytes in collectives:
            yield Traffic(phase=phase, collective=collective, tensor_bytes=num_bytes, num_calls=count)


def _shape(strategy: StrategyView) -> Mapping[str, int]:
    degree = strategy.degree(TP)
    return {"tp": degree} | ({"sp": degree} if strategy.mode("sp") else {})


def _words(strategy: StrategyView) -> str:
    where = "neighbouring" if strategy.levels[-1].dimension is TP else "strided"
    extra = ", and the sequence (sp)" if strategy.mode("sp") else ""
    return f"every matrix over {strategy.degree(TP)} {where} ranks{extra}"


TP = Dimension(
    name="tp",
    title="tensor parallelism",
    divides=Divides.TENSORS,
    states=States.DIVIDED,
    illegal=_illegal,
    traffic=_traffic,
    placement=lambda strategy: Placed.SEQUENCE if strategy.mode("sp") else Placed.WHOLE,
    words=_words,
    term="collectives of tensor parallelism",
    hue="orange",
    modes=(SP,),
    shape=_shape,
    head_degree=lambda strategy: strategy.tensor_degree,
    stays_in_node=True,
    is_of_papers=True,
)
