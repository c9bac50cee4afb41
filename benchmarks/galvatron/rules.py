r"""The published cost rules: seconds and MB of a layer under a strategy, of a switch, and what a stage holds besides.

For a layer under (pp $p$, tp, dp) with global batch $B$, $b = B/\text{dp}$ samples and $m$ microbatches, in ms and MB:

$$t = 1.1 \Big[ (3f + a)\,\frac{p+m-1}{pm} + 0.3 \min(c, d) + \frac{\max(d - c, 0)}{q} + g
+ \frac{o}{24} + \frac{h}{n} \Big]$$

| symbol | meaning                                                                                               |
|--------|-------------------------------------------------------------------------------------------------------|
| $f$    | forward: ms per sample × b / tp                                                                         |
| $a$    | tensor-parallel all-reduces: 2 (tp−1)/tp × b × seq × hidden × 4 bytes × 4 (decoder: 6)                   |
| $c$    | what of the backward, 2f, may overlap: all; of a layer with tp and dp half where dp = 2, two thirds in a |
|        | decoder; half in any layer under (2, 2, 2) on 8 and (4, 2, 2) on 16 GPUs                                 |
| $d$    | data-parallel all-reduce: 2 (dp−1)/dp × parameters / tp; half of it for sharded dp on 16 GPUs           |
| $q$    | p for plain dp without tp on 8 GPUs, else 1                                                             |
| $g$    | gathering of sharded parameters: half the all-reduce on 8 GPUs, all of it on 16                          |
| $o$    | overhead of the whole model (T5: 60 ms), where dp > 1                                                    |
| $h$    | 16 GPUs, p > 1: 2 × b × seq × hidden × 4 bytes between stages; n = layers, but 24 for T5 and Swin        |

A stage takes the sum over its layers and of the switches between them, a step the sum over the stages: the bubble is
inside each layer, and nothing is paid between two stages. So unlike stages need no balance, only memory.

Memory: states 4 × parameters / tp, sharded × (1/dp + 0.025), on 16 GPUs × (1/dp + 0.003); activations × b.

Source: PKU-DAIR/Hetu at df32daa; the README of `../data/galvatron_2022` describes it, except for the rules of g, d, h
and of the ends of a pipeline on 16 GPUs, for (2, 2, 2), and for the switch to fewer tensor-parallel ranks; the
published numbers need them (`tests/search/test_galvatron_paper.py`). ViT on 16 GPUs has the microbatches of Swin.
"""

import math
from dataclasses import dataclass

from galvatron.inputs import Inputs, Layer, Other
from steelyard.plan.dimensions import DP, FSDP, TP
from steelyard.plan.dimensions.dimension import Level
from steelyard.plan.strategy import Strategy

MB = 1024**2
SLOWDOWN = 0.3
INFLATION = 1.1e-3
CONTEXT_MB = 1024
OVERHEAD_LAYERS = 24
SWITCHED_MB_PER_SAMPLE = 2
ORDERING_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where the rules are evaluated: a model on a cluster, one global batch, one pipeline degree."""

    inputs: Inputs
    batch: int
    num_stages: int

    @property
    def num_devices(self) -> int:
        """Devices of one stage."""
        return self.inputs.num_gpus // self.num_stages


def layer_s(point: Point, layer: Layer, strategy: Strategy) -> float:
    """Contribution of one layer to the step time."""
    inputs, stages = point.inputs, point.num_stages
    samples = point.batch / strategy.data_degree
    m = microbatches(point, strategy)
    boundary = samples * layer.seq * layer.hidden * 4 / MB
    message = 2 * (strategy.degree(TP) - 1) / strategy.degree(TP) * boundary * layer.tp_allreduces
    forward = layer.fwd_ms * samples / strategy.degree(TP)
    compute = 3 * forward + message * _coefficient(point, strategy, is_tp=True)
    extra = _synchronisation_ms(point, layer, strategy, 2 * forward)
    if strategy.data_degree > 1:
        extra += inputs.overhead_ms / OVERHEAD_LAYERS
    if stages > 1 and inputs.p2p_ms_per_mb:
        num_layers = len(inputs.layers) if inputs.is_alike else OVERHEAD_LAYERS
        extra += 2 * boundary * inputs.p2p_ms_per_mb[stages] / num_layers
    return (compute * (stages + m - 1) / (stages * m) + extra) * INFLATION


def _synchronisation_ms(point: Point, layer: Layer, strategy: Strategy, backward: float) -> float:
    """What data parallelism adds to the compute of a layer."""
    data, is_sharded, is_16 = strategy.data_degree, strategy.degree(FSDP) > 1, point.inputs.num_gpus == 16
    whole = 2 * (data - 1) / data * layer.param_mb / strategy.degree(TP) * _coefficient(point, strategy, is_tp=False)
    sync = whole / 2 if is_sharded and is_16 else whole
    overlappable = backward * overlapping_share(point, layer, strategy)
    rest = max(sync - overlappable, 0.0)
    if strategy.degree(TP) == 1 and not is_sharded and not is_16:
        rest /= point.num_stages
    gather = 0.0 if not is_sharded else whole if is_16 else whole / 2
    return SLOWDOWN * min(sync, overlappable) + rest + gather


def overlapping_share(point: Point, layer: Layer, strategy: Strategy) -> float:
    """The part of the backward that may overlap with the data-parallel all-reduce."""
    if strategy.degree(TP) == 1 or strategy.data_degree == 1:
        return 1.0
    if strategy.degree(TP) == strategy.data_degree == 2 and point.num_stages > 1:
        return 1 / 2
    if layer.is_decoder:
        return 2 / 3
    return 1 / 2 if strategy.data_degree == 2 else 1.0


def microbatches(point: Point, strategy: Strategy) -> float:
    """The published choice of microbatches; it need not be whole."""
    stages = point.num_stages
    samples = point.batch // strategy.data_degree
    if stages == 1:
        return 1.0
    if point.inputs.num_gpus == 16:
        size = 4 if point.inputs.model in {"bert", "t5"} else 16 if stages <= 8 else 32
        return float(max(1, math.ceil(samples // strategy.degree(TP) / size)))
    match point.inputs.model:
        case "bert":
            is_quarter = (stages, strategy.degree(TP)) in {(2, 4), (4, 2)}
            found = samples / 4 if is_quarter else samples / 2 if samples < 6 else samples / 8 + 2
        case "vit":
            found = 1 if samples == 8 else 2
        case "t5":
            found = 1 if samples == 2 else 3 if stages == 8 else 2
        case "swin":
            found = 1 if samples <= 8 else 2 if samples < 32 else 3 if samples <= 96 else 4
    return float(found)


def _coefficient(point: Point, strategy: Strategy, *, is_tp: bool) -> float:
    """Milliseconds per MB of an all-reduce over the tensor-parallel or the data-parallel group."""
    size = strategy.degree(TP) if is_tp else strategy.data_degree
    if size == 1:
        return 0.0
    is_inner = (strategy.levels[-1].dimension is TP) == is_tp
    return point.inputs.allreduce_ms_per_mb[point.num_stages, size, is_inner]


def switch_s(point: Point, before: Strategy, after: Strategy) -> float:
    """Redistribution between two layers of a stage, and the published 0.1 ms that orders sharded before replicated."""
    if before.hidden == after.hidden:
        return ORDERING_S if before.degree(FSDP) > 1 and after.degree(DP) > 1 else 0.0
    if not _is_moved(point, before, after):
        return 0.0
    size = (after.degree(TP) - 1) / after.degree(TP) * SWITCHED_MB_PER_SAMPLE * point.batch / after.data_degree
    return size * _coefficient(point, after, is_tp=True) / 1000


def _is_moved(point: Point, before: Strategy, after: Strategy) -> bool:
    """Whether activations move: to more tensor-parallel ranks, or between mixed layouts of another rank order."""
    if after.degree(TP) > before.degree(TP):
        return True
    is_reordered = len(before.levels) == len(after.levels) == 2 and _is_tp_inner(before) != _is_tp_inner(after)
    if not is_reordered or after.degree(TP) == before.degree(TP):
        return is_reordered
    if point.inputs.num_gpus == 16 and point.inputs.is_alike:
        return True
    return point.num_devices == 8 and (before.degree(TP), after.degree(TP)) == (4, 2)


def _is_tp_inner(strategy: Strategy) -> bool:
    return strategy.levels[-1].dimension is TP


def layer_mb(point: Point, layer: Layer, strategy: Strategy) -> float:
    """Model states and activations of one layer; raises `KeyError` where no activation was published for its tp."""
    states = 4 * layer.param_mb / strategy.degree(TP)
    if strategy.degree(FSDP) > 1:
        states *= 1 / strategy.degree(FSDP) + (0.003 if point.inputs.num_gpus == 16 else 0.025)
    return states + layer.act_mb[strategy.degree(TP)] * point.batch / strategy.data_degree


def other_mb(point: Point) -> tuple[float, ...]:
    """Memory of each stage besides its layers, for pure data parallelism inside the stages."""
    inputs, stages = point.inputs, point.num_stages
    samples = point.batch / point.num_devices
    if inputs.num_gpus == 8:
        held = inputs.other.states_mb + inputs.other.act_mb * samples + CONTEXT_MB
        return (held,) * stages if inputs.is_alike else (held, *(0.0,) * (stages - 1))
    if stages == 1:
        return (_held(inputs.outside.whole, samples) + CONTEXT_MB,)
    first, last = _ends_mb(point, samples)
    ends = [first + CONTEXT_MB, *(CONTEXT_MB,) * (stages - 2), last + CONTEXT_MB]
    return (max(ends),) * stages if inputs.is_alike else tuple(ends)


def _ends_mb(point: Point, samples: float) -> tuple[float, float]:
    """16 GPUs: the first and the last stage; an end that runs one microbatch at a time saves a part of the others."""
    outside, model = point.inputs.outside, point.inputs.model
    pure = Strategy(levels=(Level(dimension=DP, degree=point.num_devices),) if point.num_devices > 1 else ())
    saved = outside.reduction_mb * samples * (1 - 1 / min(microbatches(point, pure), samples))
    first, last = _held(outside.first, samples) - saved, _held(outside.last, samples) - saved
    if model in {"bert", "t5"}:
        first = _held(outside.first, samples / point.num_stages)
    if model == "swin":
        last = _held(outside.last, samples / point.num_stages)
    return first, last


def _held(other: Other, samples: float) -> float:
    return other.states_mb + other.act_mb * samples
