"""Chooses a plan over unlike pools of devices: their order along the pipeline, the stages of each, and all the rest.

Every order of every choice of pools, every number of stages that divides each pool, every number of microbatches and
schedule is a pipeline setting of its own, with the tables of its pools side by side (`steelyard.cost.pools`). There
are thousands, so a setting gets its tables only when it may still be the best: settings are taken in the order of what
their times alone let them be at best (`steelyard.search.pool_bounds`), until no other can be faster than the best plan
that was accepted. So what is optimal is so among all of them. A pool alone is searched as its own cluster would be.

Not searched: a part of a pool, stages of unlike sizes within one, and chunks over several.
"""

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.cost.build import KnownCosts, build_tables, context_bytes, least_times_s, usable_bytes
from steelyard.cost.memory_floor import IntTable, KnownLayers, floor_likeness, held_floors
from steelyard.cost.pools import AnyJob, Placement, PooledFloors, PooledJob, pooled_tables
from steelyard.cost.predict import PlanCost, predict
from steelyard.cost.setting import Setting
from steelyard.cost.tables import CostTables
from steelyard.errors import UserError
from steelyard.hardware import MixedCluster, parse_pools, with_network
from steelyard.limits import MOST_MICROBATCHES
from steelyard.plan.certificate import Certificate
from steelyard.plan.choices import Explanation, Rival
from steelyard.plan.plan import Alternative, Baseline, Plan, PoolUse, Precision, Prediction
from steelyard.plan.strategy import Strategy, divisors
from steelyard.planning.acceptance import Acceptance, Accepted, accept
from steelyard.planning.choose import NUM_RESCORED, PlanningResult, plan_job
from steelyard.planning.demands import asked_in
from steelyard.planning.job import make_job
from steelyard.planning.margin import pressure, without_margin
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.planning.price import job_of
from steelyard.planning.problem import PlanOptions, pipeline_settings, stage_strategies
from steelyard.planning.profile_file import GivenProfiles, pool_profiles, recorded_profile
from steelyard.schedules import SCHEDULES, USUAL, PipelineConfig
from steelyard.search import NearestMiss
from steelyard.search.least_memory import IMPOSSIBLE
from steelyard.search.balance import even_boundaries
from steelyard.search.pool_bounds import PoolRuns, PricedLayers, least_slowest_s, least_step_s, missing_bytes, priced_layers
from steelyard.units import format_bytes, format_plural, format_seconds

FIRST_ROUND = 8
"""Settings that are searched before the bound of the best plan among them decides on the others."""
ROUND = 24
"""Settings that are searched together after that."""
LEVELS = 3
"""Bounds of a setting beyond that by what computing takes: by its times, by its memory, and by whole cuts."""
TINY_S = 1e-9
"""What a stage takes at least where nothing is known."""
SAME = 1e-9
"""Times that differ by no more than this fraction are equal."""


def make_pooled_job(
    config: Any,
    cluster: MixedCluster,
    *,
    global_batch: int,
    seq_len: int,
    precision: Precision,
    memory: str | int | None = None,
    profile: GivenProfiles | None = None,
    **more: Any,
) -> PooledJob:
    """The job that these arguments describe on several pools; as `make_job` for each.

    ``profile`` has the measured profiles of pools by name, see `pool_profiles`; the others are traced.
    """
    pools, profiles = [], pool_profiles(profile, [pool.name for pool in cluster.pools])
    for pool, link in zip(cluster.pools, cluster.links, strict=True):
        job = make_job(
            config,
            pool,
            global_batch=global_batch,
            seq_len=seq_len,
            precision=precision,
            memory=memory,
            profile=profiles.get(pool.name),
            **more,
        )
        pools.append(replace(job, outer_link=link))
    return PooledJob(pools=tuple(pools), cluster=cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSetting:
    """A pipeline over some of the pools, and what no plan of it is faster than by what computing takes alone."""

    placement: Placement
    pipeline: PipelineConfig
    bound_s: float


class PooledSpace:
    """All settings of a job on several pools, and their tables, made when they are asked for."""

    def __init__(self, job: PooledJob, options: PlanOptions) -> None:
        _check_options(options)
        self._job, self._options = job, options
        self._known: list[KnownCosts] = [{} for _ in job.pools]
        self._offered: dict[tuple[int, int], tuple[Strategy, ...]] = {}
        self._stage_layers: dict[tuple[int, int, int, int], _StageLayers] = {}
        self._known_runs: dict[tuple[int, ...], PoolRuns] = {}
        self.floors = PooledFloors(job)
        """Of the tables of all settings."""
        self._known_layers: list[KnownLayers] = [{} for _ in job.pools]
        self._made: dict[tuple[Placement, PipelineConfig], CostTables] = {}
        self._counts = np.bincount(job.chain.layers, minlength=len(job.chain.kinds)).tolist()
        self._computed: dict[tuple[int, int, int], PricedLayers] = {}

    @property
    def asked_stages(self) -> str:
        """What a pipeline must have to be searched: `` of 2 stages``; empty where any number will do."""
        count = self._options.num_stages
        return "" if count is None else f" of {format_plural(count, 'stage')}"

    def settings(self) -> list[PooledSetting]:
        """Every setting that can run, of each order of its pools the first, with a bound by what computing takes alone."""
        return [*self._alone(), *self._joined()]

    def orders(self, setting: PooledSetting) -> Iterator[PooledSetting]:
        """A setting with its pools in every order along the pipeline, which the times alone do not tell apart."""
        pairs = zip(setting.placement.pools, setting.placement.stages, strict=True)
        for order in itertools.permutations(pairs):
            pools, stages = zip(*order, strict=True)
            yield replace(setting, placement=Placement(pools=pools, stages=stages))

    def next_bound_s(self, setting: PooledSetting, level: int, cutoff_s: float = math.inf) -> float:
        """What no plan of a setting is faster than: by its times, then by those and its memory, then by whole cuts too.

        More than ``cutoff_s`` need not be told apart.
        """
        if level == 0:
            stages = self._stages(setting)
            return self._least_s(setting, [each.fastest for each in stages], [each.transfer_s for each in stages])
        slowest_s = self._slowest_s(setting, cutoff_s) if level == 2 else 0.0
        return slowest_s if math.isinf(slowest_s) else self._bound_within_s(setting, slowest_s)

    def tables(self, setting: PooledSetting) -> CostTables:
        """The cost tables of a setting."""
        key = setting.placement, setting.pipeline
        if key not in self._made:
            sizes = setting.placement.sizes(self._job)
            offered = [self._strategies(*each) for each in zip(setting.placement.pools, sizes, strict=True)]
            known = [self._known[pool] for pool in setting.placement.pools]
            self._made[key] = pooled_tables(self._job, *key, offered, known)
        return self._made[key]

    def _bound_within_s(self, setting: PooledSetting, slowest_s: float) -> float:
        pipeline, stages = setting.pipeline, self._stages(setting)
        in_flight = [pipeline.in_flight(stage) if pipeline.num_chunks == 1 else 1 for stage in range(len(stages))]
        has_gradients = pipeline.num_chunks == 1 and max(in_flight) < pipeline.num_microbatches
        priced = [
            each.within(count, self._counts, has_gradients=has_gradients)
            for each, count in zip(stages, in_flight, strict=True)
        ]
        transfers, rooms = [each.transfer_s for each in stages], [each.room_bytes for each in stages]
        return self._least_s(setting, priced, transfers, rooms, slowest_s)

    def _slowest_s(self, setting: PooledSetting, cutoff_s: float) -> float:
        """What the slowest stage of a setting takes at least; 0 where its stages have several chunks."""
        if setting.pipeline.num_chunks > 1:
            return 0.0
        stages, passes = self._runs_of(setting), setting.pipeline.num_passes
        least_s = max(setting.bound_s / (len(stages[0]) + passes - 1), TINY_S)
        return least_slowest_s(*stages, self._job.chain.num_layers, least_s, cutoff_s / passes) * (1 - SAME)

    def missing_bytes(self, setting: PooledSetting, most: int) -> int:
        """How much more memory a setting needs at least, on every device; ``most`` if not less."""
        return missing_bytes(self._runs_of(setting)[0], self._job.chain.num_layers, most)

    def _runs_of(self, setting: PooledSetting) -> tuple[list[tuple[PoolRuns, int]], list[float]]:
        """Of every stage its runs with the microbatches in flight, and what it takes for handing over."""
        placement, pipeline = setting.placement, setting.pipeline
        sizes = zip(placement.pools, placement.sizes(self._job), placement.stages, strict=True)
        runs = [each for pool, size, count in sizes for each in [self._runs(pool, size, pipeline)] * count]
        flights = map(pipeline.in_flight, range(len(runs)))
        handed = self._handed_s(setting, [each.transfer_s for each in self._stages(setting)])
        return list(zip(runs, flights, strict=True)), handed

    def _runs(self, pool: int, size: int, pipeline: PipelineConfig) -> PoolRuns:
        job = self._job.pools[pool]
        apart = pipeline.num_stages if job.chain.tied_embeddings else 0
        key = (pool, size, apart, *floor_likeness(pipeline))
        if key not in self._known_runs:
            setting = Setting(job=job, pipeline=pipeline, stage_size=size)
            tables = build_tables(setting, self._strategies(pool, size), self._known[pool])
            self._known_runs[key] = PoolRuns(self.floors.of_part(pool, tables)[0], usable_bytes(job) + 1)
        return self._known_runs[key]

    def _stages(self, setting: PooledSetting) -> list["_StageLayers"]:
        placement, pipeline = setting.placement, _without_chunks(setting.pipeline)
        pools = zip(placement.pools, placement.sizes(self._job), placement.stages, strict=True)
        return [each for pool, size, count in pools for each in [self._layers(pool, size, pipeline)] * count]

    def _alone(self) -> Iterator[PooledSetting]:
        for pool, job in enumerate(self._job.pools):
            if job.cluster.num_devices % (self._options.num_stages or 1):
                continue
            for setting in pipeline_settings(job, self._options):
                placement = Placement(pools=(pool,), stages=(setting.pipeline.num_stages,))
                yield self._with_bound(placement, setting.pipeline)

    def _joined(self) -> Iterator[PooledSetting]:
        for pools in _choices(len(self._job.pools)):
            counts = [divisors(self._job.pools[pool].cluster.num_devices) for pool in pools]
            for stages in itertools.product(*counts):
                if sum(stages) <= self._job.chain.num_layers:
                    for pipeline in self._pipelines(sum(stages)):
                        yield self._with_bound(Placement(pools=pools, stages=stages), pipeline)

    def _pipelines(self, num_stages: int) -> Iterator[PipelineConfig]:
        options = self._options
        if options.num_stages not in (None, num_stages):
            return
        for count in divisors(self._job.global_batch):
            if count > MOST_MICROBATCHES or options.num_microbatches not in (None, count):
                continue
            for schedule in SCHEDULES.values():
                if schedule.takes_chunks or schedule.name not in options.schedules:
                    continue
                pipeline = PipelineConfig(num_stages=num_stages, num_microbatches=count, schedule=schedule)
                if schedule.refusal(pipeline) is None and schedule.is_tried(pipeline):
                    yield pipeline

    def _with_bound(self, placement: Placement, pipeline: PipelineConfig) -> PooledSetting:
        setting = PooledSetting(placement=placement, pipeline=pipeline, bound_s=0.0)
        pools = zip(placement.pools, placement.sizes(self._job), placement.stages, strict=True)
        priced = [each for pool, size, count in pools for each in [self._compute(pool, size, pipeline)] * count]
        return replace(setting, bound_s=self._least_s(setting, priced, [0.0] * len(priced)))

    def _least_s(
        self,
        setting: PooledSetting,
        stages: Sequence[PricedLayers],
        transfers: Sequence[float],
        rooms: Sequence[float] | None = None,
        slowest_s: float = 0.0,
    ) -> float:
        handed = self._handed_s(setting, transfers)
        found = least_step_s(stages, self._counts, handed, setting.pipeline.num_passes, rooms, slowest_s)
        return found / setting.pipeline.num_chunks * (1 - SAME)

    def _handed_s(self, setting: PooledSetting, transfers: Sequence[float]) -> list[float]:
        """What each stage takes for handing over; between pools, and between chunks, that counts for nothing."""
        chunks, borders = setting.pipeline.num_chunks, {0, *itertools.accumulate(setting.placement.stages)}
        return [0.0 if chunks > 1 or stage in borders else each for stage, each in enumerate(transfers)]

    def _compute(self, pool: int, size: int, pipeline: PipelineConfig) -> PricedLayers:
        key = pool, size, pipeline.num_microbatches
        if key not in self._computed:
            setting = Setting(job=self._job.pools[pool], pipeline=_without_chunks(pipeline), stage_size=size)
            least_s = least_times_s(self._strategies(pool, size), setting)
            self._computed[key] = PricedLayers.unpriced(least_s, self._counts)
        return self._computed[key]

    def _layers(self, pool: int, size: int, pipeline: PipelineConfig) -> "_StageLayers":
        stages = pipeline.num_stages if self._job.chain.tied_embeddings else min(pipeline.num_stages, 2)
        key = pool, size, pipeline.num_microbatches, stages
        if key not in self._stage_layers:
            setting = Setting(job=self._job.pools[pool], pipeline=pipeline, stage_size=size)
            tables = build_tables(setting, self._strategies(pool, size), self._known[pool])
            self._stage_layers[key] = _StageLayers(
                setting=setting, tables=tables, known=self._known_layers[pool], counts=self._counts
            )
        return self._stage_layers[key]

    def _strategies(self, pool: int, size: int) -> tuple[Strategy, ...]:
        if (pool, size) not in self._offered:
            self._offered[pool, size] = stage_strategies(self._job.pools[pool], size, self._options)
        return self._offered[pool, size]


def _without_chunks(pipeline: PipelineConfig) -> PipelineConfig:
    return replace(pipeline, num_chunks=1, schedule=USUAL)


class _StageLayers:
    """What the layers take on stages of one size of one pool, with one number of microbatches."""

    def __init__(self, *, setting: Setting, tables: CostTables, known: KnownLayers, counts: Sequence[int]) -> None:
        self._setting, self._tables, self._known_layers = setting, tables, known
        self._held: IntTable | None = None
        self._within: dict[tuple[int, bool], PricedLayers] = {}
        self.transfer_s = tables.transfer_s
        self.fastest = priced_layers(tables.legal, tables.time_s, np.zeros_like(tables.static_bytes), counts)
        """By their times alone."""
        self.room_bytes = usable_bytes(setting.job) + 1 - context_bytes(setting)

    def within(self, in_flight: int, counts: Sequence[int], *, has_gradients: bool) -> PricedLayers:
        """With the bytes that they hold with so many microbatches in flight, at least."""
        key = in_flight, has_gradients
        if key not in self._within:
            tables = self._tables
            if self._held is None:
                self._held = held_floors(tables.strategies, tables.legal, self._setting, self._known_layers)
            static, saved, gradients = self._held
            num_bytes = static + in_flight * saved + has_gradients * gradients
            self._within[key] = priced_layers(tables.legal, tables.time_s, num_bytes, counts)
        return self._within[key]


def _choices(count: int) -> Iterator[tuple[int, ...]]:
    """Every choice of two pools or more."""
    for size in range(2, count + 1):
        yield from itertools.combinations(range(count), size)


def _check_options(options: PlanOptions) -> None:
    if options.pins or options.partition != "exact":
        raise not_with_pools("--pin" if options.pins else "--partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSearch:
    """What a search over several pools found: accepted plans, fastest first, and what is proven."""

    accepted: tuple[Accepted, ...]
    acceptance: Acceptance
    settings: tuple[PooledSetting, ...]
    lower_bound_s: float
    is_optimal: bool
    was_cut: bool = False
    """Whether the time limit ended it."""


def search_pools(
    job: PooledJob, space: PooledSpace, *, num_alternatives: int = 0, time_limit_s: float | None = None
) -> PooledSearch:
    """The fastest accepted plans of all settings of a space."""
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    settings = space.settings()
    waiting = [(setting.bound_s, index, 0) for index, setting in enumerate(settings)]
    heapq.heapify(waiting)
    best: dict[int, Accepted] = {}
    bounds: list[float] = []
    refused: list[int] = []
    found, nearest, fastest_s = None, None, math.inf
    while waiting and waiting[0][0] < fastest_s * (1 - SAME):
        if found is not None and time.monotonic() > deadline:
            break
        most, limit = (FIRST_ROUND, math.inf) if found is None else (ROUND, deadline)
        taken = _most_promising(waiting, space, settings, refused, fastest_s, most, limit)
        if not taken:
            continue  # none is left, or no time
        found = accept(
            job,
            [space.tables(settings[index]) for index in taken],
            num_alternatives=num_alternatives,
            time_limit_s=None if time_limit_s is None else max(0.0, deadline - time.monotonic()),
            floors=space.floors,
            cutoff_s=fastest_s,
        )
        bounds.append(found.search.lower_bound_s)
        nearest = found if nearest is None or _missing_bytes(found) < _missing_bytes(nearest) else nearest
        best.update({taken[each.outcome.index]: each for each in found.ranked})
        fastest_s = min((each.outcome.score_s for each in best.values()), default=math.inf)
    if not best:
        nearest = _nearest(job, space, [settings[index] for index in refused], nearest)
    if nearest is None:
        raise UserError(
            field="global_batch",
            found=f"{job.global_batch} samples over {job.cluster.name}",
            expected=f"a batch that some pipeline{space.asked_stages} over these pools can divide among its ranks",
            hint="a larger batch, fewer devices" + (", or no --stages" if space.asked_stages else ""),
        )
    ranked = tuple(sorted(best.values(), key=lambda each: each.outcome.score_s))
    if not ranked:
        return PooledSearch(
            accepted=(), acceptance=nearest, settings=tuple(settings), lower_bound_s=math.inf, is_optimal=False
        )
    fastest_s = ranked[0].outcome.score_s
    left = [bound_s for bound_s, _, _ in waiting]
    lower = min(*bounds, fastest_s, *left)
    proven = lower >= fastest_s * (1 - SAME)
    return PooledSearch(
        accepted=ranked,
        acceptance=nearest if found is None else found,
        settings=tuple(settings),
        lower_bound_s=fastest_s if proven else lower,
        is_optimal=proven,
        was_cut=time.monotonic() > deadline,
    )


def _nearest(
    job: PooledJob, space: PooledSpace, settings: Sequence[PooledSetting], known: Acceptance | None
) -> Acceptance | None:
    """What is ``known`` of the nearest miss, or that of one of these settings, whose layers memory does not hold."""
    nearest, least = known, IMPOSSIBLE if known is None else int(min(_missing_bytes(known), IMPOSSIBLE))
    promising = sorted(((space.missing_bytes(each, least), place) for place, each in enumerate(settings)))
    for bound, place in promising:
        if bound >= least:
            break
        found = accept(job, [space.tables(settings[place])], floors=space.floors)
        if _missing_bytes(found) < least:
            nearest, least = found, int(_missing_bytes(found))
    return nearest


def _missing_bytes(found: Acceptance) -> float:
    miss = found.search.nearest_miss
    return math.inf if miss is None else miss.miss_bytes


def _most_promising(
    waiting: list[tuple[float, int, int]],
    space: PooledSpace,
    settings: list[PooledSetting],
    refused: list[int],
    fastest_s: float,
    most: int,
    deadline: float,
) -> list[int]:
    """Takes the settings of the least bounds from those that wait, each bound as sharp as it gets without a search.

    A setting whose times promise enough becomes one for every order of its pools, which are added to ``settings``. Those
    whose layers memory does not hold, however cut, are ``refused``.
    """
    taken: list[int] = []
    while waiting and len(taken) < most and waiting[0][0] < fastest_s * (1 - SAME) and time.monotonic() < deadline:
        bound_s, index, level = heapq.heappop(waiting)
        if level == LEVELS:
            taken.append(index)
            continue
        sharper_s = max(bound_s, space.next_bound_s(settings[index], level, fastest_s))
        if not math.isfinite(sharper_s):
            refused += [index] if level == LEVELS - 1 else []
            continue
        indices = [index]
        if level == 0:
            _, *others = space.orders(settings[index])
            indices += range(len(settings), len(settings) + len(others))
            settings += others
        for each in indices:
            heapq.heappush(waiting, (sharper_s, each, level + 1))
    return taken


def plan_pools(job: PooledJob, options: PlanOptions, *, top: int = NUM_RESCORED) -> PlanningResult:
    """Searches every setting of a job on several pools and turns the best into a plan; as `plan_job` for one."""
    found = _plan_within(job, options, top, missed=())
    if found.plan is not None or not any(pool.margin_bytes for pool in job.pools):
        return found
    whole = replace(job, pools=tuple(map(without_margin, job.pools)))
    found = _plan_within(whole, options, top, missed=tuple(pool.margin_bytes for pool in job.pools))
    return replace(found, has_margin=found.plan is None)


def _plan_within(job: PooledJob, options: PlanOptions, top: int, *, missed: tuple[int, ...]) -> PlanningResult:
    """As `plan_pools`, within the budgets of the pools; ``missed`` are margins that no plan was found to leave free."""
    found = search_pools(
        job,
        PooledSpace(job, options),
        time_limit_s=options.time_limit_s,
    )
    search = found.acceptance.search
    result = PlanningResult(
        job=job,
        problem=None,
        num_left_out=0,
        search=search,
        plan=None,
        cost=None,
        miss=search.nearest_miss,
        miss_text="",
    )
    if not found.accepted:
        return replace(result, miss_text=_miss_text(job, found))
    candidates = found.accepted[: max(top, NUM_RESCORED)]
    costs = [predict(each.plan, job) for each in candidates]
    best = min(range(len(costs)), key=lambda index: (costs[index].step_time_s, index))
    plan, cost = candidates[best].plan, costs[best]
    alternatives = [
        Alternative(
            description=f"{_described(each.plan)}, {describe(each.plan.pipeline).partition(', ')[2]}",
            step_time_s=other.step_time_s,
            memory_bytes=max(stage.total_bytes for stage in other.stages),
            is_bound=not each.is_settled,
            reason=("" if each.is_settled else "at most ")
            + f"{other.step_time_s / cost.step_time_s - 1:.1%} slower: {summarise(each.plan)}",
        )
        for each, other in sorted(zip(candidates, costs, strict=True), key=lambda pair: pair[1].step_time_s)
        if each is not candidates[best]
    ]
    prediction = Prediction(
        step_time_s=cost.step_time_s,
        tokens_per_s_per_device=cost.tokens_per_s_per_device,
        mfu=cost.mfu,
        mfu_attention=cost.mfu_attention,
        warnings=(*job.chain.warnings(job.seq_len), *_pressures(job, plan, cost, missed)),
        budget_bytes=job.budget_bytes,
        stages=cost.stages,
        certificate=_certificate(found, best, len(candidates), options.time_limit_s),
        lower_bound_s=found.lower_bound_s,
        profile=job.jobs(plan)[0].cost_source(),
        backend=job.jobs(plan)[0].cluster.device.backend,
        alternatives=tuple(alternatives),
        pools=pool_uses(job, plan, cost.step_time_s, found),
    )
    plan = plan.model_copy(update={"prediction": prediction, "asked": asked_in(options)})
    return replace(result, plan=plan, cost=cost, miss=None)


def _pressures(job: PooledJob, plan: Plan, cost: PlanCost, missed: tuple[int, ...] = ()) -> tuple[str, ...]:
    """The warnings of `pressure`, for each pool that a plan uses."""
    own, found = job.jobs(plan), []
    for place, pool in enumerate(job.pools):
        stages = [stage for stage, each in zip(cost.stages, own, strict=True) if each is pool]
        told = pressure(pool, stages, missed_bytes=missed[place] if missed else 0) if stages else ()
        found += [f"{pool.cluster.name}: {warning}" for warning in told]
    return tuple(found)


def pool_uses(job: PooledJob, plan: Plan, step_time_s: float, found: PooledSearch | None = None) -> tuple[PoolUse, ...]:
    """The pools of a job as a plan uses them; ``found`` says what those it leaves out would have cost."""
    names = plan.cluster.split("+")
    own = job.jobs(plan)
    uses = []
    for name, pool in sorted(
        ((pool.cluster.name, pool) for pool in job.pools),
        key=lambda pair: names.index(pair[0]) if pair[0] in names else len(names),
    ):
        uses.append(
            PoolUse(
                name=name,
                num_devices=pool.cluster.num_devices,
                num_stages=sum(each is pool for each in own),
                budget_bytes=pool.budget_bytes,
                margin_bytes=pool.margin_bytes,
                profile=pool.cost_source(),
                reason=None if name in names or found is None else _why_left_out(name, step_time_s, found),
            )
        )
    return tuple(uses)


def _why_left_out(name: str, step_time_s: float, found: PooledSearch) -> str:
    using = [each.outcome.score_s for each in found.accepted if name in each.plan.cluster.split("+")]
    if not using:
        return f"no plan with it that fits is known; none with it was found below {format_seconds(step_time_s)} a step"
    more = min(using) / step_time_s - 1
    return f"the fastest plan found with it takes {format_seconds(min(using))} a step, {more:.1%} more"


def _described(plan: Plan) -> str:
    """The pools of a plan with their stages: ``4x8xh100-80gb (4 stages), 8x8xa100-40gb (2 stages)``."""
    names = [pool.name for pool in plan.stage_pools()]
    return ", ".join(f"{name} ({format_plural(names.count(name), 'stage')})" for name in dict.fromkeys(names))


def _certificate(found: PooledSearch, best: int, num_simulated: int, time_limit_s: float | None) -> Certificate:
    gap = max(0.0, 1 - found.lower_bound_s / found.accepted[best].outcome.score_s)
    if best > 0:
        return Certificate(status="simulated", gap=gap, num_simulated=num_simulated)
    if found.is_optimal:
        return Certificate(status="optimal", gap=0.0)
    return Certificate(status="gap", gap=gap, time_limit_s=time_limit_s if found.was_cut else None)


def _miss_text(job: PooledJob, found: PooledSearch) -> str:
    miss = found.acceptance.search.nearest_miss
    if miss is None:
        return "a strategy for every layer, but some layer has no legal one"
    return (
        f"{format_bytes(miss.miss_bytes)} more per device: {job.chain.layer_name(miss.layer)} on stage {miss.stage} "
        "binds in the nearest plan found"
    )


def pooled_job_of(
    plan: Plan,
    *,
    cluster: str | None = None,
    network: str | None = None,
    memory: str | None = None,
    profile: GivenProfiles | None = None,
    folder: Path | None = None,
) -> PooledJob:
    """The job that a plan over several pools is for, as `job_of` makes that of one pool.

    Raises `InvalidPlanError` where a pool of the plan is not one of the ``cluster``, and `UserError` where that has one
    pool alone.
    """
    machines = plan.hardware_value() if cluster is None else parse_pools(cluster)
    if not isinstance(machines, MixedCluster):
        raise UserError(
            field="--cluster",
            found=f"{machines.name} for a plan over {plan.cluster}",
            expected="the pools of the plan, or others of the same names",
            hint="leave --cluster out, or plan for this cluster",
        )
    source = plan.prediction.profile if plan.prediction else None
    known = {use.name: use for use in (plan.prediction and plan.prediction.pools) or ()}
    if profile is None and cluster is None:
        measured = {name: use.profile for name, use in known.items() if use.profile.is_measured}
        profile = {name: recorded_profile(each, folder=folder) for name, each in measured.items()}
    job = make_pooled_job(
        plan.chain(),
        machines if network is None else with_network(machines, network),
        global_batch=plan.global_batch,
        seq_len=plan.seq_len,
        precision=plan.precision,
        memory=memory,
        memory_margin=0,
        profile=profile,
        **({} if source is None or source.imbalance is None else {"imbalance": source.imbalance}),
    )
    if cluster is None and memory is None:
        uses = [(pool, known.get(pool.cluster.name)) for pool in job.pools]
        pools = [
            replace(pool, budget_bytes=use.budget_bytes, margin_bytes=use.margin_bytes) if use else pool
            for pool, use in uses
        ]
        job = replace(job, pools=tuple(pools))
    job.jobs(plan)
    return job


def any_job_of(plan: Plan, *, profile: str | None = None, folder: Path | None = None, **given: str | None) -> AnyJob:
    """The job that a plan is for, of one pool or several; as `job_of` and `pooled_job_of`."""
    if not plan.is_mixed:
        return job_of(plan, profile=profile, folder=folder, **given)
    return pooled_job_of(plan, profile=profile, folder=folder, **given)


def not_with_pools(option: str) -> UserError:
    """The mistake of an option that does not go with several pools of devices."""
    return UserError(
        field=option.partition(" ")[0],
        found=f"{option} with several pools of devices",
        expected="a cluster or a plan of one kind of device",
        hint="leave it out, or plan for one of the pools",
    )


def price_pools(plan: Plan, job: PooledJob) -> Plan:
    """The plan with its prediction on several pools, which makes no claim about other plans."""
    cost, first = predict(plan, job), job.jobs(plan)[0]
    prediction = Prediction(
        step_time_s=cost.step_time_s,
        tokens_per_s_per_device=cost.tokens_per_s_per_device,
        mfu=cost.mfu,
        mfu_attention=cost.mfu_attention,
        warnings=(*job.chain.warnings(job.seq_len), *_pressures(job, plan, cost)),
        budget_bytes=job.budget_bytes,
        stages=cost.stages,
        certificate=Certificate(status="priced"),
        lower_bound_s=0.0,
        profile=first.cost_source(),
        backend=first.cluster.device.backend,
        pools=pool_uses(job, plan, cost.step_time_s),
    )
    return plan.model_copy(update={"prediction": prediction})


def with_pool_baselines(plan: Plan, job: PooledJob, options: PlanOptions) -> Plan:
    """The plan with what each pool alone does, and even cuts over all of them, in its prediction."""
    assert plan.prediction is not None, "compared by its prediction"
    rivals = pool_rivals(job, options, plan.prediction.step_time_s)
    found = tuple(Baseline(**{name: getattr(each, name) for name in Baseline.model_fields}) for each in rivals)
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"baselines": found})})


def explain_pools(plan: Plan, job: PooledJob, options: PlanOptions) -> Explanation:
    """What a plan over several pools gains over each of them alone, and over even cuts."""
    step_s = price_pools(plan, job).prediction
    assert step_s is not None, "just priced"
    return Explanation(binds="", rivals=pool_rivals(job, options, step_s.step_time_s))


def pool_rivals(job: PooledJob, options: PlanOptions, step_s: float) -> tuple[Rival, ...]:
    """The best plan on each pool alone, and the best one that cuts all devices into equal stages of equal layers."""
    rivals = []
    for pool in job.pools:
        result = plan_job(pool, replace(options, num_stages=None), top=0)
        rivals.append(_rival(f"{pool.cluster.name} alone", result.plan, result.cost, step_s, result.miss))
    even = even_plan(job, options)
    cost = None if even is None else predict(even, job)
    return (*rivals, _rival("even cuts over all pools", even, cost, step_s, None))


def _rival(name: str, plan: Plan | None, cost: PlanCost | None, step_s: float, miss: NearestMiss | None) -> Rival:
    if plan is None or cost is None:
        return Rival(name=name, missing_bytes=None if miss is None else miss.miss_bytes)
    return Rival(
        name=name,
        step_time_s=cost.step_time_s,
        slowdown=cost.step_time_s / step_s - 1,
        setting=describe(plan.pipeline),
        strategies=summarise(plan),
    )


def even_plan(job: PooledJob, options: PlanOptions) -> Plan | None:
    """The best plan of stages that all have as many devices and as many layers, in the order that the pools are in.

    None where no such plan fits. Its strategies are the best ones for these cuts.
    """
    space, counts = PooledSpace(job, options), [pool.cluster.num_devices for pool in job.pools]
    chosen = range(len(counts))
    even = {tuple(count // size for count in counts) for size in divisors(math.gcd(*counts))}
    settings = [
        each for each in space.settings() if each.placement.pools == tuple(chosen) and each.placement.stages in even
    ]
    bounds = {each: _even_bound_s(space, each) for each in settings}
    best: Accepted | None = None
    for setting in sorted(settings, key=lambda each: bounds[each]):
        if best is not None and bounds[setting] >= best.outcome.score_s:
            break
        found = accept(job, [space.tables(setting)], partition="even").ranked
        if found and (best is None or found[0].outcome.score_s < best.outcome.score_s):
            best = found[0]
    return None if best is None else best.plan


def _even_bound_s(space: PooledSpace, setting: PooledSetting) -> float:
    """What no plan of even cuts of a setting is faster than, by the times of its layers."""
    tables = space.tables(setting)
    cuts = even_boundaries(tables)
    times = [
        np.where(tables.legal_on(stage), tables.time_s, np.inf).min(axis=1)[list(tables.layers[first:end])].sum()
        for stage, (first, end) in enumerate(itertools.pairwise(cuts))
    ]
    if math.isinf(max(times)):
        return math.inf
    return float(sum(times) + (setting.pipeline.num_passes - 1) * max(times)) * (1 - SAME)
