r"""Time of one layer under one strategy, term by term; everything else in this package adds these up.

Time of one microbatch on one rank, with $c$ compute and $d$ communication that overlaps it:

$$t = \sum_\text{forward, backward} \big(c + \text{tp} + \text{exposed}(c, d)\big), \qquad
\text{exposed}(c, d) = \kappa \min(c, d) + \max(c, d) - \min(c, d) - c$$

and once per step: the gradient all-reduce of replicated layers, which overlaps one backward pass, and the optimizer. On
devices without communication streams (CPU processes), the exposed time is $d$. Bytes are in `steelyard.cost.memory`.

A head tied to the embedding is a layer like any other: the runtime gives it its own matrix, and once per step the two
gradients are added (``tied``).

Not modelled: the late all-gather of a layer that the layer before does not prefetch; scratch memory of a redistribution
between two layouts.

Source: Rajbhandari et al. 2020 (ZeRO); Miao et al. 2022, section 4 (overlap slowdown).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np

from steelyard.cost.communication import Group
from steelyard.cost.compute import (
    ADDED_ON_HOST,
    ComputeTime,
    compute_time,
    host_copies_s,
    host_work_s,
    launch_s,
    moving_s,
    optimizer_s,
    products_s,
    wait_s,
    work_s,
)
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import (
    held_params,
    hidden_matrices,
    layer_load,
    layer_profile,
    levels_group,
    matrix_params,
    mean_shard_params,
    rank_samples,
    traffic_group,
)
from steelyard.cost.layer_memory import own_params, working_bytes
from steelyard.engines.execution import Execution
from steelyard.model.chain import LayerRole, LayerType
from steelyard.plan.dimensions import Dimension
from steelyard.plan.dimensions.dimension import (
    Divides,
    Levels,
    Phase,
    States,
    Traffic,
    degree_of,
    replica_levels,
    shard_levels,
)
from steelyard.plan.stages import SLICES_PER_RANK
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import Collective, LayerProfile, Work
from steelyard.profiles.shapes import Affine
from steelyard.units import Amount, at_each, hashable, is_positive

Seconds = TypeVar("Seconds", bound=Amount)
Terms = dict[str, Amount]
"""Seconds by term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(Generic[Seconds]):
    """Seconds of one layer on one rank by term: numbers, or arrays [M] as in `JobConfig`."""

    forward_s: dict[str, Seconds]
    """Seconds of one microbatch, like ``backward_s``."""
    backward_s: dict[str, Seconds]
    once_s: dict[str, Seconds]
    """Seconds once per step, independent of the number of microbatches."""

    @property
    def microbatch_s(self) -> Seconds:
        """Seconds of forward and backward pass of one microbatch."""
        forward_s, backward_s = cast(Amount, sum(self.forward_s.values())), cast(Amount, sum(self.backward_s.values()))
        return cast(Seconds, forward_s + backward_s)


def layer_cost(
    layer_type: LayerType, strategy: Strategy, config: JobConfig, *, alike: bool = False
) -> LayerCost[float]:
    """Return the cost of a layer under a legal strategy: that of `layer_costs`, and `tied_s` as term ``tied``."""
    costs = layer_costs(layer_type, strategy, config, {})
    forward, backward, once = (
        {name: float(np.ravel(seconds)[0]) for name, seconds in terms.items()}
        for terms in (costs.forward_s, costs.backward_s, costs.once_s)
    )
    if config.job.chain.sums_tied and layer_type.role is not LayerRole.BLOCK:
        once["tied"] = config.job.time_factor * tied_s(layer_type, strategy, config, alike=alike)
    return LayerCost(forward_s=forward, backward_s=backward, once_s=once)


def layer_costs(
    layer_type: LayerType, strategy: Strategy, config: JobConfig, known: "KnownPasses"
) -> LayerCost[Amount]:
    """Return the costs [M] of a layer type under a strategy that is legal in all M, without those of tied matrices.

    ``known`` is a cache for strategies of one type and configuration that differ only in remat. Raises
    `InvalidProfileError` if the profile lacks the layer at this tensor-parallel degree.
    """
    layer = layer_profile(layer_type, strategy, config, imbalance=1.0)
    busiest = layer_profile(layer_type, strategy, config) if strategy.expert_degree > 1 else layer
    samples = rank_samples(strategy, config.samples)
    key = strategy.levels, strategy.modes
    own = own_params(layer_type, layer, strategy, config)
    sent = _Sent(own, strategy, config)
    if key not in known:
        known[key] = _passes(layer, busiest, sent, config, samples)
    forward, backward = known[key].forward, known[key].backward.copy()
    if strategy.remat is not Remat.NONE:
        backward["remat"] = _recomputation_s(layer, busiest, sent, config, samples)
    if config.job.effects.saves_on_host and layer_type.role is LayerRole.BLOCK and layer.has_backward:
        copied = {"offload": host_copies_s(_saved_bytes(layer, strategy, config, samples), config.job)}
        forward, backward = forward | copied, backward | copied
    _add_shards(backward, "backward", sent, config)
    if config.job.effects.steps_on_host and not strategy.keeps_whole:
        forward, backward = _with_host_copies(forward, backward, layer, strategy, config)
    once, factor = _once_time(layer_type, own, sent, config, forward, backward), config.job.time_factor
    if factor != 1:
        parts = forward, backward, once
        forward, backward, once = ({name: factor * seconds for name, seconds in terms.items()} for terms in parts)
    return LayerCost(forward_s=forward, backward_s=backward, once_s=once)


def weight_pass_s(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> float:
    """Seconds of a layer's backward pass of one microbatch that move to its weight pass, if the schedule has these.

    These are the products for weight gradients of a block's linear layers, by their FLOP: the difference between
    backward and forward pass. 0 for embedding and head; routed experts are excluded.
    """
    layer, job = layer_profile(layer_type, strategy, config, imbalance=1.0), config.job
    if layer_type.role is not LayerRole.BLOCK or not layer.has_backward or job.effects.low_precision:
        return 0.0
    samples = rank_samples(strategy, config.microbatch_samples)
    whole, backward = layer.backward.matmul_flop.at(samples), layer.backward
    flop = max(0.0, whole - layer.forward.matmul_flop.at(samples))
    if job.chain.family.task.reads_text:
        tokens = samples * job.seq_len
        trained = layer.trained
        flop = min(flop, 2 * tokens * (trained.num_params - trained.expert_params))
    share = flop / whole if whole else 0.0
    if layer.times:
        whole += backward.attention_flop.at(samples)
        return job.time_factor * float(compute_time(layer, samples, job).backward_s) * (flop / whole if whole else 0.0)
    work = Work(
        matmul_flop=backward.matmul_flop * share,
        attention_flop=Affine(),
        matmul_bytes=backward.matmul_bytes * share,
        memory_bytes=Affine(),
        num_kernels=0,
    )
    return job.time_factor * float(work_s(work, samples, job))


def exposed_s(compute_s: Amount, communication_s: Amount, slowdown: float) -> Amount:
    """Seconds that communication adds to the compute it overlaps, if each slows the other by ``slowdown``."""
    shorter: Amount = np.minimum(compute_s, communication_s)
    longer: Amount = np.maximum(compute_s, communication_s)
    return slowdown * shorter + (longer - shorter) - compute_s


class Passes(NamedTuple):
    """Terms of a layer's passes under a strategy that are independent of remat."""

    forward: Terms
    backward: Terms
    """Terms without sharded-data communication, which overlaps all others."""


KnownPasses = dict[tuple[Levels, tuple[tuple[str, object], ...]], Passes]
"""Passes of a layer type in a configuration, by levels and modes."""


def _passes(layer: LayerProfile, busiest: LayerProfile, sent: "_Sent", config: JobConfig, samples: Amount) -> Passes:
    """Price both passes; ``busiest`` is the layer on the rank with the most work, which the others wait for."""
    job, strategy = config.job, sent.strategy
    compute = compute_time(layer, samples, job)
    forward: Terms = {"compute": compute.forward_s}
    backward: Terms = {"compute": compute.backward_s}
    if job.execution.accumulation_bytes and not layer.times:
        added = held_params(layer.trained, strategy)
        backward["compute"] = compute.backward_s + moving_s(added * job.execution.accumulation_bytes, job)
    lost_s = 0.0  # host overhead per collective if the host also serves a pipeline between nodes
    if config.is_piped and job.cluster.num_nodes > 1:
        lost_s = job.execution.pipelined_collective_s * strategy.tensor_degree
    for dimension in strategy.dimensions:
        if sent.by[dimension].waits and not (compute.includes_shape and dimension.shape(strategy)):
            forward[dimension.name] = sent.in_line_s(dimension, "forward")
            backward[dimension.name] = sent.in_line_s(dimension, "backward")
    if strategy.expert_degree > 1:
        forward["imbalance"], backward["imbalance"] = _imbalance_s(layer, busiest, compute, samples, job)
    _add_host(forward, compute.forward_launch_s + lost_s * sum(each.count for each in layer.forward_collectives))
    _add_host(backward, compute.backward_launch_s + lost_s * sum(each.count for each in layer.backward_collectives))
    _add_shards(forward, "forward", sent, config)
    return Passes(forward, backward)


def _add_shards(terms: Terms, phase: Phase, sent: "_Sent", config: JobConfig) -> None:
    """Add the exposed seconds of gathering and scattering shards."""
    strategy = sent.strategy
    for level in strategy.levels:
        layer_type = level.dimension
        if layer_type.states is States.SHARDED:
            hooks_s = config.job.profile.sharding_s(strategy.state_shards) / 2
            beside_s = sent.by[layer_type].beside_s.get(phase, 0.0)
            terms[layer_type.name] = hooks_s + _beside(sum(terms.values()), beside_s, config)


def _with_host_copies(
    forward: Terms, backward: Terms, layer: LayerProfile, strategy: Strategy, config: JobConfig
) -> tuple[Terms, Terms]:
    """Return the terms with the exposed seconds of copying gradients to the host and, if they rest there, parameters
    from it.

    The copies overlap with the layer before, except those of FSDP on a single rank. From the second microbatch on its
    host adds gradients while the device waits; ZeRO-Offload adds them on the device.
    """
    job, trained = config.job, mean_shard_params(layer.trained, strategy)
    gradients, streams = job.effects.weight_bytes * trained, job.effects.parameters_on_host
    parameters = streams * (gradients + job.compute_bytes * (mean_shard_params(layer, strategy) - trained))
    found = []
    for terms, num_bytes in (forward, parameters), (backward, (parameters + gradients) * layer.has_backward):
        copies_s = host_copies_s(num_bytes, job)
        exposed = copies_s if streams and strategy.state_shards == 1 else _beside(sum(terms.values()), copies_s, config)
        found.append(terms | {"offload": terms.get("offload", 0.0) + exposed})
    added_s = np.where(streams & (config.samples < job.global_batch), host_work_s(ADDED_ON_HOST * trained, job), 0.0)
    found[1]["offload"] = found[1]["offload"] + added_s
    return found[0], found[1]


def _imbalance_s(
    layer: LayerProfile, busiest: LayerProfile, compute: ComputeTime, samples: Amount, job: Job
) -> tuple[Amount, Amount]:
    """Additional seconds, forward and backward, of the busiest rank over the mean.

    For measured layers, which are measured without imbalance, proportional to the FLOP.
    """
    if layer.times:
        forward, backward = (
            at_each(samples, partial(_more_flop, getattr(busiest, name), getattr(layer, name)))
            for name in ("forward", "backward")
        )
        return forward * compute.forward_s, backward * compute.backward_s
    most = compute_time(busiest, samples, job)
    return most.forward_s - compute.forward_s, most.backward_s - compute.backward_s


def _more_flop(most: Work, mean: Work, samples: float) -> float:
    """Relative excess of the busiest rank's FLOP over the mean."""
    most_flop, mean_flop = (work.matmul_flop.at(samples) + work.attention_flop.at(samples) for work in (most, mean))
    return most_flop / mean_flop - 1 if mean_flop else 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _SentByDimension:
    """Seconds of the collectives of one parallelism dimension in a layer, by phase."""

    waits: bool
    """Whether the layer waits for any of them."""
    in_line_s: dict[Phase, Amount] = field(default_factory=dict)
    beside_s: dict[Phase, Amount] = field(default_factory=dict)
    """Seconds of collectives that can overlap compute, without overlap."""
    num_calls: dict[Phase, int] = field(default_factory=dict)
    """Number of calls in line."""
    last_s: Amount = 0.0
    """Seconds of collectives that overlap only the last backward pass of a step, without overlap."""
    once_s: list[tuple[Amount, Amount]] = field(default_factory=list)
    """Seconds of each collective once per step: to reduce gradients, and to gather parameters."""


class _Sent:
    """Seconds of the collectives of a strategy's dimensions in one layer, cached in the job.

    Those of a dimension depend on the strategy's levels, the dimension's modes and the degree that divides experts, and
    also on remat and the samples of a microbatch unless the dimension divides samples, because it then sends only
    states.
    """

    def __init__(self, layer: LayerProfile, strategy: Strategy, config: JobConfig) -> None:
        self.strategy, self._job = strategy, config.job
        self.by: dict[Dimension, _SentByDimension] = {}
        by_samples, span = (strategy.remat, hashable(config.samples)), config.devices_per_stage
        for dimension in strategy.dimensions:
            modes = tuple([strategy.mode(each.key) for each in dimension.modes])
            work = None if dimension.divides is Divides.SAMPLES else by_samples
            key = "sent", layer, dimension, strategy.levels, modes, strategy.expert_degree, span, work
            self.by[dimension] = config.job.once(key, partial(_sent_by, dimension, layer, strategy, config))

    def in_line_s(self, dimension: Dimension, phase: Phase) -> Amount:
        """Seconds that a layer waits for a dimension in a phase."""
        sent = self.by[dimension]
        seconds = sent.in_line_s.get(phase, 0.0)
        if dimension.divides is Divides.EXPERTS:
            return (1 - self._job.execution.hidden_exchanges) * seconds
        if dimension.divides is not Divides.TENSORS:
            return seconds
        exposed, jitter_s = 1 - self._job.execution.hidden_collectives, self._job.efficiency.jitter_s
        return exposed * seconds + sent.num_calls.get(phase, 0) * jitter_s * (self.strategy.degree(dimension) - 1) ** 2


def _sent_by(dimension: Dimension, layer: LayerProfile, strategy: Strategy, config: JobConfig) -> _SentByDimension:
    job = config.job
    waits_for_last = dimension.states is States.SHARDED and job.execution.keeps_whole_gradients(strategy)
    found = _SentByDimension(waits=bool(dimension.shape(strategy)))
    for each in dimension.traffic(layer_load(layer, strategy, config)):
        if each.phase == "backward" and not layer.has_backward:
            continue
        found.waits = found.waits or not each.beside_compute
        group = traffic_group(each.over, dimension, strategy, config.devices_per_stage)
        if each.phase == "step":
            found.once_s.append(_step_s(each, group, job))
            continue
        seconds = _calls_s(each, group, job) + each.num_waits * wait_s(job)
        if waits_for_last and each.collective == "reduce_scatter":
            found.last_s = found.last_s + seconds
            continue
        into = found.beside_s if each.beside_compute else found.in_line_s
        into[each.phase] = into.get(each.phase, 0.0) + seconds
        if not each.beside_compute:
            found.num_calls[each.phase] = found.num_calls.get(each.phase, 0) + each.num_calls
    return found


def _calls_s(traffic: Traffic, group: Group, job: Job) -> Amount:
    """Seconds of all calls of a collective."""
    return traffic.num_calls * job.collective_s(traffic.collective, traffic.tensor_bytes / traffic.num_calls, group)


def _step_s(traffic: Traffic, group: Group, job: Job) -> tuple[Amount, Amount]:
    """Seconds of a collective once per step: to reduce gradients, and to gather parameters.

    If a framework shards the optimizer (ZeRO-1), gradients are scattered and new parameters gathered.
    """
    execution = job.execution
    is_whole = traffic.collective == "all_reduce" and group.size > 1
    shards = execution.optimizer_shards(group.size) if is_whole else 1
    if shards == 1:
        seconds = _calls_s(traffic, group, job)
        return (0.0, seconds) if traffic.collective == "all_gather" else (seconds, 0.0)
    owners = group._replace(size=min(shards, group.size))
    reduction: Collective = "reduce_scatter" if owners.size == group.size else "all_reduce"
    pieces = execution.shard_pieces
    new_bytes = traffic.tensor_bytes * job.compute_bytes / job.reduce_bytes
    gather_s = pieces * job.collective_s("all_gather", new_bytes / pieces, owners)
    return pieces * job.collective_s(reduction, traffic.tensor_bytes / pieces, group), gather_s


def _saved_bytes(layer: LayerProfile, strategy: Strategy, config: JobConfig, samples: Amount) -> Amount:
    """Bytes that a layer saves per microbatch for its backward pass."""
    held = layer if strategy.remat is Remat.NONE else layer.recomputation(strategy.remat)
    return held.saved_bytes.at(samples) + working_bytes(layer, strategy, config).saved


def _recomputation_s(
    layer: LayerProfile, busiest: LayerProfile, sent: _Sent, config: JobConfig, samples: Amount
) -> Amount:
    """Seconds that remat adds to a microbatch: measured, or of the repeated work and collectives.

    On the busiest rank, as in `_imbalance_s`.
    """
    job, strategy = config.job, sent.strategy
    again = busiest.recomputation(strategy.remat)
    measured = at_each(samples, partial(layer.recomputation_s, strategy.remat)) if layer.times else None
    if measured is not None and strategy.expert_degree > 1:
        more = at_each(samples, partial(_more_flop, again.work, layer.recomputation(strategy.remat).work))
        measured = (1 + more) * measured
    if measured is None:
        key = "again", busiest, strategy.remat, hashable(samples)
        terms: Terms = {"compute": job.once(key, lambda: work_s(again.work, samples, job))}
    else:
        terms = {"compute": measured}
    for dimension in strategy.dimensions:
        if sent.by[dimension].waits and not (measured is not None and dimension.shape(strategy)):
            terms[dimension.name] = sent.in_line_s(dimension, "recomputation")
    if measured is None:
        _add_host(terms, launch_s(again.work, again.collectives, job))
    return sum(terms.values())


def _add_host(terms: Terms, launch_s: float) -> None:
    """Add the seconds that the device waits for the host if launching takes longer than the launched work."""
    waits_s = launch_s - sum(terms.values())
    if is_positive(waits_s):
        terms["host"] = np.maximum(waits_s, 0.0)


def _once_time(
    layer_type: LayerType,
    layer: LayerProfile,
    sent: _Sent,
    config: JobConfig,
    forward: Terms,
    backward: Terms,
) -> Terms:
    """Seconds per step of the optimizer, and of reducing gradients over ranks."""
    job, strategy = config.job, sent.strategy
    stepped = _stepped(layer.trained, strategy, job.execution)
    terms: Terms = {"optimizer": _update_s(layer_type, layer, stepped, strategy, config)}
    if job.effects.moved_bytes:
        terms["offload"] = host_copies_s(stepped * job.effects.moved_bytes, job)
    forward_s, backward_s = sum(forward.values()), sum(backward.values())
    if job.effects.steps_on_host and not job.effects.parameters_on_host:
        gradients_s = strategy.keeps_whole * host_copies_s(stepped * job.effects.weight_bytes, job)
        updated_s = host_copies_s(stepped * job.compute_bytes, job)
        terms["offload"] = _beside(backward_s, gradients_s, config) + updated_s
    for dimension in strategy.dimensions:
        own = sent.by[dimension]
        if own.once_s:
            reduce_s, gather_s = (sum(each, start=0.0) for each in zip(*own.once_s, strict=True))
            terms[dimension.name] = _beside(backward_s, reduce_s, config)
            if is_positive(gather_s):
                is_hidden = not job.execution.keeps_parameters
                terms[dimension.name] += _beside(forward_s, gather_s, config) if is_hidden else gather_s
        if own.last_s:
            gather_s, others_s = own.beside_s.get("backward", 0.0), backward_s - backward.get(dimension.name, 0.0)
            hidden_s = _beside(others_s, gather_s, config)
            terms[dimension.name] = _beside(others_s, gather_s + own.last_s, config) - hidden_s
    return terms


def _update_s(
    layer_type: LayerType, layer: LayerProfile, stepped: float, strategy: Strategy, config: JobConfig
) -> float:
    """Seconds to update ``stepped`` parameters of a layer, with its hidden matrices updated as a lever defines.

    Ranks that shard or replicate a matrix update it on one of them, which sends it to the others; shards are gathered
    first.
    """
    job, update = config.job, config.job.effects.matrices
    if update is None:
        return optimizer_s(stepped, job)
    in_matrices = matrix_params(layer_type, layer)
    shards = shard_levels(strategy.levels)
    group = levels_group(strategy, shards or replica_levels(strategy.levels), config.devices_per_stage)
    of_rank = in_matrices / degree_of(shards)
    seconds = optimizer_s(stepped - of_rank, job) + optimizer_s(of_rank, job, update.update_bytes)
    for m, n, count in hidden_matrices(layer_type, layer):
        made_s = products_s(update.flop_of(m, n), update.product_bytes_of(m, n), layer, job)
        gathered_s = job.collective_s("all_gather", update.gathered_bytes * m * n, group)
        seconds += count * (made_s / group.size + (2 if shards else 1) * gathered_s)
    return seconds


def _stepped(layer: LayerProfile, strategy: Strategy, execution: Execution) -> float:
    """Number of parameters that the optimizer of a rank updates."""
    if strategy.expert_degree == 1:
        return mean_shard_params(layer, strategy) / execution.optimizer_shards(strategy.replicas)
    experts = layer.expert_params / (strategy.expert_degree * strategy.expert_state_shards)
    dense = mean_shard_params(layer, strategy) - experts
    replicas, of_experts = strategy.replicas, strategy.expert_replicas
    return dense / execution.optimizer_shards(replicas) + experts / execution.optimizer_shards(of_experts)


def tied_s(layer_type: LayerType, strategy: Strategy, config: JobConfig, *, alike: bool = False) -> float:
    """Seconds per step to gather the gradient of a tied matrix and exchange it between two stages, in slices.

    ``alike``: all copies are sharded identically. Then, and in frameworks with their own buffers, each rank exchanges
    its part without a gather.
    """
    job = config.job
    if not job.chain.sums_tied or layer_type.role is LayerRole.BLOCK:
        return 0.0
    matrix_bytes = job.effects.weight_bytes * job.chain.vocab_size * job.chain.hidden_size
    apart = config.pipeline.stages_apart(0, config.pipeline.num_parts - 1)
    pair = Group(size=2, stride=apart * config.devices_per_stage, span=job.cluster.num_devices)
    if alike or job.execution.keeps_own_buffers:
        shards = strategy.tensor_degree * (1 if job.execution.keeps_own_buffers else strategy.state_shards)
        return job.collective_s("all_reduce", matrix_bytes / shards, pair) if apart else 0.0
    dividing = tuple(level for level in strategy.levels if level.dimension.divides is Divides.TENSORS)
    taking = dividing, shard_levels(strategy.levels)
    tensor, data = (levels_group(strategy, each, config.devices_per_stage) for each in taking)
    count = SLICES_PER_RANK * strategy.tensor_degree
    seconds = job.collective_s("all_gather", matrix_bytes / tensor.size / count, data)
    seconds += job.collective_s("all_gather", matrix_bytes / count, tensor)
    if apart:
        seconds += job.collective_s("all_reduce", matrix_bytes / count, pair)
    return count * seconds


def _beside(compute_s: Amount, communication_s: Amount, config: JobConfig) -> Amount:
    if not config.job.overlaps:
        return communication_s
    return exposed_s(compute_s, communication_s, config.job.profile.overlap_slowdown)
