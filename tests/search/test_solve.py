"""Tests of the search over configurations: ranking, reasons, proof, and laws."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProblemError
from steelyard.search import evaluate, search
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_configs, decoder_tables
from tests.sample import sampled

GB = 10**9


def configs_and_plans(seed: int) -> tuple[list[CostTables], list[list[tuple[float, int]]]]:
    rng = np.random.default_rng(seed)
    configs = [random_tables(rng, max_plans=200) for _ in range(4)]
    return configs, [list(exhaustive.all_plans(tables)) for tables in configs]


@pytest.mark.slow
def test_the_best_plan_over_configs_is_the_exhaustive_one() -> None:
    for seed in range(80):
        configs, plans = configs_and_plans(seed)
        budget = int(np.random.default_rng(seed).integers(5, 60))
        expected = min((best for each in plans if (best := exhaustive.fastest(each, budget)) is not None), default=None)
        result = search(configs, budget, num_exact=1)
        if expected is None:
            needed = [least for each in plans if (least := exhaustive.least_budget(each)) is not None]
            assert result.status == "infeasible", seed
            assert result.best is None
            assert (result.nearest_miss.needed_bytes if result.nearest_miss else None) == min(needed, default=None)
        else:
            assert result.status == "optimal", seed
            assert result.best is not None
            assert result.best.score_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed
            assert result.gap == 0.0


def test_a_config_with_a_layer_without_a_legal_strategy_is_infeasible_within_any_budget() -> None:
    configs, _ = configs_and_plans(0)
    legal = configs[0].legal.copy()
    legal[configs[0].layers[0]] = False
    hopeless = replace(configs[0], legal=legal)
    assert search([hopeless], 2**60).best is None
    both, alone = search([configs[1], hopeless], 2**60).best, search([configs[1]], 2**60).best
    assert both is not None
    assert alone is not None
    assert both.result == alone.result


def test_progress_counts_configurations() -> None:
    configs, _ = configs_and_plans(1)
    said: list[str] = []
    search(configs, 40, progress=said.append)
    assert said[0] == "1 of up to 4 pipeline configurations"
    assert said[-1].endswith("of up to 4 pipeline configurations")


@pytest.mark.slow
def test_the_ranked_configs_are_exact_as_far_as_asked_for() -> None:
    for seed in range(60):
        configs, plans = configs_and_plans(seed)
        fastest = sorted(best for each in plans if (best := exhaustive.fastest(each, 40)) is not None)
        result = search(configs, 40, num_exact=3)
        found = [outcome.score_s for outcome in result.ranked[:3]]
        assert found == pytest.approx(fastest[:3], rel=1e-12, abs=1e-12), seed


@pytest.mark.slow
def test_lower_bounds_hold_for_every_config() -> None:
    for seed in range(60):
        configs, plans = configs_and_plans(seed)
        result = search(configs, 40, num_exact=1)
        for outcome, each in zip(result.configs, plans, strict=True):
            best = exhaustive.fastest(each, 40)
            assert outcome.reason
            if best is not None:
                assert outcome.result.lower_bound_s <= best * (1 + 1e-9) + 1e-12, seed


@pytest.mark.slow
def test_more_memory_never_costs_time() -> None:
    for seed in range(12):
        configs, _ = configs_and_plans(seed)
        scores = [best.score_s if (best := search(configs, budget).best) else np.inf for budget in range(0, 120, 15)]
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(scores)), seed


def test_a_larger_space_never_costs_time() -> None:
    for seed in range(40):
        tables = random_tables(np.random.default_rng(seed), num_strategies=3, max_plans=400)
        smaller = replace(tables, legal=tables.legal & np.array([True, True, False]))
        few, more = search([smaller], 40).best, search([tables], 40).best
        if few is not None:
            assert more is not None
            assert more.score_s <= few.score_s * (1 + 1e-12), seed


@pytest.mark.slow
def test_a_faster_link_never_slows_the_plan() -> None:
    for seed in range(40):
        tables = random_tables(np.random.default_rng(seed), num_stages=2, max_plans=400)
        faster = replace(tables, switch_s=tables.switch_s / 2, transfer_s=tables.transfer_s / 2)
        slow, fast = search([tables], 40).best, search([faster], 40).best
        if slow is not None:
            assert fast is not None
            assert fast.score_s <= slow.score_s * (1 + 1e-12), seed


def test_two_searches_give_the_same_plan() -> None:
    configs = decoder_configs(LLAMA3_8B, num_devices=8, global_batch=32, most_stages=4, most_microbatches=32)
    first, second = search(configs, 40 * GB), search(configs, 40 * GB)
    assert [each.result for each in first.configs] == [each.result for each in second.configs]
    assert [each.reason for each in first.configs] == [each.reason for each in second.configs]


def test_the_reported_time_and_memory_are_those_of_the_definition() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=4, num_microbatches=32, global_batch=64)
    best = search([tables], 40 * GB).best
    assert best is not None
    again = evaluate(tables, best.solution.boundaries, best.solution.strategies)
    assert again == best.solution
    spans = [range(a, b) for a, b in zip(again.boundaries, again.boundaries[1:], strict=False)]
    chosen = np.array([again.strategies])
    expected = [exhaustive.stage_seconds_and_bytes(tables, i, span, chosen) for i, span in enumerate(spans)]
    assert [stage.time_s for stage in again.stages] == pytest.approx(
        [float(time[0]) for time, _ in expected], rel=1e-12
    )
    assert [stage.total_bytes for stage in again.stages] == [size for _, size in expected]


def test_configs_compete_per_sample_where_samples_are_given() -> None:
    tables = random_tables(np.random.default_rng(3), num_stages=1, max_plans=100)
    slower = replace(tables, time_s=tables.time_s * 1.5)
    per_step = search([tables, slower], 10**6)
    per_sample = search([tables, slower], 10**6, samples=[1, 2])
    assert per_step.best is not None
    assert per_sample.best is not None
    assert (per_step.best.index, per_sample.best.index) == (0, 1)


def test_roomy_memory_gives_replication_and_tight_memory_gives_sharding() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=1, num_microbatches=8, global_batch=64)
    roomy, tight = search([tables], 400 * GB).best, search([tables], 80 * GB).best
    assert roomy is not None
    assert tight is not None
    blocks = {tables.strategies[index].parallel for index in roomy.solution.strategies[1:-1]}
    assert blocks == {"dp8"}
    assert any(tables.strategies[index].state_shards > 1 for index in tight.solution.strategies)


def test_a_config_with_more_stages_than_layers_says_so() -> None:
    tables = random_tables(np.random.default_rng(0), num_stages=1)
    tables = replace(tables, pipeline=replace(tables.pipeline, num_stages=9))
    result = search([tables], 100)
    assert result.status == "infeasible"
    assert "stages for" in result.configs[0].reason


def test_a_miss_names_the_bytes_the_stage_and_the_layer() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=2, num_microbatches=8, global_batch=64)
    result = search([tables], 8 * GB)
    miss = result.nearest_miss
    assert miss is not None
    assert miss.needed_bytes == 8 * GB + miss.miss_bytes
    assert search([tables], miss.needed_bytes).status == "optimal"
    assert search([tables], miss.needed_bytes - 1).status == "infeasible"
    assert "does not fit" in result.configs[0].reason


def test_no_configs_is_an_error() -> None:
    with pytest.raises(InvalidProblemError, match="one or more configurations"):
        search([], 10)


@pytest.mark.parametrize(
    ("boundaries", "strategies"), [((0, 9), (0,)), ((0, 1), (0, 0)), ((0, 1), (99,)), ((1, 0), (0,))]
)
def test_a_choice_that_the_tables_do_not_allow_is_an_error(
    boundaries: tuple[int, ...], strategies: tuple[int, ...]
) -> None:
    tables = random_tables(np.random.default_rng(0), num_layers=1, num_stages=1)
    with pytest.raises(InvalidProblemError):
        evaluate(tables, boundaries, strategies)


@pytest.mark.slow
@pytest.mark.parametrize("block", sampled((0, 60), (0,)))
def test_strategies_that_share_layouts_are_searched_as_those_with_layouts_of_their_own(block: int) -> None:
    """Transfers and resharding depend on layouts; other plans of the same tables are the oracle."""
    for seed in range(block, block + 60):
        rng = np.random.default_rng(seed)
        own = random_tables(rng, num_strategies=int(rng.integers(2, 6)), max_plans=600, frees=bool(rng.integers(2)))
        layouts = rng.integers(0, len(own.strategies), len(own.strategies))
        shared = replace(own, layouts=layouts)
        received = own.received and own.received.of(layouts)
        spread = replace(own, switch_s=shared.switches, received=received)
        budget = random_budget(rng, plans := list(exhaustive.all_plans(spread)))
        assert plans == list(exhaustive.all_plans(shared))
        first, second = search([shared], budget), search([spread], budget)
        assert first.status == second.status, seed
        assert [each.result for each in first.configs] == [each.result for each in second.configs], seed
        assert (first.best is None) == ((best := exhaustive.fastest(plans, budget)) is None), seed
        if first.best is not None:
            assert first.best.score_s == pytest.approx(best, rel=1e-12, abs=1e-12), seed
