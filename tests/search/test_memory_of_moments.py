"""Tests of tables whose layers free memory and leave buffers: the fastest plan that fits, with proof."""

from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.build import build_tables
from steelyard.plan.strategy import parse_strategy
from steelyard.search import search
from steelyard.search.bounds import stage_bounds
from steelyard.search.layers import Pruning, chain_frontier, option_table
from tests.cost.examples import config, job
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables


@pytest.mark.slow
@pytest.mark.parametrize("block", range(0, 120, 30))
def test_the_search_finds_the_fastest_plan_of_all_that_fit(block: int) -> None:
    for seed in range(block, block + 30):
        rng = np.random.default_rng(10_000 + seed)
        tables = random_tables(rng, max_plans=800, frees=True, interleaved=seed % 3 == 0)
        plans = list(exhaustive.all_plans(tables))
        budget = random_budget(rng, plans)
        expected, found = exhaustive.fastest(plans, budget), search([tables], budget, num_alternatives=0)
        if expected is None:
            assert found.status == "infeasible", seed
            continue
        assert found.best is not None, seed
        assert found.status == "optimal", seed
        assert found.best.solution.step_s == pytest.approx(expected, rel=1e-9, abs=1e-12), seed
        assert found.best.solution.peak_bytes <= budget, seed


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 4), (1, 1), (2, 4)], ids=["accumulates", "one microbatch", "two stages"]
)
def test_every_zero_stage_beside_replicas_is_searched_to_the_optimum(num_stages: int, num_microbatches: int) -> None:
    degree = 8 // num_stages
    texts = (f"dp{degree}", f"fsdp{degree}", f"fsdp{degree} zero2", f"fsdp{degree} zero1")
    of = job(global_batch=32, num_hidden_layers=3)
    where = config(of, num_stages=num_stages, num_microbatches=num_microbatches)
    tables = build_tables(where, tuple(map(parse_strategy, texts)))
    plans = list(exhaustive.all_plans(tables))
    sizes = sorted(size for _, size in plans)
    used = set[str]()
    for budget in (sizes[0] - 1, *sizes[:: len(sizes) // 24], sizes[-1]):
        expected, found = exhaustive.fastest(plans, budget), search([tables], budget, num_alternatives=0)
        assert (found.best is None) == (expected is None)
        if found.best is not None:
            assert found.status == "optimal"
            assert found.best.solution.step_s == pytest.approx(expected, rel=1e-9)
            used |= {texts[each] for each in found.best.solution.strategies}
    assert (texts[3] in used) == (num_microbatches > 1)


def test_bounds_at_the_exact_limit_lose_no_optimum() -> None:
    for seed in range(30):
        rng = np.random.default_rng(30_000 + seed)
        tables = random_tables(rng, num_stages=1, max_plans=1000, frees=True)
        plans = [(seconds / tables.pipeline.num_microbatches, size) for seconds, size in exhaustive.all_plans(tables)]
        budget = random_budget(rng, plans)
        expected = exhaustive.fastest(plans, budget)
        if expected is None:
            continue
        costs, room = option_table(tables).stage(0), budget - tables.overhead_of(0)
        layer_types = tables.run_types(range(len(tables.layers)))
        prices = stage_bounds(costs, tables.layers, room, 0.0).good_prices(0, len(tables.layers))
        pruning = Pruning(budget_bytes=room, limit_s=expected * (1 + 1e-9) + 1e-12, prices=prices)
        found = chain_frontier(costs, layer_types, pruning=pruning, is_last=True)
        assert found.last.seconds.min() == pytest.approx(expected, rel=1e-9, abs=1e-12), seed


@pytest.mark.parametrize("block", range(0, 80, 40))
def test_one_pass_gives_the_whole_frontier_of_a_chain(block: int) -> None:
    for seed in range(block, block + 40):
        tables = random_tables(np.random.default_rng(seed), num_stages=1, max_plans=1000, frees=True)
        count = tables.pipeline.num_microbatches
        plans = [(seconds / count, size) for seconds, size in exhaustive.all_plans(tables)]
        if not plans:
            continue
        costs = option_table(tables).stage(0)
        last = chain_frontier(costs, tables.run_types(range(len(tables.layers)))).last
        sizes = last.bytes + last.transient + tables.overhead_of(0)
        for budget, expected in exhaustive.frontier(plans):
            assert last.seconds[sizes <= budget].min() == pytest.approx(expected, rel=1e-12, abs=1e-12), seed
            bounds = stage_bounds(costs, tables.layers, budget - tables.overhead_of(0), 0.0)
            assert bounds.matrix((0, 1), (len(tables.layers), 1))[0, 0] <= expected * (1 + 1e-9) + 1e-12, seed


def test_a_buffer_that_one_layer_needs_counts_whole_in_the_bound() -> None:
    tables = random_tables(np.random.default_rng(0), num_layers=6, num_types=1, num_strategies=2, num_stages=1)
    row = np.zeros((1, 2), dtype=np.int64)
    tables = replace(
        tables,
        layers=(0,) * 6,
        legal=np.ones((1, 2), dtype=bool),
        time_s=np.array([[1.0, 2.0]]),
        static_bytes=np.array([[10, 9]]),
        activation_bytes=row,
        transient_bytes=row,
        freed_bytes=row,
        switch_s=np.zeros((1, 2, 2)),
        transfer_s=0.0,
        overhead_bytes=0,
        buffers=np.stack([row, np.array([[24, 0]]), row]),
    )
    own = {
        name: getattr(tables, name) for name in ("static_bytes", "activation_bytes", "freed_bytes", "transient_bytes")
    }
    tables = tables.with_last_types(**own)
    costs = option_table(tables).stage(0)
    plans = [(seconds / tables.pipeline.num_microbatches, size) for seconds, size in exhaustive.all_plans(tables)]
    for room, seconds in ((84, 6.0), (80, 10.0), (79, 11.0)):
        bound_s = stage_bounds(costs, tables.layers, room, 0.0).matrix((0, 1), (6, 1))[0, 0]
        assert (bound_s, exhaustive.fastest(plans, room)) == (seconds, seconds)
