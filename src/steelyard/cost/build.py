"""Builds the tables that a search works on, from a job, for one pipeline setting."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.communication import crossing_s, send_recv_s
from steelyard.cost.compute import compute_time
from steelyard.cost.fold import folded
from steelyard.cost.layer import KnownPasses, layer_seconds, tied_s
from steelyard.cost.layer_load import legal_counts, rank_samples, unmeasured_reason
from steelyard.cost.memory import LayerRows, layer_rows, with_memory
from steelyard.cost.setting import Job, Setting, Settings
from steelyard.cost.switching import Switches
from steelyard.cost.tables import CostTables, SideInput
from steelyard.hardware import Link
from steelyard.plan.strategy import Strategy
from steelyard.schedules import USUAL


class _StageCosts:
    """What every layer kind costs under every strategy on stages of one size, for several numbers of microbatches [M].

    Made when first asked for.
    """

    def __init__(self, settings: Settings, strategies: tuple[Strategy, ...]) -> None:
        self._settings, self.strategies = settings, strategies
        self._kinds, self.counts = settings.job.chain.kinds, settings.num_microbatches.tolist()
        self.legal = np.array([legal_counts(kind, strategies, settings) for kind in self._kinds])
        """[K, S, M]"""
        self._seconds: dict[int, NDArray[np.float64]] = {}

    @cached_property
    def switches(self) -> Switches:
        """Seconds of redistributions."""
        return Switches(self.strategies, self._settings)

    def seconds(self, k: int) -> NDArray[np.float64]:
        """[2, S, M] of a microbatch, and once a step without those of tied matrices."""
        if k in self._seconds:
            return self._seconds[k]
        found = self._seconds[k] = np.zeros((2, *self.legal.shape[1:]))
        known: dict[bytes, tuple[Settings, KnownPasses]] = {}
        for s in np.flatnonzero(self.legal[k].any(axis=1)).tolist():
            legal = self.legal[k, s]
            settings, passes = known.setdefault(legal.tobytes(), (self._settings.select(legal), {}))
            priced = layer_seconds(self._kinds[k], self.strategies[s], settings, passes)
            found[0, s, legal], found[1, s, legal] = priced.microbatch_s, sum(priced.once.values())
        return found


class LayerCosts:
    """Costs of every layer kind under every strategy, those of a kind made when first asked for; as in `CostTables`.

    Of a number of stages and microbatches: what no schedule changes of their tables.
    """

    def __init__(self, setting: Setting, stage: _StageCosts) -> None:
        self._setting, self.stage, self.strategies = setting, stage, stage.strategies
        self._place = stage.counts.index(setting.pipeline.num_microbatches)
        self.legal = np.ascontiguousarray(stage.legal[:, :, self._place])

    @cached_property
    def switch_s(self) -> NDArray[np.float64]:
        """[K, S, S]"""
        return self.stage.switches.table(self._place)

    @cached_property
    def rows(self) -> LayerRows:
        """Bytes of layers."""
        return layer_rows(self._setting, self.strategies, self.legal)

    def time_s(self, kinds: Sequence[int], setting: Setting, *, alike: bool = False) -> NDArray[np.float64]:
        """[len(kinds), S] in a setting: tied matrices alone depend on how far apart its stages are.

        ``alike`` leaves out what copies of a tied matrix take more where they are not all divided alike.
        """
        tied = np.zeros((len(kinds), len(self.strategies)))
        if setting.job.chain.sums_tied:
            for place, kind in enumerate(kinds):
                for s in np.flatnonzero(self.legal[kind]).tolist():
                    seconds = tied_s(setting.job.chain.kinds[kind], self.strategies[s], setting, alike=alike)
                    tied[place, s] = setting.job.time_factor * seconds
        microbatch_s, once_s = np.stack([self.stage.seconds(kind)[:, :, self._place] for kind in kinds], axis=1)
        found: NDArray[np.float64] = microbatch_s + (once_s + tied) / setting.pipeline.num_microbatches
        return found


class KnownCosts:
    """Costs of a job's layers that are known, by ranks of a stage, number of microbatches and whether there are stages.

    Those of all ``counts``, numbers of microbatches that are asked for some time, are priced together.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self._counts = counts
        self.stages: dict[tuple[int, bool], _StageCosts] = {}
        self._layers: dict[tuple[int, bool, int], LayerCosts] = {}

    def of(self, setting: Setting, strategies: tuple[Strategy, ...]) -> LayerCosts:
        """The costs of layers in a setting, those that are known or new ones."""
        size, count = (setting.devices_per_stage, setting.is_piped), setting.pipeline.num_microbatches
        stage = self.stages.get(size)
        if stage is None or stage.strategies != strategies or count not in stage.counts:
            counts = np.array(sorted({*self._counts, count}), dtype=np.int64)
            settings = Settings(job=setting.job, devices_per_stage=size[0], is_piped=size[1], num_microbatches=counts)
            stage = self.stages[size] = _StageCosts(settings, strategies)
        found = self._layers.get((*size, count))
        if found is None or found.strategies != strategies:
            found = self._layers[*size, count] = LayerCosts(setting, stage)
        return found


def build_tables(
    setting: Setting, strategies: tuple[Strategy, ...], known: KnownCosts | None = None, *, pooled: bool = False
) -> CostTables:
    """Costs of every layer kind under every strategy; one that a kind does not allow, or for which measured times do
    not reach, is marked illegal.

    ``known`` saves work between settings of one job. Tables of chunks, and those that are joined with other pools',
    have no side inputs: copies of a tied matrix count there as if they were divided in unlike ways.
    """
    job, pipeline = setting.job, setting.pipeline
    costs = (known or KnownCosts()).of(setting, strategies)
    has_chunks = pipeline.num_chunks > 1
    sides = () if has_chunks or pooled else _tied_inputs(setting, strategies, costs.legal)
    nothing = np.zeros(costs.legal.shape, dtype=np.int64)
    tables = CostTables(
        pipeline=replace(pipeline, num_chunks=1, schedule=USUAL) if has_chunks else pipeline,
        kinds=tuple(kind.name for kind in job.chain.kinds),
        layers=job.chain.layers,
        strategies=strategies,
        legal=costs.legal,
        time_s=costs.time_s(range(len(job.chain.kinds)), setting, alike=bool(sides)),
        static_bytes=nothing,
        activation_bytes=nothing,
        transient_bytes=nothing,
        switch_s=costs.switch_s,
        transfer_s=transfer_s(setting),
        overhead_bytes=0,
        side_inputs=sides,
    )
    tables = with_memory(tables, setting, costs.rows)
    if not has_chunks:
        return tables
    return folded(tables, pipeline, round_trip_s=transfer_s(setting, pipeline.num_stages - 1))


def _tied_inputs(setting: Setting, strategies: tuple[Strategy, ...], legal: NDArray[np.bool_]) -> tuple[SideInput, ...]:
    """What copies of a tied matrix take more where they are not divided alike: each of them gathers its gradient.

    What the first copy gathers is shared between the others, so that for three copies of which two are alike this is
    less than it takes.
    """
    job, chain = setting.job, setting.job.chain
    if not chain.sums_tied or job.execution.keeps_own_buffers:
        return ()
    source, *readers = (layer for layer, _ in chain.shared[0].copies)
    gathering_s = np.zeros(len(strategies))
    for s in np.flatnonzero(legal[[chain.layers[layer] for layer in (source, *readers)]].any(axis=0)).tolist():
        apart_s, alike_s = (tied_s(chain.kind_of(source), strategies[s], setting, alike=each) for each in (False, True))
        gathering_s[s] = job.time_factor * max(0.0, apart_s - alike_s)
    levels = list(dict.fromkeys(strategy.levels for strategy in strategies))
    divided = np.array([levels.index(strategy.levels) for strategy in strategies], dtype=np.int64)
    seconds = np.add.outer(gathering_s / len(readers), gathering_s) * (divided[:, None] != divided)
    return (SideInput(source=source, readers=tuple(readers), seconds=seconds / setting.pipeline.num_microbatches),)


def least_times_s(strategies: Sequence[Strategy], setting: Setting) -> list[float]:
    """[K] seconds of a microbatch in a layer of each kind, at least: what computing it alone takes at its fastest.

    Infinite where no strategy can be.
    """
    ways: dict[tuple[object, ...], Strategy] = {}
    for strategy in strategies:
        if setting.microbatch_samples % strategy.sample_degree == 0:
            shape = frozenset(strategy.shape.items()), strategy.expert_degree
            ways.setdefault((*shape, rank_samples(strategy, setting)), strategy)
    least = []
    job = setting.job
    for kind in job.chain.kinds:
        found = [np.inf]
        for way in ways.values():
            if way.expert_degree > 1 and not kind.num_experts:
                continue
            layer = job.layer(kind.name, way.shape, expert_degree=way.expert_degree, imbalance=1.0)
            if layer is not None and unmeasured_reason(kind, way, setting) is None:
                time = compute_time(layer, rank_samples(way, setting), job)
                found.append(float(time.forward_s + time.backward_s))
        least.append(job.time_factor * min(found))
    return least


def transfer_s(setting: Setting, stages_apart: int = 1) -> float:
    """Seconds to hand a microbatch's activation to another stage and its gradient back, on one rank.

    ``stages_apart`` is 1 for the next stage; interleaved, the last stage hands over to the first.
    The activation is taken to be divided over all ranks of the stage: under tp without sp the runtime sends a copy from
    each tensor-parallel rank, tp times as many bytes, which the tables cannot know before the cut is chosen.
    """
    if setting.pipeline.num_stages == 1:
        return 0.0
    num_bytes = setting.activation_bytes / setting.devices_per_stage
    job = setting.job
    one_way_s = send_recv_s(
        num_bytes,
        distance=stages_apart * setting.devices_per_stage,
        cluster=job.cluster,
        profile=job.profile,
        reached=job.efficiency.links,
    )
    return 2 * job.time_factor * one_way_s


def border_s(before: Setting, after: Setting) -> float:
    """The same over the border of two stages of unlike pools or sizes, whose activation goes in even parts.

    What was measured inside a pool is of other links than those between pools, and serves only where these are unknown.
    """
    sides = [(each.devices_per_stage, _outer_link(each.job), each.job.efficiency.links) for each in (before, after)]
    is_inside = before.job is after.job or any(link.needs_profile for _, link, _ in sides)
    profiles = [before.job.profile, after.job.profile] if is_inside else []
    one_way_s = crossing_s(before.activation_bytes, sides, profiles)
    return 2 * max(before.job.time_factor, after.job.time_factor) * one_way_s


def _outer_link(job: Job) -> Link:
    return job.group.outer_link or job.cluster.inter_link or job.cluster.intra_link


def usable_bytes(job: Job) -> int:
    """The most bytes of tensors that a budget holds with the allocator's slack; of several groups, the most."""
    return max(_usable_bytes(each.budget_bytes, slack_fraction(each)) for each in job.by_group)


def _usable_bytes(budget_bytes: int, slack: float) -> int:
    most = int(budget_bytes / (1 + slack))
    return most + (most + 1 + int(slack * (most + 1)) <= budget_bytes)


def slack_fraction(job: Job) -> float:
    """Reserved over allocated memory minus one, as measured on a GPU; the CPU's allocator keeps nothing."""
    if not job.cluster.device.is_gpu:
        return 0.0
    measured = job.profile.reserved_over_allocated
    return job.execution.reserve if measured is None else measured - 1
