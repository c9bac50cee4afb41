r"""Time and memory of one layer under one strategy, term by term; everything else in this package adds these up.

Time of one microbatch on one rank, with $c$ compute and $d$ communication beside it:

$$t = \sum_\text{forward, backward} \big(c + \text{tp} + \text{exposed}(c, d)\big), \qquad
\text{exposed}(c, d) = \kappa \min(c, d) + \max(c, d) - \min(c, d) - c$$

and once a step: gradient all-reduce of replicated layers behind one backward pass, and the optimizer. On devices where
communication has no stream of its own (CPU processes), exposed is $d$.

Bytes of one rank, with $N$ parameters after tp, sharded $f$ ways, $q$ bytes of a parameter in compute. They describe
FSDP2 as `steelyard.runtime` uses it, with `fully_shard` for fsdp and `replicate` where $f = 1$ (dp, tp
alone, one device), all layers of a stage sharing one communication context:

| term         | bytes        | lives                                                      |
|--------------|--------------|------------------------------------------------------------|
| parameters   | 4 N / f      | always (fp32 master)                                       |
| gradients    | 4 N / f      | first backward to optimizer step; reduced in the last backward where f = 1 |
| optimizer    | 8 N / f      | always (two AdamW moments)                                 |
| gathered     | q N          | f = 1 and ZeRO-2: the copy that computes, from forward to backward |
| activations  | traced       | per microbatch in flight; the layer's input alone under full remat |
| working set  | see `_transient_bytes` | while the layer runs                             |

A head tied to the embedding is a layer like any other: the runtime gives it a matrix of its own, and once a step the
two gradients are gathered and added (``tied``).

Not modelled: that a layer's all-gather starts late where the layer before is not told to prefetch it; the scratch of a
redistribution between two layouts; the two temporaries of an AdamW step, which are smaller than any working set.

Source: Rajbhandari et al. 2020 (ZeRO); Miao et al. 2022, section 4 (overlap slowdown).
"""

from dataclasses import dataclass

from steelyard.cost.communication import Group, collective_s
from steelyard.cost.compute import compute_time, optimizer_s
from steelyard.cost.setting import MASTER_BYTES, Setting
from steelyard.errors import InvalidProfileError
from steelyard.model.chain import LayerKind, LayerRole
from steelyard.plan.strategy import DATA_KINDS, Parallelism, Remat, Strategy
from steelyard.profiles.profile import CollectiveCount, LayerProfile

_NUM_PENDING_COLLECTIVES = 3
"""Results of collectives that PyTorch still holds when a layer runs; seen with gloo on 4 processes, torch 2.13."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Seconds and bytes of one layer on one rank. ``forward_s`` and ``backward_s`` are of one microbatch."""

    forward_s: dict[str, float]
    backward_s: dict[str, float]
    once_s: dict[str, float]
    """Once a step, whatever the number of microbatches."""
    static_bytes: dict[str, int]
    activation_bytes: int
    """Per microbatch in flight."""
    transient_bytes: int

    @property
    def microbatch_s(self) -> float:
        """Forward and backward of one microbatch."""
        return sum(self.forward_s.values()) + sum(self.backward_s.values())


def layer_cost(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerCost:
    """The cost of a layer of this kind under a legal strategy.

    Raises `InvalidProfileError` where the profile lacks the layer at this tensor-parallel degree.
    """
    layer = _profile_of(kind, strategy, setting)
    samples = setting.microbatch_samples // strategy.data_degree
    forward, backward = _microbatch_time(layer, strategy, setting, samples)
    return LayerCost(
        forward_s=forward,
        backward_s=backward,
        once_s=_once_time(layer, strategy, setting, sum(backward.values())) | _tied_time(kind, strategy, setting),
        static_bytes=_static_bytes(layer, strategy, setting),
        activation_bytes=_activation_bytes(layer, strategy, samples),
        transient_bytes=_transient_bytes(layer, strategy, setting, samples),
    )


def exposed_s(compute_s: float, communication_s: float, slowdown: float) -> float:
    """Seconds that communication adds to the compute it runs beside, when each slows the other by ``slowdown``."""
    shorter, longer = sorted((compute_s, communication_s))
    return slowdown * shorter + (longer - shorter) - compute_s


def level_group(strategy: Strategy, setting: Setting, *kinds: Parallelism) -> Group:
    """The shape of the process groups over which a strategy uses these kinds (on one level)."""
    stride = 1
    for level in reversed(strategy.levels):
        if level.kind in kinds:
            return Group(size=level.degree, stride=stride, span=setting.devices_per_stage)
        stride *= level.degree
    return Group(size=1, stride=1, span=setting.devices_per_stage)


def _profile_of(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerProfile:
    layer = setting.job.profile.layer(kind.name, strategy.tp, strategy.sp)
    if layer is None:
        raise InvalidProfileError(
            field=f"layers.{kind.name}",
            found=f"no entry for tp {strategy.tp}" + (" with sp" if strategy.sp else ""),
            expected="an entry for every tensor-parallel degree of the strategies",
            hint="profile or trace the model with this degree",
        )
    return layer


def _microbatch_time(
    layer: LayerProfile, strategy: Strategy, setting: Setting, samples: int
) -> tuple[dict[str, float], dict[str, float]]:
    compute = compute_time(layer, samples, setting.job)
    forward = {"compute": compute.forward_s}
    backward = {"compute": compute.backward_s}
    if not compute.includes_tp and strategy.tp > 1:
        forward["tp"] = _collectives_s(layer.forward_collectives, strategy, setting, samples)
        backward["tp"] = _collectives_s(layer.backward_collectives, strategy, setting, samples)
    if strategy.remat is Remat.FULL:
        backward["remat"] = compute.forward_s + forward.get("tp", 0.0)
    if strategy.fsdp > 1:
        gather_s, scatter_s = _sharding_s(layer, strategy, setting)
        forward["fsdp"] = _beside(sum(forward.values()), gather_s, setting)
        again_s = gather_s if strategy.zero == 3 else 0.0
        backward["fsdp"] = _beside(sum(backward.values()), again_s + scatter_s, setting)
    return forward, backward


def _once_time(layer: LayerProfile, strategy: Strategy, setting: Setting, backward_s: float) -> dict[str, float]:
    job = setting.job
    once = {"optimizer": optimizer_s(layer.num_params / strategy.fsdp, job)}
    if strategy.dp > 1:
        group = level_group(strategy, setting, *DATA_KINDS)
        reduce_s = collective_s("all_reduce", layer.num_params * MASTER_BYTES, group, job.cluster, job.profile)
        once["dp"] = _beside(backward_s, reduce_s, setting)
    return once


def _tied_time(kind: LayerKind, strategy: Strategy, setting: Setting) -> dict[str, float]:
    """Seconds, once a step, to gather the whole gradient of a tied matrix and to exchange it between two stages."""
    job = setting.job
    if not job.chain.tied_embeddings or kind.role is LayerRole.BLOCK:
        return {}
    matrix_bytes = MASTER_BYTES * job.chain.vocab_size * job.chain.hidden_size
    tensor, data = (level_group(strategy, setting, *kinds) for kinds in ({Parallelism.TP}, {Parallelism.FSDP}))
    seconds = collective_s("all_gather", matrix_bytes / tensor.size, data, job.cluster, job.profile)
    seconds += collective_s("all_gather", matrix_bytes, tensor, job.cluster, job.profile)
    if setting.num_stages > 1:
        distance = (setting.num_stages - 1) * setting.devices_per_stage
        pair = Group(size=2, stride=distance, span=job.cluster.num_devices)
        seconds += collective_s("all_reduce", matrix_bytes, pair, job.cluster, job.profile)
    return {"tied": seconds}


def _beside(compute_s: float, communication_s: float, setting: Setting) -> float:
    if not setting.job.overlaps:
        return communication_s
    return exposed_s(compute_s, communication_s, setting.job.profile.overlap_slowdown)


def _sharding_s(layer: LayerProfile, strategy: Strategy, setting: Setting) -> tuple[float, float]:
    """Seconds to gather the layer's parameters and to reduce and scatter its gradients."""
    job = setting.job
    group = level_group(strategy, setting, *DATA_KINDS)
    gather = collective_s("all_gather", layer.num_params * job.compute_bytes, group, job.cluster, job.profile)
    scatter = collective_s("reduce_scatter", layer.num_params * MASTER_BYTES, group, job.cluster, job.profile)
    return gather, scatter


def _collectives_s(
    collectives: tuple[CollectiveCount, ...], strategy: Strategy, setting: Setting, samples: int
) -> float:
    job = setting.job
    group = level_group(strategy, setting, Parallelism.TP)
    return sum(
        each.count
        * collective_s(each.kind, each.tensor_bytes.at(samples) / each.count, group, job.cluster, job.profile)
        for each in collectives
    )


def _static_bytes(layer: LayerProfile, strategy: Strategy, setting: Setting) -> dict[str, int]:
    sharded = -(-layer.num_params // strategy.fsdp)
    static = {
        "parameters": MASTER_BYTES * sharded,
        "gradients": MASTER_BYTES * sharded,
        "optimizer": 2 * MASTER_BYTES * sharded,
    }
    if _keeps_copy(strategy):
        static["gathered parameters"] = setting.job.compute_bytes * layer.num_params
    return static


def _activation_bytes(layer: LayerProfile, strategy: Strategy, samples: int) -> int:
    saved = layer.input_bytes if strategy.remat is Remat.FULL else layer.saved_bytes
    return int(saved.at(samples))


def _keeps_copy(strategy: Strategy) -> bool:
    """Whether the parameters in compute precision stay between the forward and the backward pass of a layer."""
    return strategy.fsdp == 1 or strategy.zero == 2


def _transient_bytes(layer: LayerProfile, strategy: Strategy, setting: Setting, samples: int) -> int:
    """Largest short-lived memory while the layer runs: in its forward, its backward, or as its gradients are reduced.

    Forward: working activations, the parameters in compute precision and the buffer they were gathered in. Backward:
    working activations (with what remat recomputes), the parameters with the buffer for the next layer's, their
    gradients in compute precision, and the reduction buffer of the layer before, taken as large as this layer's.
    Reduction: beside the gradients, a replicated layer copies them twice (FSDP2 with a shard group of one rank divides
    them into a new tensor); a sharded layer holds less than in its backward pass. The tensors of the last collectives
    of tp outlive their use.
    """
    compute, params = setting.job.compute_bytes, layer.num_params
    input_bytes, working = layer.input_bytes.at(samples), layer.backward_transient_bytes.at(samples)
    if strategy.remat is Remat.FULL:
        working = max(working, layer.forward_transient_bytes.at(samples))
        working += max(0.0, layer.saved_bytes.at(samples) - input_bytes)
    copy = 0 if _keeps_copy(strategy) else compute * params
    buffer = compute * params if strategy.fsdp > 1 else 0
    gradients = _new_gradient_bytes(layer, strategy, setting)
    forward = copy + buffer + layer.forward_transient_bytes.at(samples)
    backward = copy + (buffer if copy else 0) + working + gradients + MASTER_BYTES * params
    reduction = 2 * MASTER_BYTES * params + input_bytes if strategy.fsdp == 1 else 0
    pending = _NUM_PENDING_COLLECTIVES * _collective_bytes(layer, samples)
    return int(max(forward, backward, reduction) + pending) + _replicated_buffer_bytes(strategy, setting)


def _collective_bytes(layer: LayerProfile, samples: int) -> float:
    """The largest tensor that one tensor-parallel collective of the layer works on."""
    calls = (*layer.forward_collectives, *layer.backward_collectives)
    return max((each.tensor_bytes.at(samples) / each.count for each in calls), default=0.0)


def _new_gradient_bytes(layer: LayerProfile, strategy: Strategy, setting: Setting) -> int:
    """Gradients that one backward pass makes beside those that are kept between microbatches.

    A sharded layer reduces them to a shard that is then added to the kept one. A replicated layer in fp32 keeps the
    very gradients that autograd makes; from the second microbatch on they are added to the first, which autograd does
    out of place for the DTensors of tp.
    """
    made = setting.job.compute_bytes * layer.num_params
    if strategy.fsdp > 1:
        return made + (0 if setting.num_microbatches == 1 else MASTER_BYTES * layer.num_params // strategy.fsdp)
    if setting.job.compute_bytes < MASTER_BYTES:
        return made
    if setting.num_microbatches == 1:
        return 0
    return 2 * made if strategy.tp > 1 else made


def _replicated_buffer_bytes(strategy: Strategy, setting: Setting) -> int:
    """What the pipeline's buffers take beyond `pipeline_buffer_bytes` where all ranks of tp without sp have a copy.

    Counted with the working set, so that a stage has it once, whichever of its layers lie at a cut.
    """
    return 0 if strategy.sp else (strategy.tp - 1) * pipeline_buffer_bytes(setting)


def pipeline_buffer_bytes(setting: Setting) -> int:
    """Bytes that the pipeline keeps beside activations, where they are divided over all ranks of a stage.

    Every stage but the first has a buffer for the activation of every microbatch (those in flight are also the first
    layer's saved input), every stage but the last one for the gradient of every microbatch, and it keeps its outputs
    of the microbatches in flight.
    """
    count, stages = setting.num_microbatches, setting.num_stages
    if stages == 1:
        return 0
    kept = count if setting.schedule == "gpipe" or stages > 2 else min(count, stages)
    return (count + kept) * setting.activation_bytes // setting.devices_per_stage
