"""The exact partition against exhaustive search."""

import numpy as np
import pytest

from steelyard.search.partition import partition_exact
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables


@pytest.mark.parametrize("block", range(10))
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
