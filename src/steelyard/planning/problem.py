"""The cost tables of a job: every pipeline configuration with every strategy that the options offer.

Over several device groups, every ordered choice of groups, number of stages that divides each group, number of
microbatches and schedule is a separate configuration, with the tables of its groups concatenated
(`steelyard.cost.placement`). There are thousands of them, so the bounds of a configuration are computed one after
another, the sharper ones reusing results for other configurations, and its tables only if it may still be the best. The
search excludes parts of a group, stages of different sizes within one group, and chunks over several groups.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import (
    KnownCosts,
    LayerCosts,
    build_tables,
    least_times_s,
    transfer_s,
    usable_bytes,
)
from steelyard.cost.context import counted_context_bytes
from steelyard.cost.fold import why_not_folded
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.memory import TERMS
from steelyard.cost.placement import Placement, pooled_tables
from steelyard.cost.tables import CostTables
from steelyard.errors import UserError
from steelyard.limits import MOST_MICROBATCHES
from steelyard.model.chain import LayerRole
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.dimensions import DIMENSIONS, modes
from steelyard.plan.strategy import Remat, Strategy, divisors
from steelyard.planning.pins import MICRO_BATCH, Pin, pinned, pins_of
from steelyard.schedules import SCHEDULES, USUAL, PipelineConfig, Schedule
from steelyard.search import OnDemand, SpaceOptions, enumerate_strategies, paper_dimensions
from steelyard.search.layers import ROUNDING
from steelyard.search.partition import quick_bound_s
from steelyard.search.step_bounds import (
    HeldRuns,
    PricedLayers,
    least_slowest_s,
    least_step_s,
    missing_bytes,
    priced_layers,
)

if TYPE_CHECKING:
    from steelyard.search.problem import Problem

LEVELS = 3
"""Number of lower bounds after the one by computing time: by all times, by memory, and by whole cuts."""
TINY_S = 1e-9
"""Lower bound of a stage's time in seconds if nothing is known."""


def make_tables(job: Job, decisions: Decisions) -> tuple[OnDemand, ...]:
    """Return the cost tables of every pipeline configuration of a job for `search`.

    On one group, they are in the order of `pipeline_configs`. Each is built when it is first needed. Before that, only
    the bound by computing time is known. Tables over several groups are only valid for the budgets of the job. Raises
    `UserError` if no pipeline meets the decisions.
    """
    if job.is_mixed:
        if placed := GroupSpace(job, decisions).on_demand():
            return placed
        raise UserError(
            field="--stages",
            found=str(decisions.num_stages),
            expected="a number of stages that divides the devices of a group, or the sum of such numbers",
            hint="leave it out to have it searched",
        )
    offered: dict[int, tuple[Strategy, ...]] = {}
    computed_s: dict[tuple[int, int], float] = {}
    configs, found = pipeline_configs(job, decisions), []
    if not configs and job.engine.capabilities.mixes_layers:  # others refuse decisions in words of their own
        raise no_pipeline(job, decisions)
    pins = _pins_of(job, decisions)
    known = KnownCosts([config.pipeline.num_microbatches for config in configs])
    for config in configs:
        size, pipeline = config.devices_per_stage, config.pipeline
        if size not in offered:
            offered[size] = stage_strategies(job, size, decisions)
        if not offered[size]:  # the engine cannot meet the decisions
            continue
        place = size, pipeline.num_microbatches
        if place not in computed_s:
            of_types = least_times_s(offered[size], config)
            computed_s[place] = sum(of_types[layer_type] for layer_type in job.chain.layers)
        bubble = 0.0 if pipeline.schedule.splits_backward else (1 - 1 / pipeline.num_stages) / pipeline.num_chunks
        least_s = computed_s[place] * (pipeline.num_microbatches / pipeline.num_stages + bubble) * (1 - ROUNDING)
        found.append(OnDemand(pipeline, least_s, partial(_tables, config, offered[size], known, decisions)))
    return (
        tuple(each.narrowed(partial(pinned, pins=pins, global_batch=job.global_batch)) for each in found)
        if pins
        else tuple(found)
    )


def _tables(config: JobConfig, strategies: tuple[Strategy, ...], known: KnownCosts, decisions: Decisions) -> CostTables:
    return with_remats(build_tables(config, strategies, known), config.job, decisions)


def with_remats(tables: CostTables, job: Job, decisions: Decisions) -> CostTables:
    """Return the tables in which blocks have only the remat choices of these decisions; other layers need none."""
    remats = decisions.remats
    if remats is None or Remat.NONE in remats:
        return tables
    roles = {each.name: each.role for each in job.chain.layer_types}
    is_end = np.array([roles[name] is not LayerRole.BLOCK for name in tables.type_names])
    allowed = np.array([strategy.remat in remats for strategy in tables.strategies], dtype=bool)
    return replace(tables, legal=tables.legal & (allowed | is_end[:, None]))


def is_uniform(job: Job, decisions: Decisions) -> bool:
    """Return whether all layers must have one strategy, by the user's decision or because the engine has no others."""
    return bool(decisions.uniform) or not job.engine.capabilities.mixes_layers


def _within_engine(job: Job, decisions: Decisions) -> Decisions:
    """Return the decisions without choices that the engine does not have."""
    means = job.engine.capabilities
    if means.mixes_layers:
        return decisions
    splits = all(SCHEDULES[name].splits_backward for name in decisions.allowed_schedules)
    known = means.remats if means.remats_split is None or not splits else means.remats_split
    able = Decisions(
        remats=tuple(remat for remat in Remat if remat in known),
        modes={
            key: tuple(each for each in mode.texts if means.offers(key, each)) for key, (_, mode) in modes().items()
        },
    )
    return able.with_also(decisions)


def _pins_of(job: Job, decisions: Decisions) -> tuple[Pin, ...]:
    """Return the pins. In plans of one strategy, a pin of all layers requires remat of the blocks only."""
    found = pins_of(decisions, job.chain)
    for size in (int(value) for pin in found for key, value in pin.wanted if key == MICRO_BATCH):
        if job.global_batch % size:
            raise UserError(
                field=f"--{MICRO_BATCH}",
                found=str(size),
                expected=f"a divisor of the global batch of {job.global_batch}",
                hint="change it, or --global-batch",
            )
    if not is_uniform(job, decisions):
        return found
    last = job.chain.num_layers - 2
    of_remat = (replace(pin.only("remat"), first=1, last=last) for pin in found if pin.first is None)
    return tuple(
        pin for pin in (*(pin.without("remat") if pin.first is None else pin for pin in found), *of_remat) if pin.wanted
    )


def problem_of(job: Job, tables: Sequence[OnDemand]) -> "Problem":
    """Return the cost tables of these configurations of a job as a problem file, with memory as plain sums that are
    upper bounds."""
    from steelyard.search.problem import Problem

    return Problem(
        name=f"{job.chain.name} on {job.cluster.name}",
        budget_bytes=usable_bytes(job),
        configs=tuple(each.tables.as_plain() for each in tables),
        samples=(job.global_batch,) * len(tables),
    )


def is_beaten(job: Job, tables: Sequence[OnDemand], step_s: float) -> bool:
    """Return whether every plan of a job is slower than ``step_s``, regardless of memory.

    It compares the bounds by computing time, and the cost tables of configurations for which these are not enough. The
    result is false if processes share cores (`Profile.busy_speeds`), because the search's times are no bound then.
    """
    if shares_cores(job):
        return False
    return all(each.least_s > step_s or quick_bound_s(each.tables) > step_s for each in tables)


def shares_cores(job: Job) -> bool:
    """Return whether processes share cores, so that waiting ones leave theirs to others (`Profile.busy_speeds`)."""
    return any(each.profile.busy_speeds for each in job.by_group)


def proves_apart(job: Job, given: Sequence[OnDemand]) -> bool:
    """Return whether the search's own bounds and optima prove nothing about the simulated step.

    Processes share cores, or chunks lie in a V, whose tables are rough (`steelyard.cost.fold`).
    """
    return shares_cores(job) or any(each.pipeline.is_v for each in given)


def simulated_bound_s(job: Job, given: OnDemand, bound_s: float) -> float:
    """Return a lower bound of the simulated step of a configuration if `proves_apart`; ``bound_s`` is the search's.

    Without shared cores it is the time of computation alone, divided evenly over the stages. With shared cores, the
    search assumes that all processes are always busy. A single stage always is, but several stages together do at most
    the work per second of the best number $k$ of busy ones, $k s_k$ (`steelyard.cost.shared_cores`). All passes are
    work.
    """
    if given.pipeline.num_stages == 1 or math.isinf(bound_s):
        return bound_s
    if not shares_cores(job):
        return given.least_s if given.pipeline.is_v else bound_s
    tables = given.tables
    pools = Counter((0,) * given.pipeline.num_stages if tables.pools is None else tables.pools.of_stages)
    order = (0,) if tables.pools is None else tables.pools.order
    work_per_s = 0.0
    for pool, count in pools.items():
        speeds = job.by_group[order[pool]].profile.stage_speeds(count) or (1.0,) * count
        work_per_s += max(busy * speed for busy, speed in enumerate(speeds, start=1))
    fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]
    passes_s = float(fastest.sum()) + tables.all_received_s
    return tables.num_passes * passes_s / work_per_s * (1 - ROUNDING)


def pipeline_configs(job: Job, decisions: Decisions) -> list[JobConfig]:
    """Return every number of stages that divides the devices with every number of microbatches that divides the batch.

    Each is combined with every allowed schedule that is tried for it (`Schedule.is_tried`). A schedule is not tried if
    it is never faster on separate devices, so all are tried if processes share cores, or if only one is allowed. Chunks
    are used if the blocks divide into them, but not with a partition for comparison.
    """
    devices, layers = job.cluster.num_devices, job.chain.num_layers
    stages = [p for p in divisors(devices) if p <= min(layers, decisions.most_stages or layers)]
    counts = microbatch_counts(job.global_batch)
    means = job.engine.capabilities
    if refused := means.pipeline_refusal(job.chain):
        if (decisions.num_stages or 1) > 1:
            raise UserError(
                field="--stages",
                found=f"{decisions.num_stages} with the engine {job.engine.name} for {job.chain.name}",
                expected=f"1, because the engine has no pipeline with {refused}",
                hint="leave --stages out, or plan for another engine",
            )
        stages = [1]
    if decisions.num_stages is not None:
        limit = f" up to {decisions.most_stages}" if decisions.most_stages is not None else ""
        stages = _pinned("--stages", decisions.num_stages, stages, f"a divisor of the {devices} devices{limit}")
    if decisions.num_microbatches is not None:
        of_batch = f"a divisor of the batch of {job.global_batch}"
        counts = _pinned("--microbatches", decisions.num_microbatches, counts, of_batch)
    schedules = [each for each in SCHEDULES.values() if each.name in decisions.allowed_schedules]
    if schedules and (refused := means.weight_pass_refusal(job.levers)):
        if all(each.splits_backward for each in schedules):
            raise UserError(
                field="--schedule",
                found=f"{', '.join(map(str, schedules))} with {refused}",
                expected="a schedule without weight passes",
                hint="name another one as well, or leave the lever out",
            )
        schedules = [each for each in schedules if not each.splits_backward]
    if schedules and decisions.schedules is not None and not any(means.runs(each.name) for each in schedules):
        known = ", ".join(each for each in SCHEDULES if means.runs(each))
        raise UserError(
            field="--schedule",
            found=f"{', '.join(map(str, schedules))} with the engine {job.engine.name}",
            expected=known or "no schedule: this engine runs no pipelines",
            hint="name one of these, or leave --schedule out" if known else "leave --schedule out",
        )
    if len(schedules) > 1:
        schedules = [each for each in schedules if not each.only_alone]
    found = configs_under([each for each in schedules if not each.takes_chunks], job, stages, counts)
    if decisions.stage_partition == "exact":
        found += configs_under([each for each in schedules if each.takes_chunks], job, stages, counts)
    pins = pins_of(decisions, job.chain)
    everywhere = shares_cores(job) or len(schedules) == 1
    return [
        each
        for each in found
        if (
            each.pipeline.schedule.is_tried(each.pipeline)
            or (everywhere and each.pipeline.schedule.why_not_everywhere and each.pipeline.num_stages > 1)
        )
        and all(pin.takes(each.pipeline) for pin in pins)
        and (each.pipeline.num_stages == 1 or means.runs(each.pipeline.schedule.name))
    ]


def no_pipeline(job: Job, decisions: Decisions) -> UserError:
    """Build the error for decisions that no pipeline configuration meets, with the ones there are without them."""
    asked = decisions.model_copy(update=dict.fromkeys(("remats", "modes", "max_degrees", "space", "uniform")))
    pipelines = [each.pipeline for each in pipeline_configs(job, FREE)]
    stages = ", ".join(map(str, sorted({each.num_stages for each in pipelines})))
    counts = ", ".join(map(str, sorted({each.num_microbatches for each in pipelines})))
    named = decisions.allowed_schedules
    reasons = (f"; {each}: {SCHEDULES[each].why_nowhere}" for each in named if len(named) < len(SCHEDULES))
    return UserError(
        field="pipeline",
        found=f"no configuration with {', '.join(asked.one_by_one())}",
        expected=f"stages among {stages}, microbatches among {counts}{''.join(reasons)}",
        hint="leave one of these out, or change the batch or the devices",
    )


def microbatch_counts(global_batch: int) -> list[int]:
    """Return every number of microbatches that divides the batch, up to `MOST_MICROBATCHES`."""
    return [m for m in divisors(global_batch) if m <= MOST_MICROBATCHES]


def configs_under(
    schedules: Sequence[Schedule], job: Job, stages: Sequence[int], counts: Sequence[int]
) -> list[JobConfig]:
    """Return the configurations with these numbers of stages and microbatches that one of these schedules can run."""
    pipelines = [
        PipelineConfig(num_stages=p, num_chunks=chunks, num_microbatches=m, schedule=schedule)
        for p in stages
        for m in counts
        for schedule in schedules
        for chunks in schedule.chunk_counts
    ]
    return [
        JobConfig(job=job, pipeline=each)
        for each in pipelines
        if each.schedule.refusal(each) is None
        and (
            each.num_chunks == 1
            or why_not_folded(
                job.chain.layers,
                num_stages=each.num_stages,
                num_chunks=each.num_chunks,
                is_v=each.is_v,
                ends_replace_blocks=not job.engine.capabilities.mixes_layers,
            )
            is None
        )
    ]


def stage_strategies(job: Job, devices_per_stage: int, decisions: Decisions) -> tuple[Strategy, ...]:
    """Return the leaves of the decision tree for a stage whose shapes the profile has and that the engine can run."""
    shapes = job.profile.shapes
    offered, means = enumerate_strategies(devices_per_stage, space_options(job, decisions)), job.engine.capabilities
    is_piped = devices_per_stage < job.cluster.num_devices
    known = (each for each in offered if frozenset(each.shape.items()) in shapes)
    if not means.shares_heads:
        types = job.chain.layer_types
        known = (each for each in known if all(layer.shared_by(each.tensor_degree) is None for layer in types))
    known = (each for each in known if means.refusal_of(job.chain, each) is None)
    return tuple(each for each in known if means.refusal(each, is_piped=is_piped) is None)


def space_options(job: Job, decisions: Decisions) -> SpaceOptions:
    """Return the options of the decision tree for this job, with the dimensions that can divide some layer.

    Strategies without remat are always among them, because embedding and head may need them (`with_remats`).
    Strategies that a pin requires are offered even if their dimension considers them not worth a search.
    """
    pins, decisions = pins_of(decisions, job.chain), _within_engine(job, decisions)
    dimensions = paper_dimensions() if decisions.space == "paper" else tuple(DIMENSIONS.values())
    return SpaceOptions(
        dimensions=tuple(dimension for dimension in dimensions if not dimension.serves(job.chain)),
        modes=decisions.modes or {},
        remats=tuple(each for each in Remat if decisions.remats is None or each in (Remat.NONE, *decisions.remats)),
        mixes_samples=decisions.space != "paper",
        max_degrees=decisions.max_degrees or {},
        devices_per_node=job.cluster.devices_per_node,
        layers=job.chain.layer_types,
        insists=(lambda strategy: any(pin.demands(strategy) for pin in pins)) if pins else None,
    )


def _pinned(option: str, value: int, allowed: list[int], rule: str) -> list[int]:
    if value not in allowed:
        raise UserError(
            field=option,
            found=str(value),
            expected=f"{rule}: {', '.join(map(str, allowed))}",
            hint="leave it out to have it searched",
        )
    return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPipeline:
    """A pipeline over some of the groups, with a lower bound of its step time."""

    placement: Placement
    pipeline: PipelineConfig
    bound_s: float


class GroupSpace:
    """All pipelines of a job over several groups, with their bounds and tables, which are built on demand."""

    def __init__(self, job: Job, decisions: Decisions) -> None:
        self._job, self._decisions = job, decisions
        counts = microbatch_counts(job.global_batch)
        self._known = [KnownCosts(counts) for _ in job.groups]
        self._offered: dict[tuple[int, int], tuple[Strategy, ...]] = {}
        self._stage_layers: dict[tuple[int, int, int, int, bool, bool], _StageLayers] = {}
        self._known_runs: dict[tuple[int, ...], HeldRuns] = {}
        self._counts = np.bincount(job.chain.layers, minlength=len(job.chain.layer_types)).tolist()
        self._computed: dict[tuple[int, int, int], tuple[list[float], PricedLayers]] = {}

    def on_demand(self) -> tuple[OnDemand, ...]:
        """Return the cost tables of every configuration for `search`."""
        return tuple(self._on_demand(each) for each in self.configs())

    def _on_demand(self, config: PlacedPipeline, level: int = 0) -> OnDemand:
        """Return the cost tables of a configuration of whose bounds the first ``level`` are known."""
        make = partial(self.tables, config)
        if math.isfinite(config.bound_s):
            sharpen = partial(self._sharper, config, level) if level < LEVELS else None
            return OnDemand(config.pipeline, config.bound_s, make, sharpen=sharpen)
        missing = partial(self.missing_bytes, config) if level == LEVELS else lambda most: most  # more is of no use
        return OnDemand(config.pipeline, config.bound_s, make, missing_bytes=missing)

    def _sharper(self, config: PlacedPipeline, level: int, cutoff_s: float) -> list[OnDemand]:
        """Return a configuration with its next bound. The bound by times splits it into one per order of its groups."""
        bound_s = max(config.bound_s, self.next_bound_s(config, level, cutoff_s))
        orders = self.orders(config) if level == 0 else (config,)
        return [self._on_demand(replace(each, bound_s=bound_s), level + 1) for each in orders]

    def configs(self) -> list[PlacedPipeline]:
        """Return every configuration that can run, in the first order of its pools, with its bound by computing
        time."""
        found = []
        for pool, job in enumerate(self._job.by_group):
            divides = job.cluster.num_devices % (self._decisions.num_stages or 1) == 0
            for config in pipeline_configs(job, self._decisions) if divides else ():
                placement = Placement(pools=(pool,), stages=(config.pipeline.num_stages,))
                found.append(self._with_bound(placement, config.pipeline))
        return [*found, *self._joined()]

    def orders(self, config: PlacedPipeline) -> Iterator[PlacedPipeline]:
        """Yield a configuration with its pools in every order along the pipeline. The bound by times is the same for
        all."""
        pairs = zip(config.placement.pools, config.placement.stages, strict=True)
        for order in itertools.permutations(pairs):
            pools, stages = zip(*order, strict=True)
            yield replace(config, placement=Placement(pools=pools, stages=stages))

    def next_bound_s(self, config: PlacedPipeline, level: int, cutoff_s: float = math.inf) -> float:
        """Lower bound of the step time of a configuration in seconds: by times, then also by memory, then also by whole
        cuts.

        Bounds above ``cutoff_s`` need not be exact.
        """
        if level == 0:
            stages = self._stages(config)
            return self._least_s(config, [each.fastest for each in stages], [each.transfer_s for each in stages])
        slowest_s = self._slowest_s(config, cutoff_s) if level == 2 else 0.0
        return slowest_s if math.isinf(slowest_s) else self._bound_within_s(config, slowest_s, are_made=level == 2)

    def tables(self, config: PlacedPipeline) -> CostTables:
        """Return the cost tables of a configuration."""
        placement = config.placement
        offered = [self._strategies(*each) for each in zip(placement.pools, placement.sizes(self._job), strict=True)]
        known = [self._known[pool] for pool in placement.pools]
        found = pooled_tables(self._job, placement, config.pipeline, offered, known)
        return with_remats(found, self._job, self._decisions)

    def _bound_within_s(self, config: PlacedPipeline, slowest_s: float, *, are_made: bool) -> float:
        pipeline, stages = config.pipeline, self._stages(config, are_made=are_made)
        in_flight = [pipeline.in_flight(stage) if pipeline.num_chunks == 1 else 1 for stage in range(len(stages))]
        has_gradients = pipeline.num_chunks == 1 and max(in_flight) < pipeline.num_microbatches
        priced = [
            each.within(count, self._counts, has_gradients=has_gradients)
            for each, count in zip(stages, in_flight, strict=True)
        ]
        transfers, rooms = [each.transfer_s for each in stages], [each.room_bytes for each in stages]
        return self._least_s(config, priced, transfers, rooms, slowest_s)

    def _slowest_s(self, config: PlacedPipeline, cutoff_s: float) -> float:
        """Lower bound in seconds of the slowest stage of a configuration; 0 if its stages have several chunks."""
        if config.pipeline.num_chunks > 1:
            return 0.0
        stages, passes = self._runs_of(config), config.pipeline.num_passes
        least_s = max(config.bound_s / (len(stages[0]) + passes - 1), TINY_S)
        return least_slowest_s(*stages, self._job.chain.num_layers, least_s, cutoff_s / passes) * (1 - ROUNDING)

    def missing_bytes(self, config: PlacedPipeline, most: int) -> int:
        """Minimum of additional bytes that a configuration needs on every device, at most ``most``."""
        return missing_bytes(self._runs_of(config)[0], self._job.chain.num_layers, most)

    def _runs_of(self, config: PlacedPipeline) -> tuple[list[tuple[HeldRuns, int]], list[float]]:
        """Return the runs of every stage with its microbatches in flight, and its transfer time in seconds."""
        pipeline = config.pipeline
        is_alone = len(config.placement.pools) == 1
        runs = [self._runs(*each, pipeline, is_alone) for each in config.placement.of_stages(self._job)]
        flights = map(pipeline.in_flight, range(len(runs)))
        handed = self._handed_s(config, [each.transfer_s for each in self._stages(config)])
        return list(zip(runs, flights, strict=True)), handed

    def _runs(self, pool: int, size: int, pipeline: PipelineConfig, is_alone: bool) -> HeldRuns:
        job = self._job.by_group[pool]
        apart = pipeline.num_stages if job.chain.sums_tied else 0
        count, flights = pipeline.num_microbatches, map(pipeline.in_flight, range(pipeline.num_stages))
        key = pool, size, apart, count, min(pipeline.num_stages, 2), count in flights, is_alone
        if key not in self._known_runs:
            config = JobConfig(job=job, pipeline=pipeline, stage_size=size)
            tables = build_tables(config, self._strategies(pool, size), self._known[pool], pooled=not is_alone)
            self._known_runs[key] = HeldRuns(tables, usable_bytes(job))
        return self._known_runs[key]

    def _stages(self, config: PlacedPipeline, *, are_made: bool = False) -> list["_StageLayers"]:
        """Return the layers on every stage. ``are_made`` uses the full times of all layer types, not only of blocks."""
        pipeline, is_alone = _without_chunks(config.pipeline), len(config.placement.pools) == 1
        return [self._layers(*each, pipeline, are_made, is_alone) for each in config.placement.of_stages(self._job)]

    def _joined(self) -> Iterator[PlacedPipeline]:
        job, decisions = self._job, self._decisions
        allowed = [each for each in SCHEDULES.values() if each.name in decisions.allowed_schedules]
        schedules = [each for each in allowed if not each.takes_chunks]
        counts = [m for m in microbatch_counts(job.global_batch) if decisions.num_microbatches in (None, m)]
        sizes = [divisors(group.cluster.num_devices) for group in job.groups]
        for size in range(2, len(sizes) + 1):
            for pools in itertools.combinations(range(len(sizes)), size):
                for stages in itertools.product(*(sizes[pool] for pool in pools)):
                    if sum(stages) > job.chain.num_layers or not decisions.allows_stages(sum(stages)):
                        continue
                    for config in configs_under(schedules, job, [sum(stages)], counts):
                        if config.pipeline.schedule.is_tried(config.pipeline):
                            yield self._with_bound(Placement(pools=pools, stages=stages), config.pipeline)

    def _with_bound(self, placement: Placement, pipeline: PipelineConfig) -> PlacedPipeline:
        config = PlacedPipeline(placement=placement, pipeline=pipeline, bound_s=0.0)
        priced = [self._compute(*each, pipeline)[1] for each in placement.of_stages(self._job)]
        return replace(config, bound_s=self._least_s(config, priced, [0.0] * len(priced)))

    def _least_s(
        self,
        config: PlacedPipeline,
        stages: Sequence[PricedLayers],
        transfers: Sequence[float],
        rooms: Sequence[float] | None = None,
        slowest_s: float = 0.0,
    ) -> float:
        handed = self._handed_s(config, transfers)
        passes = config.pipeline.num_passes
        layers = self._job.chain.layers
        ends = (layers[0], layers[-1]) if rooms is not None and config.pipeline.num_chunks == 1 else None
        found = least_step_s(stages, self._counts, handed, passes, rooms, slowest_s, ends)
        return found / config.pipeline.num_chunks * (1 - ROUNDING)

    def _handed_s(self, config: PlacedPipeline, transfers: Sequence[float]) -> list[float]:
        """Transfer time of each stage in seconds, counted as 0 between pools and between chunks."""
        chunks, borders = config.pipeline.num_chunks, {0, *itertools.accumulate(config.placement.stages)}
        return [0.0 if chunks > 1 or stage in borders else each for stage, each in enumerate(transfers)]

    def _compute(self, pool: int, size: int, pipeline: PipelineConfig) -> tuple[list[float], PricedLayers]:
        """Return the minimum computing time on stages of a size, in seconds by layer type and for all layers."""
        key = pool, size, pipeline.num_microbatches
        if key not in self._computed:
            config = JobConfig(job=self._job.by_group[pool], pipeline=_without_chunks(pipeline), stage_size=size)
            times_s = least_times_s(self._strategies(pool, size), config)
            self._computed[key] = times_s, PricedLayers.unpriced(times_s, self._counts)
        return self._computed[key]

    def _layers(self, pool: int, size: int, pipeline: PipelineConfig, are_made: bool, is_alone: bool) -> "_StageLayers":
        stages = pipeline.num_stages if self._job.chain.sums_tied else min(pipeline.num_stages, 2)
        key = pool, size, pipeline.num_microbatches, stages, are_made, is_alone
        if key not in self._stage_layers:
            config = JobConfig(job=self._job.by_group[pool], pipeline=pipeline, stage_size=size)
            costs = self._known[pool].of(config, self._strategies(pool, size))
            layer_types = self._job.chain.layer_types
            made = [
                place for place, layer_type in enumerate(layer_types) if are_made or layer_type.role is LayerRole.BLOCK
            ]
            least_s, _ = self._compute(pool, size, pipeline)
            time_s = np.repeat(np.array(least_s)[:, None], costs.legal.shape[1], axis=1)
            time_s[made] = costs.time_s(made, config, alike=is_alone)
            self._stage_layers[key] = _StageLayers(config=config, costs=costs, time_s=time_s, counts=self._counts)
        return self._stage_layers[key]

    def _strategies(self, pool: int, size: int) -> tuple[Strategy, ...]:
        if (pool, size) not in self._offered:
            self._offered[pool, size] = stage_strategies(self._job.by_group[pool], size, self._decisions)
        return self._offered[pool, size]


def _without_chunks(pipeline: PipelineConfig) -> PipelineConfig:
    return replace(pipeline, num_chunks=1, schedule=USUAL)


class _StageLayers:
    """Costs of the layers on stages of one size of one pool, with one number of microbatches.

    ``time_s`` [K, S] is a lower bound of their times. For the few layers that are not blocks, it may be the minimum
    computing time.
    """

    def __init__(
        self,
        *,
        config: JobConfig,
        costs: LayerCosts,
        time_s: NDArray[np.float64],
        counts: Sequence[int],
    ) -> None:
        self._costs, self._time_s = costs, time_s
        self._within: dict[tuple[int, bool], PricedLayers] = {}
        self.transfer_s = transfer_s(config)
        self.fastest = priced_layers(costs.legal, time_s, np.zeros(costs.legal.shape, dtype=np.int64), counts)
        """Layers priced by their times alone."""
        self.room_bytes = usable_bytes(config.job) - counted_context_bytes(config)

    def within(self, in_flight: int, counts: Sequence[int], *, has_gradients: bool) -> PricedLayers:
        """Return the layers priced with a lower bound of their bytes at this number of microbatches in flight."""
        key = in_flight, has_gradients
        if key not in self._within:
            costs = self._costs
            held = dict(zip(TERMS, costs.rows.terms, strict=True))
            saved, gradients = held.pop("activations"), held.pop("gradients")
            num_bytes = sum(held.values()) + in_flight * saved + has_gradients * gradients
            self._within[key] = priced_layers(costs.legal, self._time_s, num_bytes, counts)
        return self._within[key]
