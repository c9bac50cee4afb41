"""The cost tables of a job: every pipeline setting with every strategy that the options offer."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from steelyard.cost.build import KnownCosts, build_tables, least_times_s, usable_bytes
from steelyard.cost.fold import why_not_folded
from steelyard.cost.setting import Job, Setting
from steelyard.cost.tables import CostTables
from steelyard.errors import UserError
from steelyard.limits import MOST_MICROBATCHES
from steelyard.plan.decisions import Decisions
from steelyard.plan.kinds import KINDS
from steelyard.plan.strategy import Strategy, divisors
from steelyard.planning.pins import Pin, pinned, pins_of
from steelyard.schedules import SCHEDULES, PipelineConfig, Schedule
from steelyard.search import OnDemand, SpaceOptions, enumerate_strategies, paper_kinds
from steelyard.search.layers import ROUNDING
from steelyard.search.partition import quick_bound_s

if TYPE_CHECKING:
    from steelyard.search.problem import Problem


def make_tables(job: Job, decisions: Decisions) -> tuple[OnDemand, ...]:
    """The cost tables of every pipeline setting of a job, in the order of `pipeline_settings`, as `search` takes them.

    Each is made when it is first asked for; what is known before is what computing takes alone.
    """
    offered: dict[int, tuple[Strategy, ...]] = {}
    computed_s: dict[tuple[int, int], float] = {}
    settings, found = pipeline_settings(job, decisions), []
    pins = pins_of(decisions, job.chain)
    known = KnownCosts([setting.pipeline.num_microbatches for setting in settings])
    for setting in settings:
        size, pipeline = setting.devices_per_stage, setting.pipeline
        if size not in offered:
            offered[size] = stage_strategies(job, size, decisions)
        place = size, pipeline.num_microbatches
        if place not in computed_s:
            of_kinds = least_times_s(_ways(offered[size]), setting)
            computed_s[place] = sum(of_kinds[kind] for kind in job.chain.layers)
        bubble = (1 - 1 / pipeline.num_stages) / pipeline.num_chunks
        least_s = computed_s[place] * (pipeline.num_microbatches / pipeline.num_stages + bubble) * (1 - ROUNDING)
        make = partial(_made, setting, offered[size], known, pins)
        found.append(OnDemand(pipeline, least_s, make))
    return tuple(found)


@lru_cache(maxsize=64)
def _ways(strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Of these strategies one for each way to compute."""
    ways = {(str(each.shape), each.sample_degree, each.token_degree, each.expert_degree): each for each in strategies}
    return tuple(ways.values())


def _made(setting: Setting, offered: tuple[Strategy, ...], known: KnownCosts, pins: Sequence[Pin]) -> CostTables:
    return pinned(build_tables(setting, offered, known), pins)


def problem_of(job: Job, tables: Sequence[OnDemand]) -> "Problem":
    """The cost tables of all these settings of a job as a problem file holds them: memory as plain sums, from above."""
    from steelyard.search.problem import Problem

    return Problem(
        name=f"{job.chain.name} on {job.cluster.name}",
        budget_bytes=usable_bytes(job),
        settings=tuple(each.tables.as_plain() for each in tables),
        samples=(job.global_batch,) * len(tables),
    )


def is_beaten(job: Job, tables: Sequence[OnDemand], step_s: float) -> bool:
    """Whether every plan of a job takes more than ``step_s``, whatever memory it has.

    By what computing alone takes, and the cost tables of the settings for which that is not enough. Never so where
    processes share cores (`Profile.busy_speeds`), for which the sums of the search are no bound.
    """
    if job.profile.busy_speeds:
        return False
    return all(each.least_s > step_s or quick_bound_s(each.tables) > step_s for each in tables)


def pipeline_settings(job: Job, decisions: Decisions) -> list[Setting]:
    """Every number of stages that divides the devices with every number of microbatches that divides the batch.

    Under every schedule that the options allow, wherever it is tried (`Schedule.is_tried`); in chunks where the blocks
    divide into them. A partition for comparison cuts no chunks.
    """
    devices, layers = job.cluster.num_devices, job.chain.num_layers
    stages = [p for p in divisors(devices) if p <= layers]
    counts = microbatch_counts(job.global_batch)
    if decisions.num_stages is not None:
        stages = _pinned("num_stages", decisions.num_stages, stages, f"a divisor of the {devices} devices")
    if decisions.num_microbatches is not None:
        of_batch = f"a divisor of the batch of {job.global_batch}"
        counts = _pinned("num_microbatches", decisions.num_microbatches, counts, of_batch)
    schedules = [each for each in SCHEDULES.values() if each.name in decisions.allowed_schedules]
    found = settings_under([each for each in schedules if not each.takes_chunks], job, stages, counts)
    if decisions.stage_partition == "exact":
        found += settings_under([each for each in schedules if each.takes_chunks], job, stages, counts)
    pins = pins_of(decisions, job.chain)
    return [
        each
        for each in found
        if _is_tried(each.pipeline, is_alone=len(schedules) == 1) and all(pin.takes(each.pipeline) for pin in pins)
    ]


def _is_tried(pipeline: PipelineConfig, *, is_alone: bool) -> bool:
    """Whether the search tries a pipeline; under a schedule that others beat, everywhere if it ``is_alone``."""
    schedule = pipeline.schedule
    if is_alone and schedule.why_not_everywhere and pipeline.num_stages > 1:
        return True
    return schedule.is_tried(pipeline)


def microbatch_counts(global_batch: int) -> list[int]:
    """Every number of microbatches that divides the batch."""
    return [m for m in divisors(global_batch) if m <= MOST_MICROBATCHES]


def settings_under(
    schedules: Sequence[Schedule], job: Job, stages: Sequence[int], counts: Sequence[int]
) -> list[Setting]:
    """The settings of these numbers of stages and microbatches in which one of these schedules can run."""
    pipelines = [
        PipelineConfig(num_stages=p, num_chunks=chunks, num_microbatches=m, schedule=schedule)
        for p in stages
        for m in counts
        for schedule in schedules
        for chunks in schedule.chunk_counts
    ]
    return [
        Setting(job=job, pipeline=each)
        for each in pipelines
        if each.schedule.refusal(each) is None and _comes_in_chunks(job, each)
    ]


def _comes_in_chunks(job: Job, pipeline: PipelineConfig) -> bool:
    """Whether the layers come in as many chunks that are cut alike."""
    stages, chunks = pipeline.num_stages, pipeline.num_chunks
    return chunks == 1 or why_not_folded(job.chain.layers, num_stages=stages, num_chunks=chunks) is None


def stage_strategies(job: Job, devices_per_stage: int, decisions: Decisions) -> tuple[Strategy, ...]:
    """The leaves of the decision tree for a stage, as far as the profile has their shapes."""
    shapes = job.profile.shapes
    offered = enumerate_strategies(devices_per_stage, space_options(job, decisions))
    return tuple(strategy for strategy in offered if frozenset(strategy.shape.items()) in shapes)


def space_options(job: Job, decisions: Decisions) -> SpaceOptions:
    """What the decision tree may use for this job: kinds that some layer of the model could be divided by.

    What a pin asks for is offered even where its kind finds it not worth a search.
    """
    pins = pins_of(decisions, job.chain)
    kinds = paper_kinds() if decisions.space == "paper" else tuple(KINDS.values())
    return SpaceOptions(
        kinds=tuple(kind for kind in kinds if not kind.serves(job.chain)),
        variants=decisions.variants or {},
        remats=decisions.allowed_remats,
        mixes_samples=decisions.space != "paper",
        max_degrees=decisions.max_degrees or {},
        devices_per_node=job.cluster.devices_per_node,
        layers=job.chain.kinds,
        insists=(lambda strategy: any(pin.demands(strategy) for pin in pins)) if pins else None,
    )


def _pinned(field: str, value: int, allowed: list[int], rule: str) -> list[int]:
    if value not in allowed:
        raise UserError(
            field=field,
            found=str(value),
            expected=f"{rule}: {', '.join(map(str, allowed))}",
            hint="leave it out to have it searched",
        )
    return [value]
