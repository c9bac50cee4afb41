"""Tests of medium problems (8 to 16 layers, 6 to 8 strategies) against HiGHS, which proves its answer."""

from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.search import partition_exact
from tests.oracles import exhaustive, milp
from tests.problems.random_tables import random_budget, random_tables
from tests.sample import sampled

GIB = 1024**3


def medium_tables(seed: int, *, num_stages: int, num_layers: int, num_strategies: int) -> tuple[CostTables, int]:
    """Layers of different types, where faster strategies need more memory, and a budget below the fastest plan's
    memory."""
    rng = np.random.default_rng(seed)
    pair = (num_layers, num_strategies)
    tables = random_tables(
        rng, num_layers=num_layers, num_types=num_layers, num_strategies=num_strategies, num_stages=num_stages
    )
    pace = rng.uniform(0.5, 2.0, pair)
    size = rng.uniform(0.5, 1.5, (num_layers, 1))
    groups = rng.integers(0, 4, num_strategies)
    tables = replace(
        tables,
        pipeline=replace(tables.pipeline, num_microbatches=int(rng.integers(1, 9))),
        layers=tuple(range(num_layers)),
        legal=rng.random(pair) < 0.9,
        time_s=size * pace,
        static_bytes=(GIB * size / pace**1.5).astype(np.int64),
        activation_bytes=(0.2 * GIB * size * rng.random(pair)).astype(np.int64),
        transient_bytes=(GIB * rng.random(pair)).astype(np.int64),
        switch_s=0.2 * rng.random((*pair, num_strategies)) * (groups[:, None] != groups[None, :]),
        transfer_s=0.1,
        overhead_bytes=GIB,
    )
    least = partition_exact(tables, 0).miss
    assert least is not None
    return tables, int(least.needed_bytes * rng.uniform(1.0, 1.6))


def chain_tables(seed: int) -> tuple[CostTables, int]:
    """One stage: more than 10^14 plans."""
    return medium_tables(seed, num_stages=1, num_layers=16, num_strategies=8)


def pipeline_tables(seed: int) -> tuple[CostTables, int]:
    """Two or three stages: some 10^7 plans, as many as HiGHS can prove in a second or two."""
    return medium_tables(seed, num_stages=2 + seed % 2, num_layers=8, num_strategies=6)


def agrees(tables: CostTables, budget: int) -> None:
    result = partition_exact(tables, budget)
    low, high = milp.solve(tables, budget)
    assert low == pytest.approx(high, rel=1e-6), "HiGHS has no proof"
    if result.solution is None:
        assert high == np.inf
        return
    assert result.status == "optimal"
    assert result.solution.peak_bytes <= budget
    assert result.solution.step_s == pytest.approx(high, rel=1e-6)


def test_the_referee_agrees_with_exhaustive_search() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, max_plans=100)
        plans = list(exhaustive.all_plans(tables))
        if plans:
            budget = random_budget(rng, plans) * GIB
            scaled = replace(
                tables,
                static_bytes=tables.static_bytes * GIB,
                activation_bytes=tables.activation_bytes * GIB,
                transient_bytes=tables.transient_bytes * GIB,
                overhead_bytes=tables.overhead_bytes * GIB,
            )
            expected = exhaustive.fastest(plans, budget // GIB)
            assert milp.solve(scaled, budget)[1] == pytest.approx(np.inf if expected is None else expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_highs_on_one_stage(seed: int) -> None:
    agrees(*chain_tables(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4, 24))
def test_agrees_with_highs_on_more_chains(seed: int) -> None:
    agrees(*chain_tables(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(100, 112), range(100, 104)))
def test_agrees_with_highs_on_pipelines(seed: int) -> None:
    agrees(*pipeline_tables(seed))
