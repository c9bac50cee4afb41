"""Sharded data parallelism: each rank has its own samples, and a part of parameters, gradients and optimizer states.

| mode  | parameters are whole                    | gradients are whole       | gathered, reduced    |
|-------|-----------------------------------------|---------------------------|----------------------|
| zero3 | in the forward and in the backward pass | in the backward pass      | twice, once a microbatch |
| zero2 | from the forward to the backward pass   | in the backward pass      | once, once a microbatch |
| zero1 | from first forward to last backward     | from first backward to last | once, once a step |

All three shard optimizer states and fp32 parameters, and everything else between steps. With one microbatch zero1 is
zero2. In a pipeline, zero1 is the effect of torch's pipeline stages on layers that are not resharded after forward
(torchtitan's default there); without one, it is accumulation within FSDP2's `set_requires_gradient_sync(False)`. A
separate mode for either would be the same.

A degree of 1 shards only over the ranks of cp: ``fsdp1-cp8``, as torchtitan does.

Source: Rajbhandari et al. 2020 (ZeRO); `torch.distributed.fsdp.fully_shard`.
"""

from collections.abc import Callable, Iterator
from functools import partial

from steelyard.plan.dimensions.dimension import (
    Dimension,
    Divides,
    Levels,
    Load,
    Mode,
    Over,
    Placed,
    States,
    StrategyView,
    Traffic,
    indivisible_samples,
)

ZERO = Mode(key="zero", texts={3: "", 2: "zero2", 1: "zero1"}, pin={"1": 1, "2": 2, "3": 3}, of_papers=(3,))
"""ZeRO stage: 2 keeps parameters gathered between forward and backward, 1 keeps parameters and gradients whole for a
step.

With one microbatch the search leaves out 1, because it equals 2.
"""


def _traffic(load: Load) -> Iterator[Traffic]:
    states: list[tuple[Over, float, float]] = [("shards", load.parameter_bytes, load.gradient_bytes)]
    if load.expert_parameter_bytes:
        states.append(("expert shards", load.expert_parameter_bytes, load.expert_gradient_bytes))
    for over, gathered, reduced in states:
        sent: Callable[..., Traffic] = partial(Traffic, over=over, beside_compute=True)
        whole = load.strategy.keeps_whole
        yield sent(phase="step" if load.gathers_once else "forward", collective="all_gather", tensor_bytes=gathered)
        if not load.strategy.keeps_gathered:
            yield sent(phase="backward", collective="all_gather", tensor_bytes=gathered)
        yield sent(phase="step" if whole else "backward", collective="reduce_scatter", tensor_bytes=reduced)


def _words(strategy: StrategyView) -> str:
    kept = ", gathered once and kept until the backward pass (ZeRO-2)" if strategy.keeps_gathered else ""
    what = "optimizer states" if strategy.keeps_whole else "parameters"
    kept = ", parameters and gradients whole throughout the step (ZeRO-1)" if strategy.keeps_whole else kept
    if strategy.degree(FSDP) == 1:
        return f"{what} over the {strategy.state_shards} ranks that divide tokens{kept}"
    return f"{what} and samples over {strategy.degree(FSDP)} ranks{kept}"


def _not_worth(levels: Levels, _devices_per_node: int | None) -> str:
    """Skip sharding over cp alone together with tp: a gain of about 0.3 % in pipelines for half as much search."""
    is_alone = any(level.dimension is FSDP and level.degree == 1 for level in levels)
    if is_alone and any(level.dimension.divides is Divides.TENSORS for level in levels):
        return "states sharded only over cp are searched without tp"
    return ""


FSDP = Dimension(
    name="fsdp",
    title="sharded data parallelism",
    divides=Divides.SAMPLES,
    states=States.SHARDED,
    illegal=indivisible_samples,
    traffic=_traffic,
    placement=lambda _strategy: Placed.BATCH,
    words=_words,
    term="exposed gathering of parameters and scattering of gradients",
    hue="vermilion",
    modes=(ZERO,),
    not_worth=_not_worth,
    keeps_gathered=lambda strategy: strategy.mode("zero") != 3,
    keeps_whole=lambda strategy: strategy.mode("zero") == 1,
    is_of_papers=True,
    plain_name="plain FSDP",
)
