"""Tests of pipelines over heterogeneous device groups: the search against exhaustive search, and its bound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.tables import Pools
from steelyard.errors import InvalidProblemError
from steelyard.search import partition_exact
from steelyard.search.partition import best_for_boundaries, quick_bound_s
from steelyard.search.runs import AnyBudget
from tests.oracles.exhaustive import all_boundaries, all_plans, fastest, least_budget, plans_with
from tests.problems.random_tables import random_budget, random_tables

seeds = st.integers(0, 2**32 - 1)


def pooled(rng, num_pools, **wanted):
    """Random tables whose strategies and stages lie in pools, each stage with a transfer and an overhead of its own."""
    stages = int(rng.integers(num_pools, 4))
    tables = random_tables(rng, num_stages=stages, num_strategies=int(rng.integers(num_pools, 5)), **wanted)
    count = len(tables.strategies)
    of_strategies = np.sort(np.concatenate([np.arange(num_pools), rng.integers(0, num_pools, count - num_pools)]))
    of_stages = np.sort(np.concatenate([np.arange(num_pools), rng.integers(0, num_pools, stages - num_pools)]))
    transfers = rng.choice([0.0, 0.5, 2.0], stages).tolist()
    pools = Pools(
        of_strategies=of_strategies,
        of_stages=tuple(of_stages.tolist()),
        transfer_s=(0.0, *transfers[1:]),
        overhead_bytes=tuple(int(each) for each in rng.integers(0, 12, stages)),
    )
    return replace(tables, pools=pools)


@pytest.mark.slow
@pytest.mark.parametrize("num_pools", [2, 3])
@given(seeds)
def test_the_search_over_pools_agrees_with_trying_everything(num_pools, seed):
    rng = np.random.default_rng(seed)
    tables = pooled(rng, num_pools, max_plans=1000)
    plans = list(all_plans(tables))
    budget = random_budget(rng, plans)
    found = partition_exact(tables, budget)
    expected = fastest(plans, budget)
    if expected is None:
        assert found.status == "infeasible"
        miss = found.miss
        assert (None if miss is None else miss.needed_bytes) == least_budget(plans)
    else:
        assert found.status == "optimal"
        assert found.solution.step_s == pytest.approx(expected)
        assert found.solution.peak_bytes <= budget


@pytest.mark.slow
@given(seeds)
def test_given_cuts_over_pools_get_their_best_strategies(seed):
    rng = np.random.default_rng(seed)
    tables = pooled(rng, 2, max_plans=500)
    budget = random_budget(rng, list(all_plans(tables)))
    for boundaries in all_boundaries(len(tables.layers), tables.pipeline.num_stages):
        expected = fastest(list(plans_with(tables, boundaries)), budget)
        found = best_for_boundaries(AnyBudget(tables).within(budget), boundaries)
        assert (found and found.step_s) == (expected and pytest.approx(expected))


@given(seeds)
def test_no_plan_over_pools_is_faster_than_the_quick_bound(seed):
    tables = pooled(np.random.default_rng(seed), 2, max_plans=1000)
    steps = [seconds for seconds, _ in all_plans(tables)]
    assert not steps or quick_bound_s(tables) <= min(steps) * (1 + 1e-12)


@pytest.mark.slow
@given(seeds)
def test_one_pool_gives_what_tables_without_pools_give(seed):
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_plans=1000)
    stages = tables.pipeline.num_stages
    one = Pools(
        of_strategies=np.zeros(len(tables.strategies), dtype=np.int64),
        of_stages=(0,) * stages,
        transfer_s=(0.0, *(tables.transfer_s,) * (stages - 1)),
        overhead_bytes=(tables.overhead_bytes,) * stages,
    )
    budget = random_budget(rng, list(all_plans(tables)))
    plain, found = (partition_exact(each, budget) for each in (tables, replace(tables, pools=one)))
    assert found.status == plain.status
    if plain.solution:
        assert found.solution.step_s == pytest.approx(plain.solution.step_s)


def test_pools_that_do_not_match_the_stages_are_refused():
    tables = random_tables(np.random.default_rng(1), num_stages=2, num_strategies=2)
    pools = Pools(of_strategies=np.array([0, 1]), of_stages=(0,), transfer_s=(0.0,), overhead_bytes=(0,))
    with pytest.raises(InvalidProblemError, match="one for each of 2 strategies and 2 stages"):
        replace(tables, pools=pools)
