"""Tests of the per-layer dynamic program: one pass answers every budget, and pruning loses nothing."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.tables import CostTables
from steelyard.search.bounds import stage_bounds
from steelyard.search.evaluate import evaluate
from steelyard.search.layers import Pruning, chain_frontier, columns_no_larger, option_table
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables


def chain(seed: int) -> tuple[CostTables, list[tuple[float, int]]]:
    tables = random_tables(np.random.default_rng(seed), num_stages=1, max_plans=1000)
    plans = [(seconds / tables.pipeline.num_microbatches, size) for seconds, size in exhaustive.all_plans(tables)]
    return tables, plans


@pytest.mark.parametrize("block", range(5))
def test_one_pass_gives_the_whole_frontier_of_a_chain(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        tables, plans = chain(seed)
        if not plans:
            continue
        costs = option_table(tables).stage(0)
        last = chain_frontier(costs, tables.layers).last
        sizes = last.bytes + last.transient + tables.overhead_bytes
        for budget, expected in exhaustive.frontier(plans):
            assert last.seconds[sizes <= budget].min() == pytest.approx(expected, rel=1e-12, abs=1e-12), seed
        assert sizes.min() == exhaustive.least_budget(plans), seed


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_pruning_by_budget_and_time_loses_no_optimum(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        tables, plans = chain(seed)
        rng = np.random.default_rng(seed)
        budget = random_budget(rng, plans)
        expected = exhaustive.fastest(plans, budget)
        if expected is None:
            continue
        costs = option_table(tables).stage(0)
        room = budget - tables.overhead_bytes
        prices = stage_bounds(costs, tables.layers, room, 0.0).good_prices(0, len(tables.layers))
        pruning = Pruning(budget_bytes=room, limit_s=expected * (1 + 1e-9) + 1e-12, prices=prices)
        found = chain_frontier(costs, tables.layers, pruning=pruning)
        assert found.last.seconds.min() == pytest.approx(expected, rel=1e-12, abs=1e-12), seed
        strategies = found.strategies(int(found.last.seconds.argmin()))
        solution = evaluate(tables, (0, len(tables.layers)), strategies)
        assert solution.peak_bytes <= budget
        assert solution.stages[0].time_s == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_farthest_run_within_a_limit_is_the_last_whose_bound_is_within_it() -> None:
    for seed in range(60):
        tables, plans = chain(seed)
        costs, num_layers = option_table(tables).stage(0), len(tables.layers)
        room = random_budget(np.random.default_rng(seed), plans) - tables.overhead_bytes if plans else 0
        bounds = stage_bounds(costs, tables.layers, room, 0.1)
        found = bounds.matrix((0, num_layers), (1, num_layers))
        for start, own in enumerate(found):
            for limit_s in (0.05, *own[start:], *own[start:] * (1 + 1e-9)):
                expected = start + int((own[start:] <= limit_s).sum())
                assert bounds.farthest(start, float(limit_s)) == expected, seed


def test_a_narrow_width_still_gives_a_plan_that_fits() -> None:
    for seed in range(60):
        tables, plans = chain(seed)
        budget = random_budget(np.random.default_rng(seed), plans)
        if exhaustive.fastest(plans, budget) is None:
            continue
        costs = option_table(tables).stage(0)
        room = budget - tables.overhead_bytes
        pruning = Pruning(budget_bytes=room, limit_s=np.inf, prices=np.zeros(1), width=1)
        found = chain_frontier(costs, tables.layers, pruning=pruning)
        assert len(found.last) == 1
        solution = evaluate(tables, (0, len(tables.layers)), found.strategies(0))
        assert solution.peak_bytes <= budget


def test_legal_strategies_share_a_class_exactly_if_every_legal_receiver_pays_the_same() -> None:
    for seed in range(100):
        tables = random_tables(np.random.default_rng(seed))
        group = option_table(tables).switches.group
        for one, other in itertools.combinations(np.flatnonzero(tables.legal.any(axis=0)).tolist(), 2):
            same = all(
                tables.switch_s[layer_type, one, receiver] == tables.switch_s[layer_type, other, receiver]
                for layer_type, receiver in zip(*np.nonzero(tables.legal), strict=True)
            )
            assert (group[one] == group[other]) == same, seed


def test_beaten_strategies_are_left_out_and_equal_ones_kept_once() -> None:
    tables = random_tables(np.random.default_rng(0), num_types=1, num_strategies=3, num_stages=1)
    same = {
        name: np.repeat(getattr(tables, name)[:, :1], 3, axis=1)
        for name in ("static_bytes", "activation_bytes", "transient_bytes")
    }
    from dataclasses import replace

    tables = replace(
        tables,
        legal=np.ones((1, 3), dtype=bool),
        switch_s=np.zeros((1, 3, 3)),
        time_s=np.array([[2.0, 1.0, 1.0]]),
        **same,
    )
    costs = option_table(tables).stage(0)
    assert costs.strategy[0, : costs.count[0]].tolist() == [1]


@pytest.mark.parametrize("block", range(0, 200, 50))
def test_strategies_that_are_left_out_are_those_that_another_makes_needless(block: int) -> None:
    for seed in range(block, block + 50):
        tables = random_tables(np.random.default_rng(seed))
        options, in_flight = option_table(tables), tables.pipeline.in_flight(0)
        costs, group, held = options.stage(0), options.switches.group, tables.held_bytes(in_flight)
        received = tables.switch_s[:, tables.legal.any(axis=0)]
        for layer_type, legal in enumerate(tables.legal):
            place = {"time": tables.time_s, "held": held, "transient": tables.transient_bytes}
            values = [
                (*(each[layer_type, index] for each in place.values()), *received[layer_type, :, index])
                for index in range(len(legal))
            ]
            kept = [
                index
                for index in np.flatnonzero(legal).tolist()
                if not any(
                    group[other] == group[index]
                    and np.less_equal(values[other], values[index]).all()
                    and (values[other] != values[index] or other < index)
                    for other in np.flatnonzero(legal).tolist()
                )
            ]
            assert costs.strategy[layer_type, : costs.count[layer_type]].tolist() == kept, seed


@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), max_size=4))
def test_columns_are_compared_as_if_one_by_one(rows: list[list[int]]) -> None:
    table = np.array(rows, dtype=np.float64).reshape(-1, 6)
    pairs = [[bool((table[:, one] <= table[:, other]).all()) for other in range(6)] for one in range(6)]
    assert columns_no_larger(table).tolist() == pairs
