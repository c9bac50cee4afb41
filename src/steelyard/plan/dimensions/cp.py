"""Context parallelism: each rank has a part of every sequence, and attends to the keys and values of all of it.

The parts are cut in head-tail order: of 2c equal pieces rank r takes the r-th and the r-th from the end, so that all
ranks have equal work in causal attention. Everything except attention works on a rank's own tokens. Attention either
gathers keys and values (forward, and again backward, where their gradients are reduced and scattered), or exchanges
sequence for heads before and after it (Ulysses). Parameters are treated as in data parallelism: their gradients are
summed over the ranks, or sharded together with an fsdp level.

Source: Llama 3 (Grattafiori et al. 2024, section 3.3.2) for gathering keys and values in head-tail order; Jacobs et al.
2023 (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from collections.abc import Iterator, Mapping

from steelyard.model.chain import LayerRole, LayerType
from steelyard.model.family import KV_HEADS, QUERY_HEADS
from steelyard.plan.dimensions.dimension import (
    Batch,
    Contradiction,
    Dimension,
    Divides,
    Levels,
    Load,
    Mode,
    Placed,
    States,
    StrategyView,
    Traffic,
    Value,
    Working,
    are_neighbours,
    data_levels,
    replica_levels,
    summed_once,
)

METHOD = Mode(
    key="cp_method", texts={"gather": "", "ulysses": "+ulysses"}, pin={"gather": "gather", "ulysses": "ulysses"}
)
"""Method by which attention reads the whole sequence."""


def _contradiction(levels: Levels, _modes: Mapping[str, Value]) -> Contradiction | None:
    dimensions = [level.dimension for level in levels]
    data = data_levels(levels)
    if any(level.dimension.divides is Divides.TENSORS for level in levels[: dimensions.index(CP)]):
        return Contradiction(
            field="parallel",
            expected="tp inside cp: tensor-parallel ranks share one part of the sequence",
            hint="write the tp level last, as in cp2-tp4",
        )
    if data[-1].dimension is not CP or not are_neighbours(levels, data):
        return Contradiction(
            field="parallel",
            expected="cp directly inside the levels that divide samples",
            hint="write the cp level after dp and fsdp, as in fsdp4-cp2-tp2",
        )
    return None


def _illegal(layer_type: LayerType, strategy: StrategyView, batch: Batch) -> str | None:
    degree = strategy.degree(CP)
    if layer_type.no_cp:
        return f"the {layer_type.name} layers do not support cp: {layer_type.no_cp}"
    if batch.seq_len % (2 * degree):
        return f"cp {degree} needs a sequence length that is a multiple of {2 * degree}, not {batch.seq_len}"
    return _undivided_heads(layer_type, strategy)


def _undivided_heads(layer_type: LayerType, strategy: StrategyView) -> str | None:
    """Return why ulysses cannot exchange the heads of a layer, or None if it can."""
    if strategy.mode("cp_method") == "ulysses" and layer_type.role is LayerRole.BLOCK:
        for name, size in layer_type.tp_divides:
            if name in (QUERY_HEADS, KV_HEADS) and size % strategy.head_degree:
                each = f"{max(size // strategy.tensor_degree, 1)} {name} of a rank"
                return f"ulysses over cp {strategy.degree(CP)} does not divide the {each}"
    return None


def _head_degree(strategy: StrategyView) -> int:
    return strategy.degree(CP) if strategy.mode("cp_method") == "ulysses" else 1


def _not_worth_for(strategy: StrategyView, _devices_per_node: int | None, layers: tuple[LayerType, ...]) -> str:
    """Return why ulysses is useless: it divides the heads of no block, and layers without attention do not need it."""
    reasons = [_undivided_heads(layer_type, strategy) for layer_type in layers if layer_type.role is LayerRole.BLOCK]
    return next((each for each in reasons if each), "") if all(reasons) else ""


def _traffic(load: Load) -> Iterator[Traffic]:
    if replica_levels(load.strategy.levels)[:1] == (load.strategy.level(CP),):
        yield from summed_once(load)
    if load.strategy.mode("cp_method") == "ulysses":
        for phase in load.exchanging:
            yield Traffic(phase=phase, collective="all_to_all", tensor_bytes=load.attention_bytes, num_calls=2)
        return
    for phase in load.exchanging:
        yield Traffic(phase=phase, collective="all_gather", tensor_bytes=load.key_value_bytes)
    yield Traffic(phase="backward", collective="reduce_scatter", tensor_bytes=load.key_value_bytes)


def _working(load: Load) -> Working:
    """Return the bytes of gathered keys and values with their unsorted form; for ulysses, of both layouts of its
    tensors.

    Gathering holds keys and values twice; the backward pass also holds their gradients with the contribution of one
    piece of the sequence. Selective remat keeps the results of attention, as in an undivided layer.

    Ulysses keeps results in both layouts; if recomputed, they exist before the backward pass. Selective remat keeps the
    results of all-to-alls.
    """
    own_keys = load.key_value_bytes / load.strategy.degree(CP)
    query = (load.attention_bytes - own_keys) / 2
    remat = str(load.strategy.remat)
    if load.strategy.mode("cp_method") == "ulysses":
        saved = {"none": query, "selective": load.attention_bytes}.get(remat, 0.0)
        exchanged = query + own_keys
        return Working(saved=saved, forward=2 * exchanged, backward=2 * exchanged)
    return Working(forward=2 * load.key_value_bytes, backward=3 * load.key_value_bytes)


def _words(strategy: StrategyView) -> str:
    how = "sequence exchanged for heads" if strategy.mode("cp_method") == "ulysses" else "keys and values gathered"
    return f"tokens of every sequence over {strategy.degree(CP)} ranks, {how} for attention"


CP = Dimension(
    name="cp",
    title="context parallelism",
    divides=Divides.TOKENS,
    states=States.FOLLOWING,
    illegal=_illegal,
    traffic=_traffic,
    working=_working,
    head_degree=_head_degree,
    placement=lambda _strategy: Placed.HEAD_TAIL,
    words=_words,
    term="keys and values of context parallelism",
    hue="brown",
    modes=(METHOD,),
    contradiction=_contradiction,
    not_worth_for=_not_worth_for,
    serves=lambda chain: next(
        (each.no_cp for each in chain.layer_types if each.role is LayerRole.BLOCK and each.no_cp), ""
    ),
)
