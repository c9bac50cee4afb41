"""The cost tables of a job: every pipeline setting with every strategy that the options offer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

from steelyard.cost.build import KnownCosts, build_tables, least_times_s, usable_bytes
from steelyard.cost.fold import why_not_folded
from steelyard.cost.setting import Job, Setting
from steelyard.cost.tables import CostTables
from steelyard.errors import UserError
from steelyard.limits import MOST_MICROBATCHES
from steelyard.plan.kinds import KINDS, Value
from steelyard.plan.strategy import Remat, Strategy, divisors
from steelyard.planning.pins import Pin, pinned
from steelyard.schedules import SCHEDULES, PipelineConfig, Schedule, find_schedule
from steelyard.search import TIME_LIMIT_S, OnDemand, Partition, SpaceOptions, enumerate_strategies, paper_kinds
from steelyard.search.layers import ROUNDING
from steelyard.search.partition import quick_bound_s

if TYPE_CHECKING:
    from steelyard.search.problem import Problem

Space = Literal["full", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the search may choose from; everything that is not set is searched."""

    max_degrees: Mapping[str, int] = field(default_factory=dict)
    """The largest degrees of kinds, by name."""
    num_stages: int | None = None
    num_microbatches: int | None = None
    remats: tuple[Remat, ...] = (Remat.NONE, Remat.SELECTIVE, Remat.FULL)
    variants: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """The values of variants of kinds that are searched; all of those that are not named."""
    space: Space = "full"
    """All kinds of parallelism, or those of the papers and never two that divide samples in one layer."""
    schedules: tuple[str, ...] = field(default_factory=lambda: tuple(SCHEDULES))
    """By name."""
    partition: Partition = "exact"
    time_limit_s: float | None = TIME_LIMIT_S
    """Of every search with the tables that it makes; None lets it take what it takes."""
    pins: tuple[Pin, ...] = ()

    def __post_init__(self) -> None:
        for name in self.schedules:
            find_schedule(name)


def make_tables(job: Job, options: PlanOptions) -> tuple[OnDemand, ...]:
    """The cost tables of every pipeline setting of a job, in the order of `pipeline_settings`, as `search` takes them.

    Each is made when it is first asked for; what is known before is what computing takes alone.
    """
    offered: dict[int, tuple[Strategy, ...]] = {}
    computed_s: dict[tuple[int, int], float] = {}
    settings, found = pipeline_settings(job, options), []
    known = KnownCosts([setting.pipeline.num_microbatches for setting in settings])
    for setting in settings:
        size, pipeline = setting.devices_per_stage, setting.pipeline
        if size not in offered:
            offered[size] = stage_strategies(job, size, options)
        place = size, pipeline.num_microbatches
        if place not in computed_s:
            of_kinds_s = least_times_s(_ways(offered[size]), setting)
            computed_s[place] = sum(of_kinds_s[kind] for kind in job.chain.layers)
        bubble = (1 - 1 / pipeline.num_stages) / pipeline.num_chunks
        least_s = computed_s[place] * (pipeline.num_microbatches / pipeline.num_stages + bubble) * (1 - ROUNDING)
        make = partial(_made, setting, offered[size], known, options.pins)
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
    """The cost tables of all these settings of a job as a problem file holds them."""
    from steelyard.search.problem import Problem

    return Problem(
        name=f"{job.chain.name} on {job.cluster.name}",
        budget_bytes=usable_bytes(job),
        settings=tuple(each.tables for each in tables),
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


def pipeline_settings(job: Job, options: PlanOptions) -> list[Setting]:
    """Every number of stages that divides the devices with every number of microbatches that divides the batch.

    Under every schedule that the options allow, wherever it is tried (`Schedule.is_tried`); in chunks where the blocks
    divide into them. A partition for comparison cuts no chunks.
    """
    devices, layers = job.cluster.num_devices, job.chain.num_layers
    stages = [p for p in divisors(devices) if p <= layers]
    counts = microbatch_counts(job.global_batch)
    if options.num_stages is not None:
        stages = _pinned("num_stages", options.num_stages, stages, f"a divisor of the {devices} devices")
    if options.num_microbatches is not None:
        of_batch = f"a divisor of the batch of {job.global_batch}"
        counts = _pinned("num_microbatches", options.num_microbatches, counts, of_batch)
    schedules = [each for each in SCHEDULES.values() if each.name in options.schedules]
    found = settings_under([each for each in schedules if not each.takes_chunks], job, stages, counts)
    if options.partition == "exact":
        found += settings_under([each for each in schedules if each.takes_chunks], job, stages, counts)
    return [
        each
        for each in found
        if each.pipeline.schedule.is_tried(each.pipeline) and all(pin.takes(each.pipeline) for pin in options.pins)
    ]


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


def stage_strategies(job: Job, devices_per_stage: int, options: PlanOptions) -> tuple[Strategy, ...]:
    """The leaves of the decision tree for a stage, as far as the profile has their shapes."""
    shapes = job.profile.shapes
    offered = enumerate_strategies(devices_per_stage, space_options(job, options))
    return tuple(strategy for strategy in offered if frozenset(strategy.shape.items()) in shapes)


def space_options(job: Job, options: PlanOptions) -> SpaceOptions:
    """What the decision tree may use for this job: kinds that some layer of the model could be divided by.

    What a pin asks for is offered even where its kind finds it not worth a search.
    """
    kinds = paper_kinds() if options.space == "paper" else tuple(KINDS.values())
    return SpaceOptions(
        kinds=tuple(kind for kind in kinds if not kind.serves(job.chain)),
        variants=options.variants,
        remats=options.remats,
        mixes_samples=options.space != "paper",
        max_degrees=options.max_degrees,
        devices_per_node=job.cluster.devices_per_node,
        seq_len=job.seq_len,
        layers=job.chain.kinds,
        insists=(lambda strategy: any(pin.demands(strategy) for pin in options.pins)) if options.pins else None,
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
