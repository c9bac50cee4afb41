"""Expert parallelism: each rank has some of the routed experts of a layer, and tokens travel to them and back.

It takes no ranks of its own: its groups are the innermost of those that divide the layer's samples and tokens, and all
else of the layer is as their levels say. Over the data ranks outside the groups the experts' states are sharded or
replicated as the levels there say. Two all-to-alls forward and two backward carry the inputs and the results of the
experts that a rank's tokens take.

Source: Lepikhin et al. 2020 (GShard); Liu et al. 2025 (MoE parallel folding, arXiv 2504.14960).
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from steelyard.model.chain import LayerKind, ModelChain
from steelyard.plan.kinds.data import data_levels, degree_of, shard_levels
from steelyard.plan.kinds.kind import (
    Batch,
    Contradiction,
    Divides,
    Kind,
    Levels,
    Load,
    Placed,
    States,
    Traffic,
    Value,
    Variant,
)
from steelyard.plan.remat import Remat

if TYPE_CHECKING:
    from steelyard.plan.strategy import Strategy

MOST = 1024
"""The largest degree that can be written."""


def _offered(levels: Levels) -> tuple[int, ...]:
    """The degrees that divide the data ranks so that shards stay whole."""
    data, shards = degree_of(data_levels(levels)), degree_of(shard_levels(levels))
    degrees = (degree for degree in range(1, min(data, MOST) + 1) if data % degree == 0)
    return tuple(degree for degree in degrees if degree % shards == 0 or shards % degree == 0)


_TEXTS: dict[Value, str] = {degree: f"ep{degree}" if degree > 1 else "" for degree in range(1, MOST + 1)}
DEGREE = Variant(
    key="ep",
    texts=_TEXTS,
    pin={str(degree): degree for degree in range(1, MOST + 1)},
    offered=_offered,
)


def _contradiction(levels: Levels, variants: Mapping[str, Value]) -> Contradiction | None:
    data = degree_of(data_levels(levels))
    if variants.get("ep", 1) in _offered(levels):
        return None
    return Contradiction(
        field="ep",
        expected=f"a degree that divides the {data} data ranks" + (f": {', '.join(map(str, _offered(levels)))}"),
        hint="change ep, or the levels that divide samples",
    )


def _illegal(kind: LayerKind, strategy: "Strategy", _batch: Batch) -> str | None:
    degree = strategy.expert_degree
    if not kind.num_experts:
        return f"ep is for layers with experts, which the {kind.name} layers lack"
    own, part = kind.num_experts // strategy.tensor_degree, " of a tp rank" * (strategy.tensor_degree > 1)
    return f"ep {degree} does not divide the {own} experts{part}" if own % degree else None


def _serves(chain: ModelChain) -> str:
    return "" if any(kind.num_experts for kind in chain.kinds) else "the model has no experts"


def _traffic(load: Load) -> Iterator[Traffic]:
    for phase in load.exchanging:
        yield Traffic(phase=phase, collective="all_to_all", tensor_bytes=2 * load.routed_bytes, count=2, over="experts")


def _kept(load: Load) -> float:
    """Under selective remat what has arrived, there and back."""
    return 2 * load.routed_bytes if load.strategy.remat is Remat.SELECTIVE else 0.0


def _words(strategy: "Strategy") -> str:
    return f"experts over {strategy.expert_degree} of the data ranks, tokens sent to them and back"


EP = Kind(
    name="ep",
    divides=Divides.EXPERTS,
    states=States.DIVIDED,
    illegal=_illegal,
    traffic=_traffic,
    placement=lambda _strategy: Placed.BATCH,
    words=_words,
    term="tokens on their way to experts and back",
    hue="pink",
    variants=(DEGREE,),
    kept=_kept,
    contradiction=_contradiction,
    serves=_serves,
)
