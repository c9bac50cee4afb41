"""Sharded data parallelism: samples of its own, and a part of parameters, gradients and optimizer states, on each rank.

Parameters are gathered before the forward pass and again before the backward pass (ZeRO-3), or kept in between
(ZeRO-2); gradients are reduced and scattered in every backward pass.

Source: Rajbhandari et al. 2020 (ZeRO); `torch.distributed.fsdp.fully_shard`.
"""

from collections.abc import Iterator

from steelyard.plan.dimensions.dimension import (
    Dimension,
    Divides,
    Load,
    Mode,
    Over,
    Placed,
    States,
    StrategyView,
    Traffic,
    indivisible_samples,
)

ZERO = Mode(key="zero", texts={3: "", 2: "zero2"}, pin={"2": 2, "3": 3}, of_papers=(3,))
"""The ZeRO stage: 2 keeps parameters gathered between forward and backward."""


def _traffic(load: Load) -> Iterator[Traffic]:
    yield from _of_states("shards", load.parameter_bytes, load.gradient_bytes, load)
    if load.expert_parameter_bytes:
        yield from _of_states("expert shards", load.expert_parameter_bytes, load.expert_gradient_bytes, load)


def _of_states(over: Over, gathered: float, reduced: float, load: Load) -> Iterator[Traffic]:
    yield Traffic(phase="forward", collective="all_gather", tensor_bytes=gathered, over=over, beside_compute=True)
    if not load.strategy.keeps_gathered:
        yield Traffic(phase="backward", collective="all_gather", tensor_bytes=gathered, over=over, beside_compute=True)
    yield Traffic(phase="backward", collective="reduce_scatter", tensor_bytes=reduced, over=over, beside_compute=True)


def _words(strategy: StrategyView) -> str:
    keeps = strategy.keeps_gathered
    kept = ", gathered once and kept until the backward pass (ZeRO-2)" if keeps else ""
    return f"parameters and samples over {strategy.degree(FSDP)} ranks{kept}"


FSDP = Dimension(
    name="fsdp",
    divides=Divides.SAMPLES,
    states=States.SHARDED,
    illegal=indivisible_samples,
    traffic=_traffic,
    placement=lambda _strategy: Placed.BATCH,
    words=_words,
    term="gathering parameters and scattering gradients, what compute does not hide",
    hue="vermilion",
    modes=(ZERO,),
    keeps_gathered=lambda strategy: strategy.mode("zero") == 2,
    is_of_papers=True,
    plain_name="plain FSDP",
)
