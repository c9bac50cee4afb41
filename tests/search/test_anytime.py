"""Tests of time limits, and the slow sweep against exhaustive search."""

import time
from dataclasses import replace

import numpy as np
import pytest

from steelyard.search import partition_exact, search
from steelyard.search.layers import chain_frontier, option_table
from tests.oracles import exhaustive, grid
from tests.problems.random_tables import random_budget, random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_tables
from tests.sample import sampled

GB = 10**9


def test_a_search_without_time_still_gives_a_plan_that_fits_and_a_true_gap() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=2, num_microbatches=16, global_batch=64)
    hurried = partition_exact(tables, 40 * GB, deadline=time.process_time() - 1)
    patient = partition_exact(tables, 40 * GB)
    assert hurried.status == "feasible"
    assert patient.status == "optimal"
    assert hurried.solution is not None
    assert patient.solution is not None
    assert hurried.solution.peak_bytes <= 40 * GB
    assert hurried.lower_bound_s <= patient.solution.step_s <= hurried.solution.step_s
    assert hurried.solution.step_s * (1 - hurried.gap) == pytest.approx(hurried.lower_bound_s)


def test_a_search_over_configs_says_when_it_is_not_proven() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=2, num_microbatches=16, global_batch=64)
    result = search([tables], 40 * GB, time_limit_s=0.0)
    assert result.status == "feasible"
    assert 0 < result.gap < 1
    assert "not proven" in result.configs[0].reason


def test_the_grid_program_agrees_where_sizes_are_whole_steps() -> None:
    for seed in range(60):
        tables = random_tables(np.random.default_rng(seed), num_stages=1, max_plans=2000)
        tables = replace(tables, transient_bytes=np.zeros_like(tables.transient_bytes))
        costs = option_table(tables).stage(0)
        if not tables.legal[list(tables.layers)].any(axis=1).all():
            continue
        last = chain_frontier(costs, tables.layers).last
        for budget in (3, 10, 30):
            ours = last.seconds[last.bytes + tables.overhead_bytes <= budget].min(initial=np.inf)
            assert ours == pytest.approx(grid.least_seconds(tables, budget, step_bytes=1), rel=1e-12, abs=1e-12), seed


@pytest.mark.slow
@pytest.mark.parametrize("block", sampled(range(20), (0,)))
def test_agrees_with_exhaustive_search_on_two_thousand_more(block: int) -> None:
    for seed in range(10_000 + block * 100, 10_100 + block * 100):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, max_plans=2000)
        plans = list(exhaustive.all_plans(tables))
        budget = random_budget(rng, plans)
        expected = exhaustive.fastest(plans, budget)
        found = partition_exact(tables, budget)
        if expected is None:
            assert (found.miss.needed_bytes if found.miss else None) == exhaustive.least_budget(plans), seed
        else:
            assert found.solution is not None, seed
            assert found.solution.peak_bytes <= budget, seed
            assert found.solution.step_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed
