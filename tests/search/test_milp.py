"""Medium problems against HiGHS: 24 layers and 12 strategies."""

from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.search import partition_exact
from tests.oracles import exhaustive, milp
from tests.problems.random_tables import random_budget, random_tables

GIB = 1024**3


def medium_tables(seed: int, *, num_stages: int) -> tuple[CostTables, int]:
    """24 layers of 24 unlike kinds, where faster strategies take more memory, and a budget that binds."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, num_layers=24, num_kinds=24, num_strategies=12, num_stages=num_stages)
    pace = rng.uniform(0.5, 2.0, (24, 12))
    size = rng.uniform(0.5, 1.5, (24, 1))
    groups = rng.integers(0, 4, 12)
    tables = replace(
        tables,
        num_microbatches=int(rng.integers(1, 9)),
        layers=tuple(range(24)),
        legal=rng.random((24, 12)) < 0.9,
        time_s=size * pace,
        static_bytes=(GIB * size / pace**1.5).astype(np.int64),
        activation_bytes=(0.2 * GIB * size * rng.random((24, 12))).astype(np.int64),
        transient_bytes=(GIB * rng.random((24, 12))).astype(np.int64),
        switch_s=0.2 * rng.random((24, 12, 12)) * (groups[:, None] != groups[None, :]),
        transfer_s=0.1,
        overhead_bytes=GIB,
    )
    least = partition_exact(tables, 0).miss
    assert least is not None
    return tables, int(least.needed_bytes * rng.uniform(1.0, 1.6))


def agrees(tables: CostTables, budget: int) -> None:
    result = partition_exact(tables, budget)
    low, high = milp.solve(tables, budget)
    if result.solution is None:
        assert low == high == np.inf
        return
    assert result.status == "optimal"
    assert result.solution.peak_bytes <= budget
    assert low * (1 - 1e-6) <= result.solution.step_s <= high * (1 + 1e-6)


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


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_highs_on_one_stage(seed: int) -> None:
    agrees(*medium_tables(seed, num_stages=1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 44))
def test_agrees_with_highs_on_more_chains(seed: int) -> None:
    agrees(*medium_tables(seed, num_stages=1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_agrees_with_highs_on_pipelines(seed: int) -> None:
    agrees(*medium_tables(seed, num_stages=2 + seed % 2))
