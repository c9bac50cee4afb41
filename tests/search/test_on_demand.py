"""Tests of tables built on demand: the same results, and no more tables than needed."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.search import OnDemand, SearchResult, search
from steelyard.search.partition import quick_bound_s
from tests.problems.random_tables import random_tables
from tests.sample import sampled


def drawn(seed: int) -> tuple[list[CostTables], list[OnDemand]]:
    """Configurations, and the same on demand, each with some part of its lower bound known in advance."""
    rng = np.random.default_rng(seed)
    tables = [random_tables(rng, max_plans=200) for _ in range(6)]
    return tables, [on_demand(each, rng.uniform(0.2, 1.0)) for each in tables]


def on_demand(tables: CostTables, part: float) -> OnDemand:
    bound_s = quick_bound_s(tables)
    return OnDemand(tables.pipeline, part * bound_s if np.isfinite(bound_s) else bound_s, lambda: tables)


def found(result: SearchResult) -> list[object]:
    return [result.status, result.lower_bound_s, *((each.index, each.solution) for each in result.ranked)]


def num_made(given: Sequence[OnDemand]) -> int:
    return sum(each.is_made for each in given)


@pytest.mark.slow
@pytest.mark.parametrize("block", sampled(range(3), (0,)))
def test_what_is_found_is_the_same_and_beaten_configs_have_no_tables(block: int) -> None:
    spared = 0
    for seed in range(block * 50, block * 50 + 50):
        num_alternatives = seed % 3
        tables, given = drawn(seed)
        budget = int(np.random.default_rng(seed).integers(5, 60))
        whole = search(tables, budget, num_alternatives=num_alternatives)
        lazy = search(given, budget, num_alternatives=num_alternatives)
        assert found(lazy) == found(whole), seed
        unmade = [outcome for outcome, each in zip(lazy.configs, given, strict=True) if not each.is_made]
        assert all(outcome.result.status == "beaten" for outcome in unmade)
        assert whole.best is None or all(outcome.result.lower_bound_s > whole.best.score_s for outcome in unmade)
        spared += len(unmade)
    assert spared > 33


def test_without_time_and_without_a_plan_only_one_config_has_tables() -> None:
    tables, given = drawn(3)
    result = search(given, 0, time_limit_s=0)
    assert (result.status, num_made(given)) == ("infeasible", 1)
    made = [OnDemand.of(each) for each in tables]
    assert found(search(made, 40, time_limit_s=0))[0] != "infeasible"


def test_tables_that_are_there_are_all_looked_at_whatever_the_time() -> None:
    tables, _ = drawn(3)
    started = time.process_time()
    late = search(tables, 0, time_limit_s=0)
    assert time.process_time() > started
    assert all(each.result.status == "infeasible" for each in late.configs)


def test_a_config_that_no_plan_can_run_says_so_without_tables() -> None:
    tables, _ = drawn(0)
    hopeless = OnDemand(tables[0].pipeline, np.inf, partial(random_tables, np.random.default_rng(1)))
    given = [OnDemand.of(each) for each in tables[1:]] + [hopeless]
    result = search(given, 2**60, num_alternatives=0)
    assert result.configs[-1].reason == "has a layer without a legal strategy"
    assert not hopeless.is_made


def test_narrowed_tables_are_made_from_the_tables_and_those_once() -> None:
    tables, _ = drawn(1)
    calls: list[int] = []

    def make() -> CostTables:
        calls.append(1)
        return tables[0]

    given = OnDemand(tables[0].pipeline, 0.5, make)
    narrow = given.narrowed(lambda each: replace(each, transfer_s=7.0))
    assert (narrow.is_made, given.is_made, narrow.least_s, narrow.pipeline) == (False, False, 0.5, given.pipeline)
    assert narrow.tables.transfer_s == 7.0
    assert narrow.tables is narrow.tables
    assert (given.tables, len(calls)) == (tables[0], 1)


def test_a_sharper_bound_is_of_the_same_tables() -> None:
    _, given = drawn(2)
    sharper, blunter = given[0].bounded(given[0].least_s + 1), given[0].bounded(0.0)
    assert (sharper.least_s, blunter.least_s) == (given[0].least_s + 1, given[0].least_s)
    assert not sharper.is_made
    assert sharper.tables is given[0].tables
    assert given[0].bounded(0.0).is_made


def sharpened(tables: Sequence[CostTables]) -> OnDemand:
    """One configuration that becomes all of these when its bound is sharpened for the third time."""

    def sharpen(level: int, _cutoff_s: float) -> list[OnDemand]:
        if level == 2:
            return [on_demand(each, 0.9) for each in tables]
        return [made(level + 1)]

    def made(level: int) -> OnDemand:
        bound_s = 0.2 * (level + 1) * min(map(quick_bound_s, tables))
        return OnDemand(tables[0].pipeline, bound_s, lambda: tables[0], sharpen=partial(sharpen, level))

    return made(0)


@pytest.mark.slow
def test_a_config_whose_bound_is_sharpened_becomes_several_of_which_the_best_is_found() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tables = [random_tables(rng, max_plans=200) for _ in range(6)]
        tables = [each for each in tables if np.isfinite(quick_bound_s(each))]
        whole, lazy = search(tables, 40), search([sharpened(tables[:2]), sharpened(tables[2:])], 40)
        assert len(lazy.configs) == len(tables)
        assert (lazy.status, lazy.lower_bound_s) == (whole.status, whole.lower_bound_s), seed
        assert (lazy.best is None) == (whole.best is None)
        if lazy.best is not None and whole.best is not None:
            assert lazy.best.score_s == whole.best.score_s


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_where_nothing_fits_the_nearest_miss_of_refused_configs_is_found(share: float) -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tables = [random_tables(rng, max_plans=200) for _ in range(6)]
        whole = search(tables, 0)
        missed = [each.result.miss for each in whole.configs]
        if whole.nearest_miss is None or any(miss is None or miss.miss_bytes == 0 for miss in missed):
            continue
        refused = [
            OnDemand(
                each.pipeline,
                np.inf,
                partial(lambda of: of, each),
                missing_bytes=partial(min, int(share * miss.miss_bytes)),
            )
            for each, miss in zip(tables, missed, strict=True)
            if miss is not None
        ]
        found_miss = search(refused, 0).nearest_miss
        assert found_miss is not None
        assert found_miss.miss_bytes == whole.nearest_miss.miss_bytes
        assert share < 1 or num_made(refused) == 1
