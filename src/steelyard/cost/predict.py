"""Predicts a plan: step time by the simulator, memory as an upper bound, each term by its name.

The terms are those that the search added up (`steelyard.cost.layer`), so what a plan reports is what was minimised.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from steelyard.cost.build import overhead_bytes, slack_fraction, transfer_s
from steelyard.cost.layer import LayerCost, layer_cost
from steelyard.cost.setting import Job, Setting
from steelyard.cost.simulator import StageTimes, Timeline, simulate
from steelyard.cost.switching import switch_table
from steelyard.errors import InvalidPlanError
from steelyard.plan.plan import Plan, StagePrediction
from steelyard.plan.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """What a plan costs: the timeline of a step, and per stage the terms of time and memory."""

    timeline: Timeline
    stages: tuple[StagePrediction, ...]
    fits: bool
    tokens_per_s_per_device: float
    mfu: float | None


def predict(plan: Plan, job: Job) -> PlanCost:
    """The cost of a plan for a job of the same model and batch; raises `InvalidPlanError` if they differ."""
    _check_same_job(plan, job)
    setting = Setting(
        job=job, num_stages=len(plan.stages), num_microbatches=plan.num_microbatches, schedule=plan.schedule
    )
    strategies = plan.strategies
    distinct = tuple(dict.fromkeys(strategies))
    switch = switch_table(distinct, setting)
    place = {strategy: index for index, strategy in enumerate(distinct)}
    switches = [0.0] + [float(switch[place[before], place[after]]) for before, after in pairwise(strategies)]
    costs = _layer_costs(plan, setting)
    stages, times = [], []
    for index, stage in enumerate(plan.stages):
        layers = range(stage.first_layer, stage.last_layer + 1)
        stage_costs = [costs[layer] for layer in layers]
        switch_s = sum(switches[layer] for layer in layers)
        received_s = transfer_s(setting) if index else 0.0
        stages.append(
            StagePrediction(
                time_s=_time_terms(stage_costs, switch_s, received_s, setting),
                memory_bytes=_memory_terms(stage_costs, index, setting),
            )
        )
        times.append(_stage_times(stage_costs, switch_s, received_s))
    timeline = simulate(times, plan.num_microbatches, plan.schedule)
    step_s = timeline.step_time_s + job.profile.step_overhead_s
    tokens_per_s = plan.global_batch * plan.seq_len / step_s / job.cluster.num_devices
    return PlanCost(
        timeline=timeline,
        stages=tuple(stages),
        fits=all(stage.total_bytes <= job.budget_bytes for stage in stages),
        tokens_per_s_per_device=tokens_per_s,
        mfu=model_flop_utilisation(job, tokens_per_s),
    )


def model_flop_utilisation(job: Job, tokens_per_s_per_device: float) -> float | None:
    """Model FLOP over peak FLOP, recomputation not counted; None where the device's peak is not known.

    Model FLOP of a token are three forward passes, attention counted in full although causal kernels skip half of it:
    the convention of Chowdhery et al. 2022 (PaLM), appendix B, that published MFU figures use.
    """
    if job.cluster.device.needs_profile:
        return None
    flop = 0.0
    for kind_index, kind in enumerate(job.chain.kinds):
        layer = job.profile.layer(kind.name, 1, False)
        if layer is None:
            return None
        forward = layer.forward
        per_sample = forward.matmul_flop.per_sample + 2 * forward.attention_flop.per_sample
        flop += 3 * per_sample * job.chain.layers.count(kind_index)
    return flop / job.seq_len * tokens_per_s_per_device / job.cluster.device.peak(job.precision)


def _layer_costs(plan: Plan, setting: Setting) -> list[LayerCost]:
    known: dict[tuple[int, Strategy], LayerCost] = {}
    chain = setting.job.chain
    costs = []
    for kind, strategy in zip(chain.layers, plan.strategies, strict=True):
        if (kind, strategy) not in known:
            known[kind, strategy] = layer_cost(chain.kinds[kind], strategy, setting)
        costs.append(known[kind, strategy])
    return costs


def _time_terms(costs: list[LayerCost], switch_s: float, received_s: float, setting: Setting) -> dict[str, float]:
    """Seconds of one microbatch by term, once-a-step terms spread over the microbatches."""
    terms: Counter[str] = Counter()
    for cost in costs:
        for part in (cost.forward_s, cost.backward_s):
            terms.update(part)
        terms.update({name: seconds / setting.num_microbatches for name, seconds in cost.once_s.items()})
    terms.update({"switch": switch_s, "pipeline": received_s})
    return {name: seconds for name, seconds in terms.items() if seconds}


def _memory_terms(costs: list[LayerCost], stage: int, setting: Setting) -> dict[str, int]:
    """Bytes on one rank by term; they add up to the upper bound that is held against the budget."""
    in_flight = setting.num_microbatches
    if setting.schedule == "1f1b":
        in_flight = min(in_flight, setting.num_stages - stage)
    terms: Counter[str] = Counter()
    for cost in costs:
        terms.update(cost.static_bytes)
        terms["activations"] += in_flight * cost.activation_bytes
    terms["working set"] = max(cost.transient_bytes for cost in costs)
    terms["context and buffers"] = overhead_bytes(setting)
    terms["allocator slack"] = int(slack_fraction(setting.job) * terms.total())
    return {name: num_bytes for name, num_bytes in terms.items() if num_bytes}


def _stage_times(costs: list[LayerCost], switch_s: float, received_s: float) -> StageTimes:
    return StageTimes(
        forward_s=sum(sum(cost.forward_s.values()) for cost in costs) + switch_s / 2,
        backward_s=sum(sum(cost.backward_s.values()) for cost in costs) + switch_s / 2,
        once_s=sum(sum(cost.once_s.values()) for cost in costs),
        transfer_s=received_s / 2,
    )


def _check_same_job(plan: Plan, job: Job) -> None:
    chain = plan.chain()
    for field, found, expected in (
        ("model", chain.config_hash, job.chain.config_hash),
        ("seq_len", plan.seq_len, job.seq_len),
        ("global_batch", plan.global_batch, job.global_batch),
        ("precision", plan.precision, job.precision),
        ("stages.ranks", plan.num_devices, job.cluster.num_devices),
    ):
        if found != expected:
            raise InvalidPlanError(
                field=field, found=str(found), expected=f"{expected}, as in the job", hint="plan for this job"
            )
