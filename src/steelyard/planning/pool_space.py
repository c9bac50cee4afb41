"""The pipelines over unlike pools of devices that a search may choose from, and what no plan of each is faster than.

Every order of every choice of pools, every number of stages that divides each pool, every number of microbatches and
schedule is a pipeline setting of its own, with the tables of its pools side by side (`steelyard.cost.pools`). There
are thousands, so the bounds of a setting are made one after another, the sharper ones from what was made for others,
and its tables only when it may still be the best.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
from steelyard.cost.memory import context_bytes
from steelyard.cost.pools import Placement, PooledJob, pooled_tables
from steelyard.cost.setting import Setting
from steelyard.cost.tables import CostTables
from steelyard.model.chain import LayerRole
from steelyard.plan.decisions import Decisions
from steelyard.plan.strategy import Strategy, divisors
from steelyard.planning.problem import microbatch_counts, pipeline_settings, stage_strategies
from steelyard.schedules import SCHEDULES, USUAL, PipelineConfig
from steelyard.search.pool_bounds import (
    PoolRuns,
    PricedLayers,
    least_slowest_s,
    least_step_s,
    missing_bytes,
    priced_layers,
)
from steelyard.units import format_plural

LEVELS = 3
"""Bounds of a setting beyond that by what computing takes: by its times, by its memory, and by whole cuts."""
TINY_S = 1e-9
"""What a stage takes at least where nothing is known."""
SAME = 1e-9
"""Times that differ by no more than this fraction are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSetting:
    """A pipeline over some of the pools, and what no plan of it is faster than by what computing takes alone."""

    placement: Placement
    pipeline: PipelineConfig
    bound_s: float


class PooledSpace:
    """All settings of a job on several pools, and their tables, made when they are asked for."""

    def __init__(self, job: PooledJob, decisions: Decisions) -> None:
        self._job, self._decisions = job, decisions
        counts = microbatch_counts(job.global_batch)
        self._known = [KnownCosts(counts) for _ in job.pools]
        self._offered: dict[tuple[int, int], tuple[Strategy, ...]] = {}
        self._stage_layers: dict[tuple[int, int, int, int, bool], _StageLayers] = {}
        self._known_runs: dict[tuple[int, ...], PoolRuns] = {}
        self._made: dict[tuple[Placement, PipelineConfig], CostTables] = {}
        self._counts = np.bincount(job.chain.layers, minlength=len(job.chain.kinds)).tolist()
        self._computed: dict[tuple[int, int, int], tuple[list[float], PricedLayers]] = {}

    @property
    def asked_stages(self) -> str:
        """What a pipeline must have to be searched: `` of 2 stages``; empty where any number will do."""
        count = self._decisions.num_stages
        return "" if count is None else f" of {format_plural(count, 'stage')}"

    def settings(self) -> list[PooledSetting]:
        """Every setting that can run, of each order of its pools the first, bounded by what computing takes alone."""
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
        return slowest_s if math.isinf(slowest_s) else self._bound_within_s(setting, slowest_s, are_made=level == 2)

    def tables(self, setting: PooledSetting) -> CostTables:
        """The cost tables of a setting."""
        key = setting.placement, setting.pipeline
        if key not in self._made:
            sizes = setting.placement.sizes(self._job)
            offered = [self._strategies(*each) for each in zip(setting.placement.pools, sizes, strict=True)]
            known = [self._known[pool] for pool in setting.placement.pools]
            self._made[key] = pooled_tables(self._job, *key, offered, known)
        return self._made[key]

    def _bound_within_s(self, setting: PooledSetting, slowest_s: float, *, are_made: bool) -> float:
        pipeline, stages = setting.pipeline, self._stages(setting, are_made=are_made)
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
        apart = pipeline.num_stages if job.chain.sums_tied else 0
        count, flights = pipeline.num_microbatches, map(pipeline.in_flight, range(pipeline.num_stages))
        key = pool, size, apart, count, min(pipeline.num_stages, 2), count in flights
        if key not in self._known_runs:
            setting = Setting(job=job, pipeline=pipeline, stage_size=size)
            tables = build_tables(setting, self._strategies(pool, size), self._known[pool], pooled=True)
            self._known_runs[key] = PoolRuns(tables, usable_bytes(job))
        return self._known_runs[key]

    def _stages(self, setting: PooledSetting, *, are_made: bool = False) -> list["_StageLayers"]:
        """``are_made`` where the tables of the stages are known, or may as well be."""
        placement, pipeline = setting.placement, _without_chunks(setting.pipeline)
        pools = zip(placement.pools, placement.sizes(self._job), placement.stages, strict=True)
        return [each for pool, size, count in pools for each in [self._layers(pool, size, pipeline, are_made)] * count]

    def _alone(self) -> Iterator[PooledSetting]:
        for pool, job in enumerate(self._job.pools):
            if job.cluster.num_devices % (self._decisions.num_stages or 1):
                continue
            for setting in pipeline_settings(job, self._decisions):
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
        decisions = self._decisions
        if decisions.num_stages not in (None, num_stages):
            return
        for count in microbatch_counts(self._job.global_batch):
            if decisions.num_microbatches not in (None, count):
                continue
            for schedule in SCHEDULES.values():
                if schedule.takes_chunks or schedule.name not in decisions.allowed_schedules:
                    continue
                pipeline = PipelineConfig(num_stages=num_stages, num_microbatches=count, schedule=schedule)
                if schedule.refusal(pipeline) is None and schedule.is_tried(pipeline):
                    yield pipeline

    def _with_bound(self, placement: Placement, pipeline: PipelineConfig) -> PooledSetting:
        setting = PooledSetting(placement=placement, pipeline=pipeline, bound_s=0.0)
        pools = zip(placement.pools, placement.sizes(self._job), placement.stages, strict=True)
        priced = [each for pool, size, count in pools for each in [self._compute(pool, size, pipeline)[1]] * count]
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
        passes = setting.pipeline.num_passes
        layers = self._job.chain.layers
        ends = (layers[0], layers[-1]) if rooms is not None and setting.pipeline.num_chunks == 1 else None
        found = least_step_s(stages, self._counts, handed, passes, rooms, slowest_s, ends)
        return found / setting.pipeline.num_chunks * (1 - SAME)

    def _handed_s(self, setting: PooledSetting, transfers: Sequence[float]) -> list[float]:
        """What each stage takes for handing over; between pools, and between chunks, that counts for nothing."""
        chunks, borders = setting.pipeline.num_chunks, {0, *itertools.accumulate(setting.placement.stages)}
        return [0.0 if chunks > 1 or stage in borders else each for stage, each in enumerate(transfers)]

    def _compute(self, pool: int, size: int, pipeline: PipelineConfig) -> tuple[list[float], PricedLayers]:
        """What computing alone takes on stages of a size: by kind, and of all layers."""
        key = pool, size, pipeline.num_microbatches
        if key not in self._computed:
            setting = Setting(job=self._job.pools[pool], pipeline=_without_chunks(pipeline), stage_size=size)
            times_s = least_times_s(self._strategies(pool, size), setting)
            self._computed[key] = times_s, PricedLayers.unpriced(times_s, self._counts)
        return self._computed[key]

    def _layers(self, pool: int, size: int, pipeline: PipelineConfig, are_made: bool) -> "_StageLayers":
        stages = pipeline.num_stages if self._job.chain.sums_tied else min(pipeline.num_stages, 2)
        key = pool, size, pipeline.num_microbatches, stages, are_made
        if key not in self._stage_layers:
            setting = Setting(job=self._job.pools[pool], pipeline=pipeline, stage_size=size)
            costs = self._known[pool].of(setting, self._strategies(pool, size))
            kinds = self._job.chain.kinds
            made = [place for place, kind in enumerate(kinds) if are_made or kind.role is LayerRole.BLOCK]
            least_s, _ = self._compute(pool, size, pipeline)
            time_s = np.repeat(np.array(least_s)[:, None], costs.legal.shape[1], axis=1)
            time_s[made] = costs.time_s(made, setting)
            self._stage_layers[key] = _StageLayers(setting=setting, costs=costs, time_s=time_s, counts=self._counts)
        return self._stage_layers[key]

    def _strategies(self, pool: int, size: int) -> tuple[Strategy, ...]:
        if (pool, size) not in self._offered:
            self._offered[pool, size] = stage_strategies(self._job.pools[pool], size, self._decisions)
        return self._offered[pool, size]


def _without_chunks(pipeline: PipelineConfig) -> PipelineConfig:
    return replace(pipeline, num_chunks=1, schedule=USUAL)


class _StageLayers:
    """What the layers take on stages of one size of one pool, with one number of microbatches.

    ``time_s`` [K, S] is what they take at least: of those that are no blocks, which are few, it may be what computing
    takes at its fastest.
    """

    def __init__(
        self,
        *,
        setting: Setting,
        costs: LayerCosts,
        time_s: NDArray[np.float64],
        counts: Sequence[int],
    ) -> None:
        self._costs, self._time_s = costs, time_s
        self._within: dict[tuple[int, bool], PricedLayers] = {}
        self.transfer_s = transfer_s(setting)
        self.fastest = priced_layers(costs.legal, time_s, np.zeros(costs.legal.shape, dtype=np.int64), counts)
        """By their times alone."""
        self.room_bytes = usable_bytes(setting.job) - context_bytes(setting)

    def within(self, in_flight: int, counts: Sequence[int], *, has_gradients: bool) -> PricedLayers:
        """With the bytes that they hold with so many microbatches in flight, at least."""
        key = in_flight, has_gradients
        if key not in self._within:
            costs = self._costs
            terms = costs.rows.terms
            num_bytes = terms[[0, 2, 3, 4]].sum(axis=0) + in_flight * terms[5] + has_gradients * terms[1]
            self._within[key] = priced_layers(costs.legal, self._time_s, num_bytes, counts)
        return self._within[key]


def _choices(count: int) -> Iterator[tuple[int, ...]]:
    """Every choice of two pools or more."""
    for size in range(2, count + 1):
        yield from itertools.combinations(range(count), size)
