"""Strategies by what a stage holds as each layer works: against every choice, on small random tables."""

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.cost.working import WorkingBytes
from steelyard.search.evaluate import evaluate
from steelyard.search.stage_walk import StageWalks
from tests.oracles import exhaustive
from tests.oracles.working import stage_bytes
from tests.problems.random_tables import random_tables

ANY = 10**6


def random_working(rng: np.random.Generator, tables: CostTables) -> WorkingBytes:
    """Bytes with gradients that grow, layers that are not sharded, and layers that take more as the last."""
    shape = (2, *tables.legal.shape)
    names = [each.name for each in fields(WorkingBytes) if each.name.endswith("_bytes")][:-1]
    found = {name: rng.integers(0, 8, shape) for name in names}
    found["freed_bytes"] = np.minimum(found["freed_bytes"], found["saved_bytes"] + found["static_bytes"])
    found["freed_bytes"] -= rng.integers(0, 4, shape) * int(rng.integers(2))
    is_sharded = rng.random(shape) < 0.7
    for name in ("reducing_bytes", "ahead_bytes"):
        found[name] = np.where(is_sharded, found[name], 0)
    found["reduced_bytes"] = np.where(is_sharded, found["reduced_bytes"], -1)
    overheads = tuple(rng.integers(0, 3, tables.pipeline.num_stages).tolist())
    return WorkingBytes(**found, overhead_bytes=overheads, reduces_again=bool(rng.integers(2)))


def drawn(seed: int, num_stages: int) -> tuple[CostTables, WorkingBytes, tuple[int, ...]]:
    """Tables with a legal strategy for every layer, their bytes as layers work, and boundaries."""
    rng = np.random.default_rng(seed)
    while True:
        tables = random_tables(rng, num_stages=num_stages, max_plans=1000)
        if tables.legal.any(axis=1)[list(tables.layers)].all():
            break
    cuts = sorted(rng.choice(np.arange(1, len(tables.layers)), num_stages - 1, replace=False).tolist())
    return tables, random_working(rng, tables), (0, *cuts, len(tables.layers))


def most_bytes(tables: CostTables, working: WorkingBytes, cuts: tuple[int, ...], chosen: list[int]) -> int:
    """Of the fullest stage."""
    return max(stage_bytes(tables, working, stage, span, chosen) for stage, span in enumerate(pairwise(cuts)))


def plans(tables: CostTables, working: WorkingBytes, cuts: tuple[int, ...]) -> list[tuple[float, int]]:
    """Step time and bytes of every choice."""
    return [
        (evaluate(tables, cuts, chosen).step_s, most_bytes(tables, working, cuts, chosen))
        for chosen in exhaustive.all_choices(tables).tolist()
    ]


@pytest.mark.parametrize("seed", range(40))
def test_the_least_bytes_of_a_plan_are_those_of_its_fullest_stage_as_its_layers_work(seed: int) -> None:
    tables, working, cuts = drawn(seed, 1 + seed % 3)
    walks = StageWalks(tables, working)
    for chosen in exhaustive.all_choices(tables).tolist()[:20]:
        assert walks.least_bytes(cuts, chosen) == most_bytes(tables, working, cuts, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_with_room_for_all_states_the_plan_of_a_stage_is_the_fastest_that_fits(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        tables, working, cuts = drawn(seed, 1)
        known = plans(tables, working, cuts)
        sizes = sorted(size for _, size in known)
        like = evaluate(tables, cuts, exhaustive.all_choices(tables).tolist()[0])
        for budget in (sizes[0] - 1, sizes[0], sizes[len(sizes) // 4], sizes[-1]):
            found = StageWalks(tables, working).solution(like, budget, ANY)
            expected = exhaustive.fastest(known, budget)
            if expected is None:
                assert found is None, seed
                continue
            assert found is not None, seed
            assert found.step_s == pytest.approx(expected, rel=1e-9, abs=1e-9), seed
            assert most_bytes(tables, working, cuts, list(found.strategies)) <= budget, seed


@pytest.mark.parametrize("block", range(5))
def test_no_plan_of_one_stage_that_fits_is_faster_than_the_bound(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        tables, working, cuts = drawn(seed, 1)
        known = plans(tables, working, cuts)
        sizes = sorted(size for _, size in known)
        walks = StageWalks(tables, working)
        for budget in (sizes[0], sizes[len(sizes) // 4], sizes[len(sizes) // 2]):
            expected = exhaustive.fastest(known, budget)
            assert expected is not None
            for target_s in (expected, 1.1 * expected + 1):
                assert walks.bound_s(budget, target_s) <= expected * (1 + 1e-9) + 1e-9, seed


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_the_fastest_plan_of_one_stage_is_that_of_every_choice_and_a_limit_below_is_a_bound(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        tables, working, cuts = drawn(seed, 1)
        known = plans(tables, working, cuts)
        sizes = sorted(size for _, size in known)
        for budget in (sizes[0], sizes[len(sizes) // 4], sizes[-1]):
            expected = exhaustive.fastest(known, budget)
            assert expected is not None
            walks = StageWalks(tables, working)
            for limit_s in (expected, 1.1 * expected + 1):
                found, bound_s = walks.fastest(budget, limit_s, ANY)
                assert found is not None, seed
                assert found.step_s == pytest.approx(expected, rel=1e-9, abs=1e-9), seed
                assert bound_s == pytest.approx(expected, rel=1e-9, abs=1e-9), seed
                assert most_bytes(tables, working, cuts, list(found.strategies)) <= budget, seed
            slower, bound_s = walks.fastest(budget, 0.9 * expected - 1e-6, ANY)
            assert slower is None or slower.step_s >= expected * (1 - 1e-9), seed
            assert 0.9 * expected - 1e-6 <= bound_s <= expected * (1 + 1e-9), seed


def test_with_room_for_too_few_states_the_fastest_plan_lies_between_a_bound_and_a_plan() -> None:
    tables, working, cuts = drawn(3, 1)
    known = plans(tables, working, cuts)
    found, bound_s = StageWalks(tables, working).fastest(max(size for _, size in known), 1e9, 1)
    assert found is not None
    assert bound_s <= min(seconds for seconds, _ in known) <= found.step_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3, ANY])
def test_plans_of_several_stages_fit_whatever_the_number_of_states(width: int) -> None:
    num_found = 0
    for seed in range(60):
        tables, working, cuts = drawn(seed, 2)
        known = plans(tables, working, cuts)
        like = evaluate(tables, cuts, exhaustive.all_choices(tables).tolist()[0])
        budget = sorted(size for _, size in known)[len(known) // 3]
        found = StageWalks(tables, working).solution(like, budget, width)
        if found is not None:
            num_found += 1
            assert most_bytes(tables, working, cuts, list(found.strategies)) <= budget, seed
            assert found.step_s >= (exhaustive.fastest(known, budget) or 0) * (1 - 1e-9), seed
    assert num_found > 20


def test_a_layer_whose_neighbours_bind_gets_another_strategy_than_they() -> None:
    """Two strategies: one is fast and its reduction waits beside the next layer, one is slow and small."""
    rng = np.random.default_rng(0)
    tables = random_tables(rng, num_layers=6, num_kinds=1, num_strategies=2, num_stages=1)
    legal, zero = np.ones((1, 2), dtype=bool), np.zeros((2, 1, 2), dtype=np.int64)
    tables = CostTables(
        pipeline=tables.pipeline,
        kinds=("block",),
        layers=(0,) * 6,
        strategies=tables.strategies,
        legal=legal,
        time_s=np.array([[1.0, 2.0]]),
        static_bytes=zero[0],
        activation_bytes=zero[0],
        transient_bytes=zero[0],
        switch_s=np.zeros((1, 2, 2)),
        transfer_s=0.0,
        overhead_bytes=0,
    )
    size = np.array([[[10, 2]]] * 2)
    working = WorkingBytes(
        static_bytes=zero,
        saved_bytes=zero,
        freed_bytes=zero,
        working_bytes=size,
        reducing_bytes=zero,
        ahead_bytes=zero,
        reduced_bytes=size,
        overhead_bytes=(0,),
        reduces_again=False,
    )
    like = evaluate(tables, (0, 6), (1,) * 6)
    found = StageWalks(tables, working).solution(like, 12, 50)
    assert found is not None
    assert sorted(found.strategies) == [0, 0, 0, 1, 1, 1]
    assert all(pair != (0, 0) for pair in pairwise(found.strategies))
