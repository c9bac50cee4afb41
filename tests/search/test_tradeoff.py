"""Frontiers over memory and over device counts."""

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.search.tradeoff import device_frontier, fewest_devices, memory_frontier
from tests.oracles import exhaustive
from tests.problems.random_tables import random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_settings


@pytest.mark.slow
def test_the_memory_frontier_has_every_step_of_the_exhaustive_one() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        settings = [random_tables(rng, max_plans=60) for _ in range(2)]
        plans = [plan for tables in settings for plan in exhaustive.all_plans(tables)]
        expected = exhaustive.frontier(plans)
        found = [(step.peak_bytes, step.score_s) for step in reversed(memory_frontier(settings))]
        # steps that differ by rounding only may merge
        assert len(found) <= len(expected)
        for size, seconds in expected:
            fitting = [s for b, s in found if b <= size]
            assert fitting, seed
            assert min(fitting) == pytest.approx(seconds, rel=1e-12, abs=1e-12), seed


def test_a_limited_frontier_holds_the_fastest_plans() -> None:
    settings = [random_tables(np.random.default_rng(5), num_stages=1, num_strategies=4, max_plans=300)]
    every = memory_frontier(settings)
    some = memory_frontier(settings, max_points=2)
    assert [step.peak_bytes for step in some] == [step.peak_bytes for step in every[:2]]


def llama(num_devices: int) -> list[CostTables]:
    return decoder_settings(
        LLAMA3_8B, num_devices=num_devices, global_batch=16, most_stages=2, most_microbatches=16, most_strategies=12
    )


def test_fewest_devices_stops_at_the_first_count_that_fits() -> None:
    budget = 60 * 10**9
    tried = fewest_devices(llama, (8, 4, 2, 1), budget)
    assert [option.num_devices for option in tried] == sorted(option.num_devices for option in tried)
    assert tried[-1].result.best is not None
    assert all(option.result.best is None for option in tried[:-1])
    every = device_frontier(llama, (1, 2, 4, 8), budget)
    assert next(option.num_devices for option in every if option.result.best) == tried[-1].num_devices
