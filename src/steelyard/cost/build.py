"""Builder of the cost tables that the search uses, from a job and one pipeline configuration."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.communication import crossing_s, send_recv_s
from steelyard.cost.compute import compute_time
from steelyard.cost.context import slack_fraction
from steelyard.cost.fold import folded
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer import KnownPasses, layer_costs, tied_s, weight_pass_s
from steelyard.cost.layer_load import legal_counts, rank_samples, unmeasured_reason
from steelyard.cost.memory import LayerRows, layer_rows, with_memory
from steelyard.cost.switching import Switches
from steelyard.cost.tables import CostTables, CrossLayerInput
from steelyard.plan.dimensions.dimension import Levels
from steelyard.plan.strategy import Strategy
from steelyard.schedules import USUAL


class _StageCosts:
    """Costs of every layer type under every strategy on stages of one size, for M numbers of microbatches.

    Computed on first use.
    """

    def __init__(self, config: JobConfig, strategies: tuple[Strategy, ...]) -> None:
        self._config, self.strategies = config, strategies
        self._layer_types, self.counts = config.job.chain.layer_types, config.counts
        self.legal = np.array([legal_counts(layer_type, strategies, config) for layer_type in self._layer_types])
        """[K, S, M]"""
        self._seconds: dict[int, NDArray[np.float64]] = {}
        self._tied: dict[tuple[int, int, bool], NDArray[np.float64]] = {}

    @cached_property
    def switches(self) -> Switches:
        """Seconds of redistributions."""
        return Switches(self.strategies, self._config)

    def tied_s(self, k: int, config: JobConfig, *, alike: bool = False) -> NDArray[np.float64]:
        """Seconds [S] per step of summing the gradients of a tied matrix, as in `tied_s`."""
        key = k, config.pipeline.num_stages, alike
        if key not in self._tied:
            of_levels: dict[Levels, float] = {}
            for s in np.flatnonzero(self.legal[k].any(axis=1)).tolist():
                levels = self.strategies[s].levels
                if levels not in of_levels:
                    seconds = tied_s(self._layer_types[k], self.strategies[s], config, alike=alike)
                    of_levels[levels] = config.job.time_factor * seconds
            self._tied[key] = np.array([of_levels.get(each.levels, 0.0) for each in self.strategies])
        return self._tied[key]

    def seconds(self, k: int) -> NDArray[np.float64]:
        """Seconds [2, S, M] per microbatch, and once per step without tied matrices."""
        if k in self._seconds:
            return self._seconds[k]
        found = self._seconds[k] = np.zeros((2, *self.legal.shape[1:]))
        known: dict[bytes, tuple[JobConfig, KnownPasses]] = {}
        sizes = [(each.sample_degree, each.token_degree, *each.shape.items()) for each in self.strategies]
        of_size: dict[tuple[object, ...], NDArray[np.bool_]] = {}
        for size, mine in zip(sizes, self.legal[k], strict=True):
            of_size[size] = mine | of_size.get(size, False)  # some are priced at illegal counts, to share their prices
        for s in np.flatnonzero(self.legal[k].any(axis=1)).tolist():
            legal = of_size[sizes[s]]
            if legal.tobytes() not in known:
                some = replace(self._config, counts=tuple(itertools.compress(self.counts, legal)))
                known[legal.tobytes()] = some, {}
            priced = layer_costs(self._layer_types[k], self.strategies[s], *known[legal.tobytes()])
            found[0, s, legal], found[1, s, legal] = priced.microbatch_s, sum(priced.once_s.values())
        return found


class LayerCosts:
    """Costs of every layer type under every strategy, as in `CostTables`; those of a type are computed on first use.

    For one number of stages and microbatches: the part of their tables that does not depend on the schedule.
    """

    def __init__(self, config: JobConfig, stage: _StageCosts) -> None:
        self._config, self.stage, self.strategies = config, stage, stage.strategies
        self._place = stage.counts.index(config.pipeline.num_microbatches)
        self.legal = np.ascontiguousarray(stage.legal[:, :, self._place])

    @cached_property
    def switch_s(self) -> NDArray[np.float64]:
        """[K, D, D]"""
        return self.stage.switches.table(self._place)

    @cached_property
    def rows(self) -> LayerRows:
        """Bytes of layers, as counted within `usable_bytes`."""
        possible = np.logical_or.reduce(self.stage.legal, axis=2)
        return layer_rows(self._config, self.strategies, self.legal, possible).counted(self._config.job)

    def time_s(self, layer_types: Sequence[int], config: JobConfig, *, alike: bool = False) -> NDArray[np.float64]:
        """Seconds [len(layer_types), S] in a configuration: only tied matrices depend on the distance of its stages.

        ``alike`` excludes the extra cost of a tied matrix whose copies are sharded differently.
        """
        tied = np.zeros((len(layer_types), len(self.strategies)))
        if config.job.chain.sums_tied:
            for place, layer_type in enumerate(layer_types):
                tied[place] = self.legal[layer_type] * self.stage.tied_s(layer_type, config, alike=alike)
        microbatch_s, once_s = np.stack(
            [self.stage.seconds(layer_type)[:, :, self._place] for layer_type in layer_types], axis=1
        )
        found: NDArray[np.float64] = microbatch_s + (once_s + tied) / config.pipeline.num_microbatches
        return found


class KnownCosts:
    """Cache of a job's layer costs by ranks per stage, number of microbatches and whether there are several stages.

    All ``counts``, the numbers of microbatches that will be needed, are priced together.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self._counts = counts
        self.stages: dict[tuple[int, bool], _StageCosts] = {}
        self._layers: dict[tuple[int, bool, int], LayerCosts] = {}

    def of(self, config: JobConfig, strategies: tuple[Strategy, ...]) -> LayerCosts:
        """Return the costs of layers in a configuration, cached or new."""
        size, count = (config.devices_per_stage, config.is_piped), config.pipeline.num_microbatches
        stage = self.stages.get(size)
        if stage is None or stage.strategies != strategies or count not in stage.counts:
            several = replace(config, counts=tuple(sorted({*self._counts, count})))
            stage = self.stages[size] = _StageCosts(several, strategies)
        found = self._layers.get((*size, count))
        if found is None or found.strategies != strategies:
            found = self._layers[*size, count] = LayerCosts(config, stage)
        return found


def build_tables(
    config: JobConfig, strategies: tuple[Strategy, ...], known: KnownCosts | None = None, *, pooled: bool = False
) -> CostTables:
    """Build the costs of every layer type under every strategy.

    A strategy is marked illegal if the layer type does not allow it or measured times do not cover it. ``known`` is a
    cache for several configurations of one job. Tables with chunks, and tables of several device groups, have no
    cross-layer inputs: copies of a tied matrix are assumed to be sharded differently.
    """
    job, pipeline = config.job, config.pipeline
    costs = (known or KnownCosts()).of(config, strategies)
    has_chunks = pipeline.num_chunks > 1
    sides = () if has_chunks or pooled else _tied_inputs(config, costs)
    nothing = np.zeros(costs.legal.shape, dtype=np.int64)
    tables = CostTables(
        pipeline=replace(pipeline, num_chunks=1, schedule=USUAL) if has_chunks else pipeline,
        layer_types=tuple(layer_type.name for layer_type in job.chain.layer_types),
        layers=job.chain.layers,
        strategies=strategies,
        legal=costs.legal,
        time_s=costs.time_s(range(len(job.chain.layer_types)), config, alike=bool(sides)),
        static_bytes=nothing,
        activation_bytes=nothing,
        transient_bytes=nothing,
        switch_s=costs.switch_s,
        layouts=costs.stage.switches.layouts,
        transfer_s=transfer_s(config),
        overhead_bytes=0,
        cross_layer_inputs=sides,
    )
    tables = with_memory(tables, config, costs.rows)
    if not has_chunks:
        return tables
    round_trip_s = 0.0 if pipeline.is_v else transfer_s(config, pipeline.num_stages - 1)
    return folded(tables, pipeline, round_trip_s=round_trip_s, fill=_fill(tables, config))


def _fill(tables: CostTables, config: JobConfig) -> float:
    """Minimum fraction of a block's pass that fills and drains the pipeline, over all strategies (`CostTables.fill`).

    Weight passes of the last stages run without waiting while the first stages finish: of a pass of t seconds with a
    weight pass of w, t - 2 w remain.
    """
    shares = [1.0]
    for row, layer_type in enumerate(config.job.chain.layer_types):
        for column in np.flatnonzero(tables.legal[row]) if config.pipeline.schedule.splits_backward else ():
            weight_s = weight_pass_s(layer_type, tables.strategies[column], config)
            shares.append(float(1 - 2 * weight_s / tables.time_s[row, column]) if weight_s else 1.0)
    return min(shares)


def _tied_inputs(config: JobConfig, costs: LayerCosts) -> tuple[CrossLayerInput, ...]:
    """Extra cost of a tied matrix whose copies are sharded differently: each copy gathers its gradient.

    The gather of the first copy is split between the others, so the cost of three copies of which two are sharded
    identically is underestimated.
    """
    job, chain = config.job, config.job.chain
    if not chain.sums_tied or job.execution.keeps_own_buffers:
        return ()
    source, *readers = (layer for layer, _ in chain.shared[0].copies)
    of_source = partial(costs.stage.tied_s, chain.layers[source], config)
    legal = costs.legal[[chain.layers[layer] for layer in (source, *readers)]].any(axis=0)
    gathering_s = np.where(legal, np.maximum(0.0, of_source(alike=False) - of_source(alike=True)), 0.0)
    places: dict[Levels, int] = {}
    divided = np.array([places.setdefault(each.levels, len(places)) for each in costs.strategies], dtype=np.int64)
    seconds = np.add.outer(gathering_s / len(readers), gathering_s) * (divided[:, None] != divided)
    return (CrossLayerInput(source=source, readers=tuple(readers), seconds=seconds / config.pipeline.num_microbatches),)


def least_times_s(strategies: Sequence[Strategy], config: JobConfig) -> list[float]:
    """Lower bounds [K] on the seconds of a microbatch in a layer of each type: its computation alone at its fastest.

    Infinite if no strategy is possible.
    """
    ways: dict[tuple[object, ...], Strategy] = {}
    for strategy in strategies:
        if config.microbatch_samples % strategy.sample_degree == 0:
            shape = frozenset(strategy.shape.items()), strategy.expert_degree
            ways.setdefault((*shape, rank_samples(strategy, config.microbatch_samples)), strategy)
    least = []
    job = config.job
    for layer_type in job.chain.layer_types:
        found = [np.inf]
        for way in ways.values():
            if way.expert_degree > 1 and not layer_type.num_experts:
                continue
            layer = job.layer(layer_type.name, way.shape, expert_degree=way.expert_degree, imbalance=1.0)
            if layer is not None and unmeasured_reason(layer_type, way, config) is None:
                time = compute_time(layer, rank_samples(way, config.microbatch_samples), job)
                found.append(float(time.forward_s + time.backward_s))
        least.append(job.time_factor * min(found))
    return least


def transfer_s(config: JobConfig, stages_apart: int = 1) -> float:
    """Seconds to hand a microbatch's activation to another stage and its gradient back, on one rank.

    ``stages_apart`` is 1 for the next stage; in interleaved schedules the last stage also sends to the first.
    The activation is assumed to be divided over all ranks of the stage. Under tp without sp the runtime sends a copy
    from each tensor-parallel rank, tp times as many bytes, which is unknown before the stage boundary is chosen.
    """
    if config.pipeline.num_stages == 1:
        return 0.0
    num_bytes = config.activation_bytes / config.devices_per_stage
    job = config.job
    one_way_s = send_recv_s(
        num_bytes,
        distance=stages_apart * config.devices_per_stage,
        cluster=job.cluster,
        profile=job.profile,
        reached=job.efficiency.links,
    )
    return 2 * job.time_factor * one_way_s


def border_s(before: JobConfig, after: JobConfig) -> float:
    """Seconds as in `transfer_s` between stages of different device groups or sizes, with activations in even parts.

    Measurements inside a device group are of other links than those between groups and are used only if the latter are
    unknown.
    """
    sides = []
    for each in (before, after):
        cluster = each.job.cluster
        link = each.job.group.outer_link or cluster.inter_link or cluster.intra_link
        sides.append((each.devices_per_stage, link, cluster.devices_per_node, each.job.efficiency.links))
    is_inside = before.job is after.job or any(link.needs_profile for _, link, _, _ in sides)
    profiles = [before.job.profile, after.job.profile] if is_inside else []
    one_way_s = crossing_s(before.activation_bytes, sides, profiles)
    return 2 * max(before.job.time_factor, after.job.time_factor) * one_way_s


def usable_bytes(job: Job) -> int:
    """Maximum bytes of tensors within the budget after the allocator's slack; the largest over several groups."""
    found = []
    for each in job.by_group:
        slack = slack_fraction(each)
        most = int(each.budget_bytes / (1 + slack))
        found.append(most + (most + 1 + int(slack * (most + 1)) <= each.budget_bytes))
    return max(found)
