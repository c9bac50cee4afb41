"""Tests of the time-memory frontier, complete and sampled."""

import numpy as np
import pytest

from steelyard.search.tradeoff import sampled_frontier
from tests.oracles import exhaustive
from tests.problems.random_tables import random_tables

ENOUGH = 1000
"""Searches that find every step of these small problems."""


@pytest.mark.slow
def test_a_complete_frontier_has_every_step_of_the_exhaustive_one() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        configs = [random_tables(rng, max_plans=60) for _ in range(2)]
        plans = [plan for tables in configs for plan in exhaustive.all_plans(tables)]
        expected = exhaustive.frontier(plans)
        frontier = sampled_frontier(configs, max_searches=ENOUGH)
        assert frontier.is_complete, seed
        found = [(step.peak_bytes, step.score_s) for step in reversed(frontier.steps)]
        # steps that differ by rounding only may merge
        assert len(found) <= len(expected)
        for size, seconds in expected:
            fitting = [s for b, s in found if b <= size]
            assert fitting, seed
            assert min(fitting) == pytest.approx(seconds, rel=1e-12, abs=1e-12), seed


def test_every_step_of_a_sampled_frontier_is_one_of_the_complete_one() -> None:
    configs = [random_tables(np.random.default_rng(10), num_stages=1, num_strategies=4, max_plans=300)]
    every = sampled_frontier(configs, max_searches=ENOUGH)
    some = sampled_frontier(configs, max_searches=4)
    assert 2 < len(some.steps) < len(every.steps)
    assert {step.peak_bytes for step in some.steps} < {step.peak_bytes for step in every.steps}
    assert some.steps[0].peak_bytes == every.steps[0].peak_bytes
    assert not some.is_complete
