"""Tests of the exact partition against exhaustive search."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from steelyard.search import layers, partition_exact
from steelyard.search.partition import quick_bound_s
from steelyard.search.runs import AnyBudget
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables


def blocks(num_quick: int, num_slow: int, num_all: int) -> list[Any]:
    """Numbers of blocks, of which the first are quick, the next slow, and the others left to the night."""
    marks = [(), pytest.mark.slow, (pytest.mark.slow, pytest.mark.nightly)]
    return [pytest.param(block, marks=marks[(block >= num_quick) + (block >= num_slow)]) for block in range(num_all)]


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(3, 4, 10))
def test_agrees_with_exhaustive_search_on_random_pipelines(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, max_plans=800)
        plans = list(exhaustive.all_plans(tables))
        budget = random_budget(rng, plans)
        expected = exhaustive.fastest(plans, budget)
        result = partition_exact(tables, budget)
        if expected is None:
            assert result.status == "infeasible", seed
            needed = exhaustive.least_budget(plans)
            assert (result.miss.needed_bytes if result.miss else None) == needed, seed
        else:
            assert result.status == "optimal", seed
            assert result.solution is not None
            assert result.solution.peak_bytes <= budget
            assert result.solution.step_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed


@pytest.mark.slow
def test_what_is_known_within_any_budget_changes_no_answer() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, max_plans=800)
        plans = list(exhaustive.all_plans(tables))
        known = AnyBudget(tables)
        for budget in (random_budget(rng, plans) for _ in range(3)):
            assert partition_exact(known, budget) == partition_exact(tables, budget), seed


@pytest.mark.parametrize("block", blocks(1, 2, 2))
def test_where_states_are_dropped_the_bound_still_holds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MAX_CANDIDATES", 12)
    monkeypatch.setattr(layers, "FEW_CANDIDATES", 6)
    num_unproven = 0
    for seed in range(block * 60, block * 60 + 60):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, max_plans=800, frees=seed % 2 == 0)
        plans = list(exhaustive.all_plans(tables))
        budget = random_budget(rng, plans)
        expected, result = exhaustive.fastest(plans, budget), partition_exact(tables, budget)
        num_unproven += result.status == "feasible"
        if expected is None:
            assert result.status == "infeasible", seed
            continue
        assert result.solution is not None, seed
        assert result.solution.peak_bytes <= budget
        assert result.lower_bound_s * (1 - 1e-9) <= expected <= result.solution.step_s * (1 + 1e-9), seed
        if result.status == "optimal":
            assert result.solution.step_s == pytest.approx(expected, rel=1e-9), seed
    assert num_unproven


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(1, 2, 4))
def test_agrees_with_exhaustive_search_where_chunks_are_interleaved(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, max_plans=800, num_stages=int(rng.integers(2, 4)), num_layers=5, interleaved=True)
        plans = list(exhaustive.all_plans(tables))
        budget = random_budget(rng, plans)
        expected = exhaustive.fastest(plans, budget)
        result = partition_exact(tables, budget)
        if expected is None:
            needed = exhaustive.least_budget(plans)
            assert (result.miss.needed_bytes if result.miss else None) == needed, seed
        else:
            assert result.status == "optimal", seed
            assert result.solution is not None
            assert result.solution.peak_bytes <= budget
            assert result.solution.step_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed


def test_an_interleaved_config_with_too_few_layers_is_infeasible_for_any_budget() -> None:
    tables = random_tables(np.random.default_rng(0), num_stages=3, num_layers=4, interleaved=True)
    result = partition_exact(tables, 10**9)
    assert (result.status, result.miss) == ("infeasible", None)


def test_a_layer_without_a_legal_strategy_has_no_finite_bound_even_with_one_microbatch() -> None:
    tables = random_tables(np.random.default_rng(0), num_stages=1)
    pipeline = replace(tables.pipeline, num_microbatches=1)
    nothing = replace(tables, pipeline=pipeline, legal=np.zeros_like(tables.legal))
    assert quick_bound_s(nothing) == np.inf
