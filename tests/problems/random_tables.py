"""Random small cost tables, with deliberate zeros, ties, illegal strategies, switch classes, infeasible budgets."""

from dataclasses import replace

import numpy as np

from steelyard.cost.tables import CostTables, Received
from steelyard.plan.dimensions import DP
from steelyard.plan.dimensions.dimension import Level
from steelyard.plan.strategy import Strategy
from tests.schedules.examples import pipeline


def placeholder_strategies(count: int) -> tuple[Strategy, ...]:
    """Distinct strategies to label columns; the search never looks inside them."""
    return tuple(Strategy(levels=(Level(dimension=DP, degree=degree + 2),)) for degree in range(count))


def random_tables(
    rng: np.random.Generator,
    *,
    num_layers: int | None = None,
    num_types: int | None = None,
    num_strategies: int | None = None,
    num_stages: int | None = None,
    max_plans: int = 3000,
    interleaved: bool = False,
    frees: bool = False,
) -> CostTables:
    """Tables of at most about ``max_plans`` plans, in one of several styles drawn at random.

    With ``frees`` layers free what they hold, leave buffers, are others at the end of a stage, and receive.
    """
    layer_types = num_types or int(rng.integers(1, 4))
    strategies = num_strategies or int(rng.integers(1, 5))
    stages = num_stages or int(rng.integers(1, 4))
    most_layers = max(stages, int(np.log(max_plans) / np.log(max(strategies, 2))))
    layers = num_layers or int(rng.integers(stages, most_layers + 1))
    pair = (layer_types, strategies)
    whole = bool(rng.integers(2))  # whole seconds make ties
    scale = int(rng.choice([1, 3, 10, 1000]))

    def seconds(shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 6, shape).astype(np.float64) if whole else rng.exponential(1.0, shape)

    def num_bytes(shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 8, shape) * scale

    legal = rng.random(pair) < rng.choice([1.0, 0.8])
    groups = rng.integers(0, int(rng.integers(1, strategies + 1)), strategies)
    per_group = seconds((layer_types, strategies, strategies)) * rng.choice([0.0, 0.3, 1.0])
    switch = per_group[:, groups][:, :, groups] * (groups[:, None] != groups[None, :])
    if rng.random() < 0.3:
        switch = seconds((layer_types, strategies, strategies))  # no classes, no triangle inequality, own switches cost
    schedule = "gpipe" if rng.random() < 0.5 else "1f1b"
    microbatches, chunks = int(rng.choice([1, 2, 3, 8])), 1
    if interleaved and stages > 1:
        schedule, microbatches, chunks = "interleaved-1f1b", stages * int(rng.integers(1, 4)), int(rng.integers(2, 5))
    tables = CostTables(
        pipeline=pipeline(stages, microbatches, schedule, chunks),
        layer_types=tuple(f"layer type{index}" for index in range(layer_types)),
        layers=tuple(int(layer_type) for layer_type in rng.integers(0, layer_types, layers)),
        strategies=placeholder_strategies(strategies),
        legal=legal,
        time_s=seconds(pair),
        static_bytes=num_bytes(pair),
        activation_bytes=num_bytes(pair) * rng.integers(0, 2),
        transient_bytes=num_bytes(pair) * rng.integers(0, 4),
        switch_s=switch,
        transfer_s=float(rng.choice([0.0, 0.5])),
        overhead_bytes=int(rng.integers(0, 3)),
    )
    return freeing(rng, tables, scale) if frees else tables


def freeing(rng: np.random.Generator, tables: CostTables, scale: int) -> CostTables:
    """The tables with bytes that are freed, left and received."""
    shape = tables.legal.shape

    def freed(static: np.ndarray, activation: np.ndarray) -> np.ndarray:
        most = static + activation
        return (most * rng.random(shape)).astype(np.int64) - scale * rng.integers(0, 3, shape) * rng.integers(0, 2)

    def sized(most: int) -> np.ndarray:
        return rng.integers(0, most, shape) * scale

    static, activation, count = sized(8), sized(3), len(tables.strategies)
    several = replace(
        tables,
        freed_bytes=freed(tables.static_bytes, tables.activation_bytes),
        buffers=np.stack([sized(3) * int(rng.integers(0, 2)) for _ in range(3)]),
        repeats=bool(rng.integers(2)),
        stage_overheads=tuple(int(each) for each in rng.integers(0, 3, tables.pipeline.num_stages)),
        received=Received(
            hidden_bytes=rng.integers(0, 4, count) * scale,
            layouts=rng.integers(0, 2, count),
            kept=tuple(int(each) for each in rng.integers(0, 3, tables.pipeline.num_stages)),
            is_apart=np.zeros((count, count), dtype=bool),
        ),
    )
    if rng.random() < 0.2:
        return several
    return several.with_last_types(
        static_bytes=static,
        activation_bytes=activation,
        freed_bytes=freed(static, activation),
        transient_bytes=sized(8),
    )


def random_budget(rng: np.random.Generator, plans: list[tuple[float, int]]) -> int:
    """A budget near the bytes of some plan, so that about one in ten is infeasible and the rest bind."""
    if not plans:
        return int(rng.integers(0, 50))
    sizes = sorted(num_bytes for _, num_bytes in plans)
    return int(sizes[int(rng.integers(0, max(1, len(sizes) // 3)))]) - int(rng.random() < 0.15)
