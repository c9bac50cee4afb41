"""What it costs to insist on something that a plan does not do, or what forbids it."""

from collections import Counter
from dataclasses import replace

from steelyard.cost.setting import Job
from steelyard.plan.choices import WhyNot
from steelyard.plan.legality import illegal_reason
from steelyard.planning.choose import plan_job
from steelyard.planning.excluded import not_offered
from steelyard.planning.pins import Pin
from steelyard.planning.problem import PlanOptions, pipeline_settings, stage_strategies

SHOWN_REASONS = 3


def why_not(job: Job, options: PlanOptions, pin: Pin) -> WhyNot:
    """The best plan that does what is asked for, or by how much it misses, or what forbids it."""
    pinned = replace(options, pins=(*options.pins, pin))
    if not pipeline_settings(job, pinned):
        return WhyNot(asked=pin.text, reasons=(_no_setting(job, options),))
    result = plan_job(job, pinned)
    if result.plan is not None:
        return WhyNot(asked=pin.text, plan=result.plan)
    if result.miss is not None:
        return WhyNot(asked=pin.text, reasons=(f"does not fit: {result.miss_text}",))
    return WhyNot(asked=pin.text, reasons=_forbidding(job, options, pin))


def _no_setting(job: Job, options: PlanOptions) -> str:
    settings = pipeline_settings(job, options)
    stages = ", ".join(str(count) for count in sorted({setting.num_stages for setting in settings}))
    counts = ", ".join(str(count) for count in sorted({setting.num_microbatches for setting in settings}))
    return f"no such pipeline setting is searched: stages are {stages}, microbatches {counts}"


def _forbidding(job: Job, options: PlanOptions, pin: Pin) -> tuple[str, ...]:
    """The most frequent reasons why no strategy that has what is asked for may be used."""
    found: Counter[str] = Counter()
    settings = pipeline_settings(job, options)
    kinds = {job.chain.layers[layer] for layer in range(job.chain.num_layers) if pin.covers(layer)}
    for setting in settings:
        for strategy in stage_strategies(job, setting.devices_per_stage, options):
            for kind in kinds if pin.allows(strategy) else ():
                reason = illegal_reason(
                    job.chain.kinds[kind],
                    strategy,
                    microbatch_samples=setting.microbatch_samples,
                    seq_len=job.seq_len,
                )
                if reason is not None:
                    found[f"{strategy} for the {job.chain.kinds[kind].name} layers: {reason}"] += 1
    for size in sorted({setting.devices_per_stage for setting in settings}):
        for strategy, reason in not_offered(job, size, options):
            if pin.allows(strategy):
                found[f"{strategy}: {reason}"] += 1
    if not found:
        return (f"no strategy of the tree for {job.cluster.num_devices} devices or fewer has it",)
    return tuple(reason for reason, _ in found.most_common(SHOWN_REASONS))
