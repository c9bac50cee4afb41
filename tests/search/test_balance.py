"""Tests of even, memory-balanced and bi-objective partitions: their guarantees, and exact is never worse."""

import itertools
from functools import cache

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.search import partition_exact
from steelyard.search.balance import (
    Partition,
    even_boundaries,
    is_accepted,
    memory_balanced_boundaries,
    neighbours,
    partition_by,
    time_balanced_boundaries,
)
from steelyard.search.evaluate import Solution
from steelyard.search.partition import Prospect, assess_chain, best_for_boundaries
from steelyard.search.runs import PreparedTables
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_tables

TABLES = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=4, num_microbatches=32, global_batch=64)
BUDGET = 36 * 10**9


@cache
def exact_plan(seed: int) -> tuple[CostTables, int, Solution | None]:
    """Random tables, a budget, and the best of all cuts."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_plans=200)
    budget = random_budget(rng, list(exhaustive.all_plans(tables)))
    return tables, budget, partition_exact(tables, budget).solution


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bmw", "even", "memory-balanced"])
def test_exact_is_never_worse(method: Partition) -> None:
    for seed in range(60):
        tables, budget, exact = exact_plan(seed)
        other = partition_by(method, tables, budget).solution
        if other is not None:
            assert exact is not None, seed
            assert other.peak_bytes <= budget
            assert exact.step_s <= other.step_s * (1 + 1e-12), seed


@pytest.mark.slow
def test_strategies_are_exact_for_the_even_cuts() -> None:
    for seed in range(60):
        tables, budget, _ = exact_plan(seed)
        plans = list(exhaustive.plans_with(tables, even_boundaries(tables)))
        expected = exhaustive.fastest(plans, budget)
        found = partition_by("even", tables, budget).solution
        if expected is None:
            assert found is None, seed
        else:
            assert found is not None, seed
            assert found.step_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed


def test_even_stages_differ_by_at_most_one_layer() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=8, num_microbatches=64, global_batch=64)
    sizes = np.diff(even_boundaries(tables))
    assert sizes.max() - sizes.min() <= 1


def test_memory_balanced_cuts_fit_into_the_least_budget_of_all() -> None:
    for seed in range(60):
        tables = random_tables(np.random.default_rng(seed), max_plans=200)
        plans = list(exhaustive.all_plans(tables))
        if plans:
            chosen = list(exhaustive.plans_with(tables, memory_balanced_boundaries(tables)))
            assert exhaustive.least_budget(chosen) == exhaustive.least_budget(plans), seed


def test_time_balanced_cuts_have_the_fastest_slowest_stage() -> None:
    for seed in range(60):
        tables = random_tables(np.random.default_rng(seed), max_plans=200)
        if not tables.legal[list(tables.layers)].any(axis=1).all():
            continue
        fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]

        def slowest(boundaries: tuple[int, ...], fastest: np.ndarray = fastest, transfer_s: float = tables.transfer_s):
            spans = itertools.pairwise(boundaries)
            return max(fastest[a:b].sum() + (transfer_s if a else 0) for a, b in spans)

        every = exhaustive.all_boundaries(len(tables.layers), tables.pipeline.num_stages)
        assert slowest(time_balanced_boundaries(tables)) == pytest.approx(min(map(slowest, every))), seed


def test_the_bi_objective_adjustment_ends_no_slower_than_it_starts_within_the_budget() -> None:
    found, start = partition_by("bmw", TABLES, BUDGET).solution, _memory_balanced()
    assert found is not None
    assert found.step_s <= start.step_s
    assert found.peak_bytes <= BUDGET


def test_the_bi_objective_adjustment_moves_one_layer_over_one_boundary() -> None:
    start = _memory_balanced()
    moved = neighbours(start)
    assert moved
    for boundaries in moved:
        assert np.abs(np.subtract(boundaries, start.boundaries)).sum() == 1


def test_the_bi_objective_adjustment_accepts_no_slower_stage_and_no_fuller_one() -> None:
    prepared, start = _prepared(), _memory_balanced()
    tried = [each for each in (best_for_boundaries(prepared, moved) for moved in neighbours(start)) if each is not None]
    slowest = max(stage.time_s for stage in start.stages)
    for found in tried:
        is_slower = max(stage.time_s for stage in found.stages) > slowest
        assert is_accepted(found, start, BUDGET) is not is_slower
        assert not is_accepted(found, start, found.peak_bytes - 1)
    assert tried


def _prepared() -> PreparedTables:
    prospect = assess_chain(TABLES, BUDGET)
    assert isinstance(prospect, Prospect)
    return prospect.prepared


def _memory_balanced() -> Solution:
    found = best_for_boundaries(_prepared(), memory_balanced_boundaries(TABLES))
    assert found is not None
    return found
