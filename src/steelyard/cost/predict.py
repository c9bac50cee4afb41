"""Prediction of a plan: step time by simulation, memory as an upper bound, both by term.

Time terms (`steelyard.cost.layer`) and memory terms (`steelyard.cost.memory`) are those that the search adds up, so
search and prediction agree.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from steelyard.cost.build import border_s, transfer_s
from steelyard.cost.compute import step_overhead_s
from steelyard.cost.context import slack_fraction
from steelyard.cost.job import Job, JobConfig, stage_configs
from steelyard.cost.layer import LayerCost, layer_cost, weight_pass_s
from steelyard.cost.memory import host_bytes, plan_memory
from steelyard.cost.pass_order import order_bound_s
from steelyard.cost.simulator import StageTimes, Timeline, simulate
from steelyard.cost.switching import border_table, switch_table
from steelyard.errors import InvalidPlanError
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import OWN_TERMS, StagePrediction
from steelyard.plan.stages import num_slices
from steelyard.plan.strategy import Strategy
from steelyard.schedules import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Cost of a plan: the timeline of a step, and time and memory terms per stage."""

    timeline: Timeline
    step_time_s: float
    """Seconds of the timeline plus the per-step overhead."""
    stages: tuple[StagePrediction, ...]
    fits: bool
    tokens_per_s_per_device: float
    model_flop_per_s: float | None
    """Model FLOP/s per device, averaged over the stages."""
    mfu: float | None
    mfu_attention: str
    """Description of how ``model_flop_per_s`` and ``mfu`` count attention."""
    order_bound_s: float | None = None
    """Lower bound of the step time in seconds over all orders of passes of the same plan, whatever their memory; None
    if its schedule does not take its order from times, or processes share cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Times of the passes of a plan, as the simulator takes them."""

    parts: tuple[StageTimes, ...]
    options: Mapping[str, Any]
    """Keyword arguments of `simulate`."""

    def timeline(self, pipeline: PipelineConfig) -> Timeline:
        """Return the simulated step."""
        return simulate(self.parts, pipeline, **self.options)


def pass_times(plan: Plan, job: Job) -> PassTimes:
    """Return the times of a plan's passes, as in `predict`."""
    configs = _configs(plan, job)
    return _pass_times(plan, job, _part_costs(plan, configs, {}), configs)


def predict(plan: Plan, job: Job, *, slowed: Mapping[int, float] | None = None) -> PlanCost:
    """Predict the cost of a plan for a job of the same model and batch. Raises `InvalidPlanError` if they differ.

    The compute time of stages in ``slowed`` is multiplied by these factors.
    """
    configs = _configs(plan, job)
    parts = _part_costs(plan, configs, slowed or {})
    times = _pass_times(plan, job, parts, configs)
    timeline = times.timeline(configs[0].pipeline)
    memories = memory_terms([part.layers for part in plan.parts], plan.strategies, configs)
    on_host = predict_host(plan, job)
    stages = [
        StagePrediction(
            time_s=_time_terms([parts[part] for part in config.pipeline.parts_of(stage)], config, timeline, stage),
            memory_bytes=memories[stage],
            host_bytes=on_host[stage],
        )
        for stage, config in enumerate(configs)
    ]
    overhead_s = max(step_overhead_s(each.job) for each in configs)
    step_s = timeline.step_time_s + overhead_s
    tokens_per_s = plan.global_batch * plan.seq_len / step_s / plan.num_devices
    flop_per_s = model_flop_per_s(configs[0].job, tokens_per_s)
    return PlanCost(
        timeline=timeline,
        step_time_s=step_s,
        stages=tuple(stages),
        fits=all(stage.total_bytes <= config.job.budget_bytes for stage, config in zip(stages, configs, strict=True)),
        tokens_per_s_per_device=tokens_per_s,
        model_flop_per_s=flop_per_s,
        mfu=_utilisation(configs, flop_per_s),
        mfu_attention=job.chain.attention_words(job.seq_len),
        order_bound_s=order_bound_s(times.parts, configs[0].pipeline) + overhead_s
        if plan.pipeline.schedule.orders_by_time and not times.options["speeds"]
        else None,
    )


def _pass_times(plan: Plan, job: Job, parts: Sequence["_PartCost"], configs: Sequence[JobConfig]) -> PassTimes:
    times = [
        StageTimes(
            forward_s=sum(sum(cost.forward_s.values()) for cost in part.layers) + part.switch_s / 2,
            backward_s=sum(sum(cost.backward_s.values()) for cost in part.layers) + part.switch_s / 2,
            weight_s=sum(part.weights_s),
            once_s=sum(sum(cost.once_s.values()) for cost in part.layers),
            transfer_s=part.received_s / (2 if part.gives_back else 1),
            gives_back=part.gives_back,
        )
        for part in parts
    ]
    jobs = [each.job for each in configs]
    speeds = [each.profile.stage_speeds(jobs.count(each)) for each in jobs]
    overlaps = job.execution.overlaps_transfers
    return PassTimes(
        parts=tuple(times),
        options={
            "overlap_sends": overlaps == "always" or (overlaps == "with chunks" and plan.num_chunks > 1),
            "speeds": list(zip(map(jobs.index, jobs), speeds, strict=True)) if any(speeds) else [],
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Name of a layer of a plan, and seconds of its passes by term: computation and collectives."""

    name: str
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]


def layer_times(plan: Plan, job: Job) -> tuple[LayerTimes, ...]:
    """Return the times of one microbatch in each layer, including resharding from the layer before, as in `predict`."""
    configs = _layer_configs(plan, _configs(plan, job))
    switches_s, found = _switches_s(plan.strategies, configs), []
    for layer, cost in enumerate(_layer_costs(plan, configs)):
        switch = {"switch": switches_s[layer] / 2} if switches_s[layer] else {}
        found.append(
            LayerTimes(
                name=job.chain.layer_name(layer),
                forward_s=switch | cost.forward_s,
                backward_s=cost.backward_s | switch,
            )
        )
    return tuple(found)


def predict_memory(plan: Plan, job: Job) -> tuple[dict[str, int], ...]:
    """Bytes on a rank of each stage by term, as in `predict`; the profile needs no times.

    Raises `InvalidPlanError` if plan and job differ.
    """
    return memory_terms([part.layers for part in plan.parts], plan.strategies, _configs(plan, job))


def predict_host(plan: Plan, job: Job) -> list[int]:
    """Bytes in host memory for a rank of each stage, which no memory term counts."""
    return host_bytes([part.layers for part in plan.parts], plan.strategies, _configs(plan, job))


def memory_terms(
    parts: Sequence[range], strategies: Sequence[Strategy], configs: Sequence[JobConfig]
) -> tuple[dict[str, int], ...]:
    """Bytes on a rank of each stage by term, with allocator slack; arguments as of `plan_memory`."""
    found = []
    for tensors, config in zip(plan_memory(parts, strategies, configs), configs, strict=True):
        terms = dict(tensors)
        kept_apart = config.job.execution.kept_apart  # in separate buffers, without slack
        in_allocator = sum(num_bytes for name, num_bytes in terms.items() if name not in kept_apart)
        terms["allocator slack"] = int(slack_fraction(config.job) * in_allocator)
        found.append({name: num_bytes for name, num_bytes in terms.items() if num_bytes})
    return tuple(found)


def _configs(plan: Plan, job: Job) -> tuple[JobConfig, ...]:
    _check_same_job(plan, job)
    return stage_configs(plan, job)


def _layer_configs(plan: Plan, configs: Sequence[JobConfig]) -> list[JobConfig]:
    """Return the configuration of each layer, which is that of its stage."""
    pipeline = plan.pipeline
    return [configs[pipeline.stage_of(index)] for index, part in enumerate(plan.parts) for _ in part.layers]


def _utilisation(configs: Sequence[JobConfig], flop_per_s: float | None) -> float | None:
    """MFU: model FLOP over the mean peak FLOP of the devices of all stages; None if a device's peak is unknown."""
    if flop_per_s is None or any(config.job.cluster.device.needs_profile for config in configs):
        return None
    peaks = sum(config.devices_per_stage * config.job.peak_flop_per_s for config in configs)
    return flop_per_s * sum(config.devices_per_stage for config in configs) / peaks


def model_flop_per_s(job: Job, tokens_per_s_per_device: float) -> float | None:
    """Model FLOP/s per device, without recomputation; None if the profile lacks a layer.

    Model FLOP of a token are three forward passes, or fewer if parts are frozen. Attention counts the token pairs that
    the model attends to, not those that its kernels compute: half of the square if causal, a band for a sliding window
    (`ModelChain.attended_share`). Figures that follow Chowdhery et al. 2022 (PaLM), appendix B, count the whole square
    and are higher. With older profiles, which lack the square, attention counts what its kernels compute.
    """
    chain, found = job.chain, []
    for number, layer_type in enumerate(chain.layer_types):
        layer = job.profile.layer(layer_type.name, {})
        if layer is None:
            return None
        forward, backward = (
            work.matmul_flop.per_sample + work.attention_flop.per_sample for work in (layer.forward, layer.backward)
        )
        passes = 1 + backward / forward if layer_type.likeness and forward else 3
        if layer.square_flop is not None:
            square = layer.square_flop.per_sample
            in_attention = layer.forward.attention_flop.per_sample or square
            forward = forward - in_attention + chain.attended_share(layer_type, job.seq_len) * square
        found.append(chain.layers.count(number) * (passes * forward))
    return sum(found) / job.seq_len * tokens_per_s_per_device


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartCost:
    """Cost of one part of the pipeline: a stage, or one of its chunks."""

    layers: list[LayerCost[float]]
    weights_s: list[float]
    """Seconds of each layer's weight pass, included in its backward pass; empty if the schedule has none."""
    switch_s: float
    received_s: float
    """Seconds to receive an activation from the part before and, if needed there, to send its gradient back."""
    gives_back: bool


def _part_costs(plan: Plan, stage_configs: Sequence[JobConfig], slowed: Mapping[int, float]) -> list[_PartCost]:
    """Return the cost of every part of the pipeline; the compute of stages in ``slowed`` is multiplied by a factor."""
    strategies, configs = plan.strategies, _layer_configs(plan, stage_configs)
    switches = _switches_s(strategies, configs)
    costs = _layer_costs(plan, configs)
    parts = []
    for index, part in enumerate(plan.parts):
        layers, factor = part.layers, slowed.get(plan.pipeline.stage_of(index), 1.0)
        entering = configs[0].job.chain.flow(part.first_layer - 1) if index else ()
        gives_back = any(each.needs_gradient for each in entering)
        received_s = _received_s(plan, index, layers[0], configs) / (1 if gives_back else 2) if index else 0.0
        parts.append(
            _PartCost(
                layers=[_slowed(costs[layer], factor) for layer in layers],
                weights_s=[
                    factor * weight_pass_s(configs[0].job.chain.type_of(layer), strategies[layer], configs[layer])
                    for layer in (layers if plan.pipeline.schedule.splits_backward else ())
                ],
                switch_s=sum(switches[layer] for layer in layers),
                received_s=received_s,
                gives_back=gives_back,
            )
        )
    return parts


def _slowed(cost: LayerCost[float], factor: float) -> LayerCost[float]:
    if factor == 1.0:
        return cost
    forward, backward, once = (
        {name: seconds * (factor if name in OWN_TERMS else 1.0) for name, seconds in terms.items()}
        for terms in (cost.forward_s, cost.backward_s, cost.once_s)
    )
    return LayerCost(forward_s=forward, backward_s=backward, once_s=once)


def _received_s(plan: Plan, index: int, first: int, configs: Sequence[JobConfig]) -> float:
    before, config = configs[first - 1], configs[first]
    if before is not config:
        return border_s(before, config)
    if not (stages_apart := plan.pipeline.stages_apart(index - 1, index)):
        return 0.0
    copies = plan.strategies[first].hidden.copies if config.job.execution.transfer == "whole" else 1
    return copies * transfer_s(config, stages_apart)


def _switches_s(strategies: Sequence[Strategy], configs: Sequence[JobConfig]) -> list[float]:
    """Seconds of resharding from the previous layer for each layer, forward and backward."""
    known: dict[tuple[JobConfig, int, Strategy, Strategy], float] = {}
    found = [0.0]
    layer_types = configs[0].job.chain.layers[1:]
    for layer_type, (before, after), (sending, receiving) in zip(
        layer_types, pairwise(strategies), pairwise(configs), strict=True
    ):
        key = receiving, layer_type, before, after
        if sending is not receiving:
            found.append(float(border_table((before,), (after,), sending, receiving)[layer_type, 0, 0]))
        else:
            if key not in known:
                known[key] = float(switch_table((before, after), receiving)[layer_type, 0, 1])
            found.append(known[key])
    return found


def _layer_costs(plan: Plan, configs: Sequence[JobConfig]) -> list[LayerCost[float]]:
    """Return the cost of each layer; copies of a tied matrix that are all sharded identically are not gathered."""
    known: dict[tuple[int, Strategy, JobConfig], LayerCost[float]] = {}
    chain = configs[0].job.chain
    alike = bool(chain.sums_tied) and num_slices(chain.shared[0], plan.strategies, chain) is None
    costs = []
    for layer_type, strategy, config in zip(chain.layers, plan.strategies, configs, strict=True):
        key = layer_type, strategy, config
        if key not in known:
            known[key] = layer_cost(chain.layer_types[layer_type], strategy, config, alike=alike)
        costs.append(known[key])
    return costs


def _time_terms(chunks: list[_PartCost], config: JobConfig, timeline: Timeline, stage: int) -> dict[str, float]:
    """Seconds of one microbatch on a stage by term; once-per-step terms are divided by the number of microbatches.

    The total over all microbatches is at most the step time: work has the duration in the timeline, which is shorter
    with shared cores because not all processes compute all the time, and only exposed transfers count.
    """
    added: Counter[str] = Counter()
    count = config.pipeline.num_microbatches
    for chunk in chunks:
        for cost in chunk.layers:
            for part in (cost.forward_s, cost.backward_s):
                added.update(part)
            added.update({name: seconds / count for name, seconds in cost.once_s.items()})
        added.update({"switch": chunk.switch_s})
    worked_s = timeline.worked_s(stage)
    scale = worked_s / (count * added.total()) if config.job.profile.busy_speeds else 1.0
    terms = {name: seconds * scale for name, seconds in added.items()}
    idle_s = max(0.0, timeline.step_time_s - worked_s)
    terms["pipeline"] = min(sum(chunk.received_s for chunk in chunks), idle_s / count)
    return {name: seconds for name, seconds in terms.items() if seconds}


def _check_same_job(plan: Plan, job: Job) -> None:
    chain = plan.chain()
    for field, found, expected in (
        ("model", chain.config_hash, job.chain.config_hash),
        ("seq_len", plan.seq_len, job.seq_len),
        ("global_batch", plan.global_batch, job.global_batch),
        ("precision", plan.precision, job.precision),
        ("number of devices", plan.num_devices, job.used_by(plan).hardware.num_devices),
    ):
        if found != expected:
            raise InvalidPlanError(
                field=field,
                found=f"{found} in the plan",
                expected=f"{expected}, for which it is priced",
                hint="plan again with the other value",
            )
