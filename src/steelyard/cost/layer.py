r"""Time and memory of one layer under one strategy, term by term; everything else in this package adds these up.

Time of one microbatch on one rank, with $c$ compute and $d$ communication beside it:

$$t = \sum_\text{forward, backward} \big(c + \text{tp} + \text{exposed}(c, d)\big), \qquad
\text{exposed}(c, d) = \kappa \min(c, d) + \max(c, d) - \min(c, d) - c$$

and once a step: gradient all-reduce of replicated layers behind one backward pass, and the optimizer. On devices where
communication has no stream of its own (CPU processes), exposed is $d$.

Bytes of one rank, with $N$ parameters after tp, sharded $f$ ways, $q$ bytes of a parameter in compute. They describe
`steelyard.runtime`: FSDP2's `fully_shard` for fsdp, all such layers of a stage sharing one communication context, and a
`steelyard.modules.replicated` layer where $f = 1$ (dp, tp alone, one device):

| term         | bytes        | lives                                                      |
|--------------|--------------|------------------------------------------------------------|
| parameters   | 4 N / f      | always (fp32 master)                                       |
| gradients    | 4 N / f      | first backward to optimizer step; reduced in the last backward where f = 1 |
| optimizer    | 8 N / f      | always (two AdamW moments), with counts of steps and buffers that are not trained |
| gathered     | q N          | f = 1 and q < 4, ZeRO-2: the copy that computes, from forward to backward |
| activations  | traced       | per microbatch in flight; what the remat choice keeps of them |
| working set  | see `_transient_bytes` | while the layer runs                             |

A head tied to the embedding is a layer like any other: the runtime gives it a matrix of its own, and once a step the
two gradients are added (``tied``).

Not modelled: that a layer's all-gather starts late where the layer before is not told to prefetch it; the scratch of a
redistribution between two layouts; the two temporaries of an AdamW step, which are smaller than any working set.

Source: Rajbhandari et al. 2020 (ZeRO); Miao et al. 2022, section 4 (overlap slowdown).
"""

from dataclasses import dataclass, replace

from steelyard.cost.communication import Group, collective_s
from steelyard.cost.compute import compute_time, launch_s, optimizer_s, work_s
from steelyard.cost.execution import kept_state_bytes
from steelyard.cost.inputs import sample_bytes
from steelyard.cost.setting import MASTER_BYTES, Job, Setting
from steelyard.errors import InvalidProfileError
from steelyard.model.chain import LayerKind, LayerRole
from steelyard.plan.shared import SLICES_PER_TP_RANK
from steelyard.plan.strategy import DATA_KINDS, Parallelism, Remat, Strategy
from steelyard.profiles.profile import CollectiveCount, CollectiveKind, LayerProfile, Recomputation

_RECOMPUTED_INPUTS = 4
"""What the first norm of a block makes of its input, in inputs: a copy in fp32, which is two of bf16, and two more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank."""

    static_bytes: dict[str, int]
    activation_bytes: int
    """Per microbatch in flight."""
    transient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(LayerBytes):
    """Seconds and bytes of one layer on one rank. ``forward_s`` and ``backward_s`` are of one microbatch."""

    forward_s: dict[str, float]
    backward_s: dict[str, float]
    once_s: dict[str, float]
    """Once a step, whatever the number of microbatches."""

    @property
    def microbatch_s(self) -> float:
        """Forward and backward of one microbatch."""
        return sum(self.forward_s.values()) + sum(self.backward_s.values())


def layer_cost(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerCost:
    """The cost of a layer of this kind under a legal strategy.

    Raises `InvalidProfileError` where the profile lacks the layer at this tensor-parallel degree.
    """
    layer = layer_profile(kind, strategy, setting)
    samples = setting.microbatch_samples // strategy.data_degree
    forward, backward = _microbatch_time(layer, strategy, setting, samples)
    once = _once_time(layer, strategy, setting, forward, backward)
    if setting.job.chain.tied_embeddings and kind.role is not LayerRole.BLOCK:
        once["tied"] = tied_s(kind, strategy, setting)
    factor = setting.job.time_factor
    held = layer_bytes(kind, strategy, setting)
    return LayerCost(
        forward_s={name: factor * seconds for name, seconds in forward.items()},
        backward_s={name: factor * seconds for name, seconds in backward.items()},
        once_s={name: factor * seconds for name, seconds in once.items()},
        static_bytes=held.static_bytes,
        activation_bytes=held.activation_bytes,
        transient_bytes=held.transient_bytes,
    )


def layer_bytes(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerBytes:
    """The memory of a layer of this kind under a legal strategy; a profile without times is enough."""
    layer = layer_profile(kind, strategy, setting)
    samples = setting.microbatch_samples // strategy.data_degree
    return LayerBytes(
        static_bytes=_static_bytes(kind, layer, strategy, setting),
        activation_bytes=_activation_bytes(layer, strategy, samples),
        transient_bytes=_transient_bytes(kind, layer, strategy, setting, samples),
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


def layer_profile(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerProfile:
    """The profile of a layer of this kind at the strategy's tensor-parallel degree; `InvalidProfileError` if none."""
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
    lost_s = held_up_s(strategy, setting)
    _add_host(forward, compute.forward_launch_s + lost_s * num_calls(layer.forward_collectives))
    _add_host(backward, compute.backward_launch_s + lost_s * num_calls(layer.backward_collectives))
    if strategy.remat is not Remat.NONE:
        again_s = _recomputation_s(layer, strategy, setting, samples)
        backward["remat"] = setting.job.execution.remat_fraction * again_s
    if strategy.fsdp > 1:
        gather_s, scatter_s = _sharding_s(layer, strategy, setting)
        hooks_s = setting.job.profile.sharding_s(strategy.fsdp) / 2
        forward["fsdp"] = hooks_s + _beside(sum(forward.values()), gather_s, setting)
        again_s = gather_s if strategy.zero == 3 else 0.0
        backward["fsdp"] = hooks_s + _beside(sum(backward.values()), again_s + scatter_s, setting)
    return forward, backward


def _recomputation_s(layer: LayerProfile, strategy: Strategy, setting: Setting, samples: int) -> float:
    """Seconds that the remat choice adds to a microbatch: measured, or of the work and collectives repeated."""
    job = setting.job
    if layer.times:
        return layer.recomputation_s(strategy.remat, samples)
    again = layer.recomputation(strategy.remat)
    terms = {"compute": work_s(again.work, samples, job)}
    if strategy.tp > 1:
        terms["tp"] = _collectives_s(again.collectives, strategy, setting, samples)
    _add_host(terms, launch_s(again.work, again.collectives, job))
    return sum(terms.values())


def held_up_s(strategy: Strategy, setting: Setting) -> float:
    """What the host loses per tensor-parallel collective where it also serves a pipeline between nodes."""
    between_nodes = setting.num_stages > 1 and setting.job.cluster.num_nodes > 1
    return setting.job.execution.pipelined_collective_s * strategy.tp if between_nodes else 0.0


def num_calls(collectives: tuple[CollectiveCount, ...]) -> int:
    """How many collectives these are."""
    return sum(each.count for each in collectives)


def _add_host(terms: dict[str, float], launch_s: float) -> None:
    """Adds what the device waits for the host where launching takes longer than what is launched."""
    waits_s = launch_s - sum(terms.values())
    if waits_s > 0:
        terms["host"] = waits_s


def _once_time(
    layer: LayerProfile,
    strategy: Strategy,
    setting: Setting,
    forward: dict[str, float],
    backward: dict[str, float],
) -> dict[str, float]:
    """Seconds, once a step, of the optimizer and of reducing the gradients of a replicated layer.

    Where a framework shards the optimizer (ZeRO-1) the gradients are scattered and the new parameters gathered.
    """
    job, execution = setting.job, setting.job.execution
    if strategy.dp == 1:
        return {"optimizer": optimizer_s(layer.num_params / strategy.fsdp, job)}
    group = level_group(strategy, setting, *DATA_KINDS)
    gradient_bytes = layer.num_params * execution.reduce_bytes
    shards = execution.optimizer_shards(strategy.dp)
    if shards == 1:
        exposed = _beside(sum(backward.values()), _collective_s("all_reduce", gradient_bytes, group, job), setting)
    else:
        owners = replace(group, size=shards)
        kind: CollectiveKind = "reduce_scatter" if shards == strategy.dp else "all_reduce"
        pieces = execution.shard_pieces
        gather_s = pieces * _collective_s("all_gather", layer.num_params * job.compute_bytes / pieces, owners, job)
        reduce_s = pieces * _collective_s(kind, gradient_bytes / pieces, group, job)
        exposed = _beside(sum(backward.values()), reduce_s, setting)
        exposed += _beside(sum(forward.values()), gather_s, setting)
    return {"optimizer": optimizer_s(layer.num_params / shards, job), "dp": exposed}


def tied_s(kind: LayerKind, strategy: Strategy, setting: Setting, *, alike: bool = False) -> float:
    """Seconds, once a step, to gather the gradient of a tied matrix and to exchange it between two stages, in slices.

    ``alike`` where all copies are divided alike, which the tables of the search cannot know: then, and in frameworks
    with buffers of their own, each rank exchanges its part and gathers nothing.
    """
    job = setting.job
    if not job.chain.tied_embeddings or kind.role is LayerRole.BLOCK:
        return 0.0
    matrix_bytes = MASTER_BYTES * job.chain.vocab_size * job.chain.hidden_size
    distance = (setting.num_stages - 1) * setting.devices_per_stage
    pair = Group(size=2, stride=distance, span=job.cluster.num_devices)
    if alike or job.execution.states is not None:
        shards = strategy.tp * (strategy.fsdp if job.execution.states is None else 1)
        return _collective_s("all_reduce", matrix_bytes / shards, pair, job) if setting.num_stages > 1 else 0.0
    tensor, data = (level_group(strategy, setting, *kinds) for kinds in ({Parallelism.TP}, {Parallelism.FSDP}))
    count = SLICES_PER_TP_RANK * strategy.tp
    seconds = _collective_s("all_gather", matrix_bytes / tensor.size / count, data, job)
    seconds += _collective_s("all_gather", matrix_bytes / count, tensor, job)
    if setting.num_stages > 1:
        seconds += _collective_s("all_reduce", matrix_bytes / count, pair, job)
    return count * seconds


def _beside(compute_s: float, communication_s: float, setting: Setting) -> float:
    if not setting.job.overlaps:
        return communication_s
    return exposed_s(compute_s, communication_s, setting.job.profile.overlap_slowdown)


def _sharding_s(layer: LayerProfile, strategy: Strategy, setting: Setting) -> tuple[float, float]:
    """Seconds to gather the layer's parameters and to reduce and scatter its gradients."""
    job = setting.job
    group = level_group(strategy, setting, *DATA_KINDS)
    gather = _collective_s("all_gather", layer.num_params * job.compute_bytes, group, job)
    scatter = _collective_s("reduce_scatter", layer.num_params * job.execution.reduce_bytes, group, job)
    return gather, scatter


def _collectives_s(
    collectives: tuple[CollectiveCount, ...], strategy: Strategy, setting: Setting, samples: int
) -> float:
    job = setting.job
    group = level_group(strategy, setting, Parallelism.TP)
    exposed = 1 - job.execution.hidden_tp
    carried_s = exposed * sum(
        each.count * _collective_s(each.kind, each.tensor_bytes.at(samples) / each.count, group, job)
        for each in collectives
    )
    return carried_s + num_calls(collectives) * job.efficiency.jitter_s * (strategy.tp - 1) ** 2


def _collective_s(kind: CollectiveKind, num_bytes: float, group: Group, job: Job) -> float:
    return collective_s(kind, num_bytes, group, job.cluster, job.profile, job.efficiency.links)


def _static_bytes(kind: LayerKind, layer: LayerProfile, strategy: Strategy, setting: Setting) -> dict[str, int]:
    if setting.job.execution.states is not None:
        return kept_state_bytes(layer.num_params, strategy, setting.job.execution)
    sharded = -(-layer.num_params // strategy.fsdp)
    static = {
        "parameters": MASTER_BYTES * sharded,
        "gradients": kept_gradient_bytes(layer, strategy),
        "optimizer": 2 * MASTER_BYTES * sharded + layer.buffer_bytes,
    }
    working = sample_bytes(kind, strategy, setting)
    if kind.role is LayerRole.EMBEDDING and strategy.fsdp > 1 and setting.num_microbatches > 1:
        working += MASTER_BYTES * layer.num_params
    if working:
        static["working set"] = working
    if keeps_copy(strategy) and copy_bytes(layer, strategy, setting):
        static["gathered parameters"] = copy_bytes(layer, strategy, setting)
    return static


def kept_gradient_bytes(layer: LayerProfile, strategy: Strategy) -> int:
    """Gradients that a rank keeps from one microbatch to the next, and that the optimizer reads."""
    return MASTER_BYTES * -(-layer.num_params // strategy.fsdp)


def copy_bytes(layer: LayerProfile, strategy: Strategy, setting: Setting) -> int:
    """All parameters as a layer computes on them, where it does not compute on those that are trained themselves."""
    if strategy.fsdp == 1 and setting.job.compute_bytes == MASTER_BYTES:
        return 0
    return setting.job.compute_bytes * layer.num_params


def _activation_bytes(layer: LayerProfile, strategy: Strategy, samples: int) -> int:
    return int(held_bytes(layer, strategy).saved_bytes.at(samples))


def held_bytes(layer: LayerProfile, strategy: Strategy) -> LayerProfile | Recomputation:
    """Where the saved and the short-lived bytes of a layer stand under the strategy's remat choice."""
    return layer if strategy.remat is Remat.NONE else layer.recomputation(strategy.remat)


def keeps_copy(strategy: Strategy) -> bool:
    """Whether the parameters in compute precision stay between the forward and the backward pass of a layer."""
    return strategy.fsdp == 1 or strategy.zero == 2


def _transient_bytes(kind: LayerKind, layer: LayerProfile, strategy: Strategy, setting: Setting, samples: int) -> int:
    """Largest short-lived memory while the layer runs: in its forward, its backward, or as its gradients are reduced.

    Forward: working activations, the parameters in compute precision and the buffer they were gathered in. Backward:
    working activations (with what remat recomputes), the parameters with the buffer for the next layer's, their
    gradients in compute precision, and the reduction buffer of another layer (`_reducing_bytes`).
    Reduction: a replicated layer holds what autograd has made beside the buffer that it goes to, which counts as kept;
    a sharded block that buffer and its shard, and in place of a kept copy what is gathered ahead. As FSDP reduces the
    gradients of an embedding or a head, autograd still holds them, gloo copies what it scatters, and another layer may
    be gathered ahead.
    """
    if setting.job.execution.states is not None:
        return _framework_transient_bytes(layer, strategy, samples)
    compute, params = setting.job.compute_bytes, layer.num_params
    held, input_bytes = held_bytes(layer, strategy), layer.input_bytes.at(samples)
    working = held.backward_transient_bytes.at(samples)
    copy = 0 if keeps_copy(strategy) else copy_bytes(layer, strategy, setting)
    buffer = compute * params if strategy.fsdp > 1 else 0
    made = compute * params * gradient_copies(kind, strategy)
    gradients = _new_gradient_bytes(layer, strategy, setting) * gradient_copies(kind, strategy)
    forward = copy + buffer + held.forward_transient_bytes.at(samples)
    backward = copy + buffer + working + gradients + _reducing_bytes(kind, layer, setting)
    again = recomputed_input_bytes(layer, strategy, samples)
    reduction = input_bytes + again + made if strategy.fsdp == 1 else 0
    scratch = 0 if setting.job.overlaps else MASTER_BYTES * params
    if strategy.fsdp > 1 and kind.role is not LayerRole.BLOCK:
        gathers = copy and (kind.role is LayerRole.HEAD or setting.num_microbatches > 1)
        reduction = input_bytes + again + gradients + MASTER_BYTES * params + scratch + (buffer if gathers else 0)
    elif strategy.fsdp > 1:
        reduced = MASTER_BYTES * params + kept_gradient_bytes(layer, strategy)
        ahead = buffer if copy else 0
        reduction = input_bytes + again + max(made, scratch) + reduced + ahead
    return int(max(forward, backward, reduction)) + _replicated_buffer_bytes(strategy, setting)


def recomputed_input_bytes(layer: LayerProfile, strategy: Strategy, samples: int) -> int:
    """What full remat has left of a layer's work when the last of its gradients is made: what its first norm makes."""
    return _RECOMPUTED_INPUTS * int(layer.input_bytes.at(samples)) if strategy.remat is Remat.FULL else 0


def _reducing_bytes(kind: LayerKind, layer: LayerProfile, setting: Setting) -> int:
    """The buffer of the reduction before, which FSDP holds until the next one.

    Behind a block there is a block or the head, whose own working set is the larger then: it is taken as large as this
    layer's. Behind the head there is nothing but the last layer of the backward pass before: a block, or the embedding,
    which counts its own (`_static_bytes`).
    """
    if kind.role is not LayerRole.HEAD:
        return MASTER_BYTES * layer.num_params
    if setting.num_microbatches == 1:
        return 0
    job = setting.job
    blocks = {each.name for each in job.chain.kinds if each.role is LayerRole.BLOCK}
    return MASTER_BYTES * max(each.num_params for each in job.profile.layers if each.kind in blocks)


def gradient_copies(kind: LayerKind, strategy: Strategy) -> int:
    """How many times its part of the gradient a rank makes: DTensor makes that of a tp embedding whole everywhere."""
    return strategy.tp if kind.role is LayerRole.EMBEDDING else 1


def _framework_transient_bytes(layer: LayerProfile, strategy: Strategy, samples: int) -> int:
    """Largest short-lived memory of a framework whose states all have buffers of their own."""
    held = held_bytes(layer, strategy)
    return int(max(held.forward_transient_bytes.at(samples), held.backward_transient_bytes.at(samples)))


def _new_gradient_bytes(layer: LayerProfile, strategy: Strategy, setting: Setting) -> int:
    """Gradients that one backward pass makes beside those that are kept between microbatches.

    A sharded layer reduces them to a shard that is then added to the kept one. The buffer of a replicated layer, which
    counts as kept, is made only when the first backward pass has made all gradients: in fp32 it stands for them.
    """
    made = setting.job.compute_bytes * layer.num_params
    if strategy.fsdp > 1:
        return made + (0 if setting.num_microbatches == 1 else MASTER_BYTES * layer.num_params // strategy.fsdp)
    return 0 if setting.num_microbatches == 1 and setting.job.compute_bytes == MASTER_BYTES else made


def _replicated_buffer_bytes(strategy: Strategy, setting: Setting) -> int:
    """What the pipeline's buffers take beyond `pipeline_buffer_bytes` where all ranks of tp without sp have a copy.

    Counted with the working set, so that a stage has it once, whichever of its layers lie at a cut.
    """
    return 0 if strategy.sp else (strategy.tp - 1) * pipeline_buffer_bytes(setting)


def pipeline_buffer_bytes(setting: Setting) -> int:
    """Bytes that the pipeline keeps beside activations, where they are divided over all ranks of a stage.

    Every stage but the first has a buffer for the activation of every microbatch (those in flight are also the first
    layer's saved input), every stage but the last one for the gradient of every microbatch, and it keeps its outputs
    of the microbatches in flight. Interleaved, every chunk has these buffers, and all that it ever sent stays until the
    step ends, since torch waits for the sends only then.
    """
    count, stages = setting.num_microbatches, setting.num_stages
    if stages == 1 or setting.job.execution.states is not None:
        return 0
    if setting.num_chunks > 1:
        return 4 * setting.num_chunks * count * setting.activation_bytes // setting.devices_per_stage
    kept = count if setting.schedule == "gpipe" or stages > 2 else min(count, stages)
    return (count + kept) * setting.activation_bytes // setting.devices_per_stage
