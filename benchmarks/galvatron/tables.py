"""The published rules as our cost tables, and the published names of strategies and plans.

Three forms, all with the bubble inside the times of the layers and hence one microbatch:

- `stage_tables`: one stage with given layers. What it costs is exact under the published rules.
- `even_tables`: a pipeline of equal stages of equal layers, described by one of them with times and switches p-fold.
- `uneven_tables`: a pipeline of unlike stages, whose cuts are free. What is held besides the layers is charged to the
  first and the last layer. Here a switch between two stages is paid like any other, which the published rules leave
  out; `cuts` finds the optimum without.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from galvatron.inputs import Layer
from galvatron.rules import MB, Point, layer_mb, layer_s, other_mb, switch_s
from steelyard.cost.tables import CostTables
from steelyard.plan.dimensions import DP, FSDP, TP
from steelyard.plan.dimensions.dimension import Level
from steelyard.plan.strategy import Remat, Strategy
from steelyard.schedules import PipelineConfig
from steelyard.schedules.gpipe import GPIPE
from steelyard.search import SpaceOptions, enumerate_strategies

Space = Literal["full", "dp+pp", "dp+tp"]
SPACES: tuple[Space, ...] = ("dp+pp", "dp+tp", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerType:
    """A layer and what its stage holds besides, if this layer is the one that stands for it."""

    layer: Layer
    other_mb: float = 0.0
    place: str = ""

    @property
    def name(self) -> str:
        return self.layer.name + self.place


def strategies_of(point: Point, space: Space) -> tuple[Strategy, ...]:
    """The strategies of one stage in a space of the published table."""
    options = SpaceOptions(modes={"zero": (3,), "sp": (False,)}, remats=(Remat.NONE,))
    return tuple(
        each
        for each in enumerate_strategies(point.num_devices, options)
        if space == "full" or (each.state_shards == 1 and (space == "dp+tp" or each.tensor_degree == 1))
    )


def degrees_of(num_gpus: int, space: Space) -> tuple[int, ...]:
    """Pipeline degrees of a space."""
    return (1,) if space == "dp+tp" else tuple(2**power for power in range(num_gpus.bit_length()))


def stage_tables(point: Point, layers: Sequence[Layer], held_mb: float, space: Space) -> CostTables:
    """One stage of these layers, which holds so much besides them."""
    layer_types = [_LayerType(layer=layer) for layer in layers]
    return _tables(point, layer_types, strategies_of(point, space), num_stages=1, overhead_mb=held_mb)


def even_tables(point: Point, space: Space) -> CostTables:
    """A pipeline of equal stages, described by one of them."""
    stages = point.num_stages
    layer_types = [_LayerType(layer=layer) for layer in point.inputs.layers[: len(point.inputs.layers) // stages]]
    held = max(other_mb(point))
    return _tables(point, layer_types, strategies_of(point, space), num_stages=1, overhead_mb=held, times=stages)


def uneven_tables(point: Point, space: Space) -> CostTables:
    """A pipeline whose cuts are free; a switch between two stages is paid like any other."""
    held = other_mb(point)
    shared = math.ceil(min(held))
    layer_types = [_LayerType(layer=layer) for layer in point.inputs.layers]
    layer_types[0] = _LayerType(layer=layer_types[0].layer, other_mb=held[0] - shared, place=", first")
    if len(held) > 1:
        layer_types[-1] = _LayerType(layer=layer_types[-1].layer, other_mb=held[-1] - shared, place=", last")
    return _tables(point, layer_types, strategies_of(point, space), num_stages=point.num_stages, overhead_mb=shared)


def _tables(
    point: Point,
    layers: Sequence[_LayerType],
    strategies: tuple[Strategy, ...],
    *,
    num_stages: int,
    overhead_mb: float,
    times: int = 1,
) -> CostTables:
    layer_types = {layer_type.name: layer_type for layer_type in layers}
    names = tuple(layer_types)
    legal = np.array(
        [[each.tensor_degree in layer_type.layer.act_mb for each in strategies] for layer_type in layer_types.values()]
    )
    seconds = np.array(
        [[layer_s(point, layer_type.layer, each) for each in strategies] for layer_type in layer_types.values()]
    )
    held = np.array(
        [
            [
                _whole_mb(point, layer_type, each) * MB if each.tensor_degree in layer_type.layer.act_mb else 0
                for each in strategies
            ]
            for layer_type in layer_types.values()
        ],
        dtype=np.int64,
    )
    switches = np.array([[switch_s(point, before, after) for after in strategies] for before in strategies])
    return CostTables(
        pipeline=PipelineConfig(num_stages=num_stages, num_microbatches=1, schedule=GPIPE),
        layer_types=names,
        layers=tuple(names.index(layer_type.name) for layer_type in layers),
        strategies=strategies,
        legal=legal,
        time_s=times * seconds,
        static_bytes=held,
        activation_bytes=np.zeros_like(held),
        transient_bytes=np.zeros_like(held),
        switch_s=times * np.repeat(switches[None], len(layer_types), axis=0),
        transfer_s=0.0,
        overhead_bytes=math.ceil(overhead_mb) * MB,
    )


def _whole_mb(point: Point, layer_type: _LayerType, strategy: Strategy) -> int:
    return math.ceil(layer_mb(point, layer_type.layer, strategy)) + math.ceil(layer_type.other_mb)


def parse_strategy_name(name: str) -> tuple[int, Strategy]:
    """Pipeline degree and strategy of a name such as ``2-2*-2f``: the star marks the level on neighbouring ranks."""
    stages, tp, data = name.split("-")
    dimension = FSDP if "f" in data else DP
    pairs = [(TP, int(tp.strip("*"))), (dimension, int(data.strip("f*")))]
    ordered = reversed(pairs) if "*" in tp else pairs
    return int(stages), Strategy(levels=tuple(Level(dimension=k, degree=n) for k, n in ordered if n > 1))


def strategy_name(num_stages: int, strategy: Strategy) -> str:
    """The published name of a strategy."""
    is_mixed = len(strategy.levels) > 1
    is_tp_inner = is_mixed and strategy.levels[-1].dimension is TP
    tp = f"{strategy.degree(TP)}{'*' * is_tp_inner}"
    data = f"{strategy.data_degree}{'f' * (strategy.degree(FSDP) > 1)}{'*' * (is_mixed and not is_tp_inner)}"
    return f"{num_stages}-{tp}-{data}"


def parse_plan(text: str) -> tuple[tuple[Strategy, ...], ...]:
    """The strategies of each stage that the published table lists; one stage stands for all where they are alike."""
    return tuple(
        tuple(
            strategy
            for run in stage.split()
            for name, _, count in [run.partition("x")]
            for strategy in (parse_strategy_name(name)[1],) * int(count)
        )
        for stage in text.split("||")
    )


def plan_text(num_stages: int, stages: Sequence[Sequence[Strategy]]) -> str:
    """The plan as the published table writes it."""
    return " || ".join(
        " ".join(f"{strategy_name(num_stages, each)}x{len(list(run))}" for each, run in groupby(stage))
        for stage in stages
    )
