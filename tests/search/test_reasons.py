"""Tests of reasons against strategies: dominated ones are never missed, illegal ones have a reason."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cost.tables import CostTables
from steelyard.search import search
from steelyard.search.reasons import NOT_ALLOWED, dominators, strategy_verdicts
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables


def tables_of(seed: int) -> tuple[CostTables, int]:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_plans=60)
    return tables, random_budget(rng, list(exhaustive.all_plans(tables)))


def without_dominated(tables: CostTables) -> CostTables:
    return replace(tables, legal=tables.legal & (dominators(tables) < 0))


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_leaving_dominated_strategies_out_never_changes_the_optimum(seed: int) -> None:
    tables, budget = tables_of(seed)
    everything, rest = (search([each], budget, num_alternatives=0) for each in (tables, without_dominated(tables)))
    assert everything.status == rest.status
    if everything.best is not None and rest.best is not None:
        assert rest.best.score_s == pytest.approx(everything.best.score_s, rel=1e-12, abs=1e-12)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_leaving_dominated_strategies_out_never_changes_the_exhaustive_frontier(seed: int) -> None:
    tables, _ = tables_of(seed)
    everything, rest = (
        exhaustive.frontier(list(exhaustive.all_plans(each))) for each in (tables, without_dominated(tables))
    )
    assert [size for size, _ in rest] == [size for size, _ in everything]
    assert [time for _, time in rest] == pytest.approx([time for _, time in everything], rel=1e-12, abs=1e-12)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_what_dominates_is_legal_and_undominated_itself(seed: int) -> None:
    tables, _ = tables_of(seed)
    found = dominators(tables)
    for layer_type, index in zip(*np.nonzero(found >= 0), strict=True):
        by = found[layer_type, index]
        assert tables.legal[layer_type, index]
        assert tables.legal[layer_type, by]
        assert found[layer_type, by] < 0


def test_of_two_equal_strategies_the_first_stays() -> None:
    tables = random_tables(np.random.default_rng(1), num_strategies=2, num_types=1)
    same = {
        name: np.repeat(getattr(tables, name)[:, :1], 2, axis=1)
        for name in ("time_s", "static_bytes", "activation_bytes", "transient_bytes")
    }
    equal = replace(tables, legal=np.ones((1, 2), dtype=bool), switch_s=np.zeros((1, 2, 2)), **same)
    assert dominators(equal).tolist() == [[-1, 0]]
    verdicts = strategy_verdicts(equal)
    assert [each.verdict for each in verdicts] == ["undominated", "dominated"]
    assert verdicts[1].reason == f"{verdicts[0].strategy} costs the same"


def test_every_pair_of_layer_type_and_strategy_has_a_verdict_and_every_useless_one_a_reason() -> None:
    for seed in range(30):
        tables, _ = tables_of(seed)
        verdicts = strategy_verdicts(tables)
        assert len(verdicts) == tables.legal.size
        assert all(bool(each.reason) == (each.verdict != "undominated") for each in verdicts)
        illegal = [each for each in verdicts if each.verdict == "illegal"]
        assert len(illegal) == int((~tables.legal).sum())
        assert all(each.reason == NOT_ALLOWED for each in illegal)


def test_an_illegal_strategy_carries_the_reason_that_is_known() -> None:
    tables = random_tables(np.random.default_rng(2), num_strategies=2)
    forbidden = replace(tables, legal=np.zeros_like(tables.legal))
    verdicts = strategy_verdicts(forbidden, lambda layer_type, strategy: f"{strategy} for {layer_type}")
    assert verdicts[-1].reason == f"{tables.strategies[-1]} for {len(tables.layer_types) - 1}"
