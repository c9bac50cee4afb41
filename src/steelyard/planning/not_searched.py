"""What the search never looked at, and why: pipeline configurations and strategies that were not built into tables."""

from steelyard.cost.job import Job
from steelyard.cost.layer_load import rank_samples, unmeasured_reason
from steelyard.plan.choices import NotSearched, StrategyVerdict
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import DIMENSIONS, level_dimensions
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import Strategy
from steelyard.planning.problem import pipeline_configs, space_options, stage_strategies
from steelyard.schedules import SCHEDULES, Schedule
from steelyard.search import SpaceOptions, enumerate_levels, enumerate_strategies, mixing, refusal
from steelyard.units import format_plural, format_ranges


def configs_not_searched(job: Job, decisions: Decisions) -> tuple[NotSearched, ...]:
    """Numbers of stages and microbatches, and schedules, that were not searched, each with its reason."""
    configs = pipeline_configs(job, decisions)
    devices, layers, batch = job.cluster.num_devices, job.chain.num_layers, job.global_batch
    searched = {config.pipeline.num_stages for config in configs}
    why_not_stages = {
        count: f"fixed at {decisions.num_stages}"
        if decisions.num_stages is not None
        else f"does not divide the {devices} devices"
        if devices % count
        else f"more stages than the {layers} layers"
        for count in range(1, devices + 1)
        if count not in searched
    }
    searched = {config.pipeline.num_microbatches for config in configs}
    why_not_counts = {
        count: f"fixed at {decisions.num_microbatches}"
        if decisions.num_microbatches is not None
        else f"does not divide the global batch of {batch}"
        for count in range(1, batch + 1)
        if count not in searched
    }
    used = {config.pipeline.schedule for config in configs}
    unmeasured = samples_not_measured(job, decisions)
    return (
        *(() if unmeasured is None else (unmeasured,)),
        *_by_reason("stages", why_not_stages),
        NotSearched(what="stages", values=f"above {devices}", reason="a stage needs a device of its own"),
        *_by_reason("microbatches", why_not_counts),
        NotSearched(what="microbatches", values=f"above {batch}", reason="a microbatch needs a sample"),
        *(
            NotSearched(what="schedule", values=each.name, reason=_why_no_schedule(each, decisions))
            for each in SCHEDULES.values()
            if each not in used or each.why_not_everywhere
        ),
    )


def samples_not_measured(job: Job, decisions: Decisions) -> NotSearched | None:
    """The samples on a rank of strategies that were left out since the profile's times do not reach them, if any."""
    beyond: dict[float, str] = {}
    configs = {(each.devices_per_stage, each.microbatch_samples): each for each in pipeline_configs(job, decisions)}
    for config in configs.values() if job.profile.identity.is_measured else ():
        for strategy in stage_strategies(job, config.devices_per_stage, decisions):
            for layer_type in job.chain.layer_types:
                reason = unmeasured_reason(layer_type, strategy, config)
                if reason is not None and illegal_reason(layer_type, strategy, config.batch) is None:
                    beyond[rank_samples(strategy, config.microbatch_samples)] = reason.partition(": ")[2]
    if not beyond:
        return None
    return NotSearched(
        what="samples on a rank",
        values=", ".join(f"{count:g}" for count in sorted(beyond)),
        reason=f"{beyond[max(beyond)]}; steelyard profile --global-batch {job.global_batch} measures all",
    )


def _why_no_schedule(schedule: Schedule, decisions: Decisions) -> str:
    if schedule.name not in decisions.allowed_schedules:
        return "left out by --schedule"
    return schedule.why_not_everywhere or schedule.why_nowhere


def strategies_not_searched(job: Job, devices_per_stage: int, decisions: Decisions) -> tuple[StrategyVerdict, ...]:
    """Every leaf of the whole tree for a stage that was not offered to the search, and why."""
    limits = space_options(job, decisions)
    whole = SpaceOptions(dimensions=level_dimensions(), devices_per_node=job.cluster.devices_per_node)
    never = (
        ("-".join(str(level) for level in levels), mixing(levels, limits))
        for levels in enumerate_levels(devices_per_stage, whole.dimensions)
    )
    return (
        *(_verdict(str(strategy), reason) for strategy, reason in not_offered(job, devices_per_stage, decisions)),
        *(_verdict(text, reason) for text, reason in never if reason is not None),
    )


def not_offered(job: Job, devices_per_stage: int, decisions: Decisions) -> list[tuple[Strategy, str]]:
    """The strategies that the rules of the tree allow and that were not offered, each with its reason."""
    offered = set(stage_strategies(job, devices_per_stage, decisions))
    limits = space_options(job, decisions)
    whole = SpaceOptions(
        dimensions=tuple(DIMENSIONS.values()),
        variants={},
        mixes_samples=True,
        aligned_only=False,
        insists=lambda _strategy: True,
    )
    return [
        (strategy, _serves(strategy, job) or refusal(strategy, limits) or _no_shape(strategy))
        for strategy in enumerate_strategies(devices_per_stage, whole)
        if strategy not in offered
    ]


def widened(job: Job, free: Decisions, decisions: Decisions) -> dict[Strategy, str]:
    """Return the strategies that decisions offer and ``free`` ones leave out, with the reason why these do."""
    limits = space_options(job, free)
    sizes = sorted({config.devices_per_stage for config in pipeline_configs(job, decisions)})
    offered = dict.fromkeys(each for size in sizes for each in stage_strategies(job, size, decisions))
    return {each: reason for each in offered if (reason := refusal(each, limits))}


def widened_text(found: dict[Strategy, str]) -> str:
    """Return in words that a search went beyond the free one; empty where it did not."""
    if not found:
        return ""
    examples = {reason: str(strategy) for strategy, reason in reversed(found.items())}
    said = "; ".join(f"{strategy}: {reason}" for reason, strategy in reversed(examples.items()))
    return f"also searched {format_plural(len(found), 'strategy', 'strategies')} that are left out otherwise ({said})"


def _serves(strategy: Strategy, job: Job) -> str:
    return next((reason for dimension in strategy.dimensions if (reason := dimension.serves(job.chain))), "")


def _no_shape(strategy: Strategy) -> str:
    return f"the profile has no {' '.join(f'{name} {degree}' for name, degree in strategy.shape.items())}"


def _verdict(strategy: str, reason: str) -> StrategyVerdict:
    return StrategyVerdict(kind="", strategy=strategy, verdict="not offered", reason=reason)


def _by_reason(what: str, reasons: dict[int, str]) -> list[NotSearched]:
    return [
        NotSearched(
            what=what, values=format_ranges(value for value, why in reasons.items() if why == reason), reason=reason
        )
        for reason in dict.fromkeys(reasons.values())
    ]
