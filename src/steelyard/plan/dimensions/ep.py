"""Expert parallelism: each rank has some of the routed experts of a layer, and tokens travel to them and back.

It uses ranks of other levels: its groups are the innermost of those that divide the layer's samples and tokens, and the
levels define everything else of the layer. Outside the groups, the levels shard or replicate the experts' states over
the data ranks. All-to-alls carry the inputs and results of the experts that a rank's tokens select: forward the token
counts, which the host reads before it sends on, the inputs, and the results back; backward the gradients of both. Full
remat repeats all exchanges, selective remat none. The balance of the routing is not known before training: times and
memory are those of the busiest expert rank, for an assumed imbalance.

Source: Lepikhin et al. 2020 (GShard); Liu et al. 2025 (MoE parallel folding, arXiv 2504.14960).
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from steelyard.model.chain import LayerType
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
    data_levels,
    degree_of,
    is_power_of_four_times,
    shard_levels,
)

MOST = 1024
"""Largest degree that can be written."""


@lru_cache(maxsize=4096)
def _offered(levels: Levels) -> tuple[int, ...]:
    """Return the degrees that divide the data ranks and keep shards whole."""
    data, shards = degree_of(data_levels(levels)), degree_of(shard_levels(levels))
    degrees = (degree for degree in range(1, min(data, MOST) + 1) if data % degree == 0)
    return tuple(degree for degree in degrees if degree % shards == 0 or shards % degree == 0)


DEGREE = Mode(
    key="ep",
    texts={degree: f"ep{degree}" if degree > 1 else "" for degree in range(1, MOST + 1)},
    pin={str(degree): degree for degree in range(1, MOST + 1)},
    offered=_offered,
)


def _contradiction(levels: Levels, modes: Mapping[str, Value]) -> Contradiction | None:
    data = degree_of(data_levels(levels))
    if modes.get("ep", 1) in _offered(levels):
        return None
    return Contradiction(
        field="ep",
        expected=f"a degree that divides the {data} data ranks: {', '.join(map(str, _offered(levels)))}",
        hint="change ep, or the levels that divide samples",
    )


def _illegal(layer_type: LayerType, strategy: StrategyView, _batch: Batch) -> str | None:
    degree = strategy.expert_degree
    if not layer_type.num_experts:
        return f"ep needs experts, and the {layer_type.name} layers have none"
    own, part = layer_type.num_experts // strategy.tensor_degree, " of a tp rank" * (strategy.tensor_degree > 1)
    return f"ep {degree} does not divide the {own} experts{part}" if own % degree else None


def _not_worth_for(strategy: StrategyView, devices_per_node: int | None, layers: tuple[LayerType, ...]) -> str:
    """Return why an expert degree is not searched.

    The search covers the degree with the fewest experts per rank whose group stays inside a node, 4, 16, … times that
    degree, and the largest: within a node a larger degree sends hardly more, and each rank gathers less.
    """
    degree, tensors = strategy.expert_degree, strategy.tensor_degree
    if not layers or degree == 1:
        return ""
    if tensors > 1 and strategy.levels[-1].dimension.divides is not Divides.TENSORS:
        return "ep is searched with tp on neighbouring ranks"
    counts = {layer_type.num_experts // tensors for layer_type in layers if layer_type.num_experts}
    possible = [each for each in _offered(strategy.levels) if any(count % each == 0 for count in counts)]
    if degree not in possible:
        return f"ep {degree} does not divide the experts of any layer"
    inside = max(1, (devices_per_node or strategy.num_devices) // tensors)
    nearest = max(each for each in possible if each <= inside)
    if degree != possible[-1] and not is_power_of_four_times(degree, nearest):
        return (
            f"ep is searched with groups of {nearest} ranks, as many as a node allows, 4, 16, … times as many, or all"
        )
    return ""


def _traffic(load: Load) -> Iterator[Traffic]:
    for phase, collectives in load.exchanged.items():
        for collective, count, num_bytes in collectives:
            yield Traffic(
                phase=phase,
                collective="all_gather" if load.sends_to_all else collective,  # the reduction back takes as long
                tensor_bytes=load.part_sent * num_bytes,
                num_calls=count,
                over="experts",
                num_waits=0 if phase == "backward" else 1,
            )


EP = Dimension(
    name="ep",
    title="expert parallelism",
    divides=Divides.EXPERTS,
    states=States.DIVIDED,
    illegal=_illegal,
    traffic=_traffic,
    placement=lambda _strategy: Placed.BATCH,
    words=lambda strategy: f"experts over {strategy.expert_degree} of the data ranks, tokens sent to them and back",
    term="tokens on their way to experts and back",
    hue="pink",
    modes=(DEGREE,),
    contradiction=_contradiction,
    not_worth_for=_not_worth_for,
    serves=lambda chain: "" if chain.has_experts else "the model has no experts",
)
