"""Tests of cross-layer inputs in the search against exhaustive search, in problem files, and in reports."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from steelyard.cost.tables import CostTables, CrossLayerInput
from steelyard.errors import InvalidProblemError
from steelyard.search import evaluate, layers, partition_exact, search
from steelyard.search.balance import Partition, even_boundaries
from steelyard.search.cross_layer_inputs import all_conditions, assess, conditioned, source_classes
from steelyard.search.partition import PROOF
from steelyard.search.problem import Problem, load_problem, parse_problem, save_problem, solve_problem
from steelyard.search.runs import AnyBudget
from tests.oracles import exhaustive
from tests.problems.random_tables import random_budget, random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_tables
from tests.sample import sampled

GB = 10**9


def with_cross_layer_inputs(rng: np.random.Generator, tables: CostTables) -> CostTables:
    """The tables with one to three cross-layer inputs: free, tied, with classes of the source, or of any numbers."""
    num_layers, size = len(tables.layers), len(tables.strategies)
    sides = []
    for _ in range(int(rng.integers(1, 4)) if num_layers > 1 else 0):
        source = int(rng.integers(0, num_layers - 1))
        behind = np.arange(source + 1, num_layers)
        readers = np.sort(rng.choice(behind, int(rng.integers(1, len(behind) + 1)), replace=False))
        whole = rng.integers(0, 4, (size, size)).astype(np.float64)
        seconds = whole if rng.random() < 0.5 else rng.exponential(1.0, (size, size))
        if rng.random() < 0.4:
            seconds = seconds[rng.integers(0, size, size)]  # classes of equal rows
        if rng.random() < 0.3:
            seconds = seconds * (1 - np.eye(size))  # free between equal layouts
        sides.append(CrossLayerInput(source=source, readers=tuple(readers.tolist()), seconds=seconds))
    return replace(tables, cross_layer_inputs=tuple(sides))


def random_problem(seed: int, *, max_plans: int = 100) -> tuple[CostTables, list[tuple[float, int]]]:
    rng = np.random.default_rng(seed)
    tables = with_cross_layer_inputs(rng, random_tables(rng, max_plans=max_plans))
    return tables, list(exhaustive.all_plans(tables))


@pytest.mark.slow
@pytest.mark.parametrize("block", sampled(range(4), (0,)))
def test_agrees_with_exhaustive_search_on_random_pipelines(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        tables, plans = random_problem(seed)
        budget = random_budget(np.random.default_rng(seed), plans)
        expected = exhaustive.fastest(plans, budget)
        result = search([tables], budget)
        if expected is None:
            assert result.status == "infeasible", seed
            needed = exhaustive.least_budget(plans)
            assert (result.nearest_miss.needed_bytes if result.nearest_miss else None) == needed, seed
        else:
            assert result.status == "optimal", seed
            assert result.best is not None
            assert result.best.solution.peak_bytes <= budget
            assert result.best.score_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed


@pytest.mark.slow
@pytest.mark.parametrize("block", sampled(range(3), (0,)))
def test_last_layers_of_a_stage_pay_for_cross_layer_inputs_like_any_other(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        rng = np.random.default_rng(seed)
        plain = random_tables(rng, max_plans=60)
        more = int(rng.integers(0, 8))
        last = plain.with_last_types(static_bytes=plain.static_bytes + more)
        tables = with_cross_layer_inputs(rng, last)
        plans = list(exhaustive.all_plans(tables))
        budget = random_budget(rng, plans)
        expected = exhaustive.fastest(plans, budget)
        for result in (search([tables], budget), partition_exact(AnyBudget(tables), budget)):
            assert (result.status == "infeasible") == (expected is None), seed
            if expected is not None:
                assert result.lower_bound_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed


@pytest.mark.slow
def test_configs_with_and_without_cross_layer_inputs_compete() -> None:
    for seed in range(15):
        problems = [random_problem(4 * seed + index, max_plans=60) for index in range(4)]
        configs = [
            tables if index % 2 else replace(tables, cross_layer_inputs=())
            for index, (tables, _) in enumerate(problems)
        ]
        fastest = [
            best for each in configs if (best := exhaustive.fastest(list(exhaustive.all_plans(each)), 40)) is not None
        ]
        result = search(configs, 40, num_exact=3)
        found = [outcome.score_s for outcome in result.ranked[:3]]
        assert found == pytest.approx(sorted(fastest)[:3], rel=1e-12, abs=1e-12), seed
        for outcome in result.configs:
            best = exhaustive.fastest(list(exhaustive.all_plans(outcome.tables)), 40)
            assert best is None or outcome.result.lower_bound_s <= best * (1 + 1e-9) + 1e-12, seed


def test_a_cutoff_is_kept_to() -> None:
    for seed in range(15):
        tables, plans = random_problem(seed, max_plans=60)
        prospect = assess(tables, 10**6)
        best = exhaustive.fastest(plans, 10**6)
        if best is None or not best:
            continue
        assert not hasattr(prospect, "status")
        for cutoff in (best * 0.7, best * 1.1):
            result = prospect.settle(cutoff_s=cutoff)
            assert result.status == ("beaten" if cutoff < best else "optimal"), seed
            assert result.lower_bound_s <= best * (1 + 1e-9), seed
            assert result.lower_bound_s >= min(cutoff, best) * (1 - 1e-9), seed


def test_a_search_out_of_time_has_a_plan_and_a_bound() -> None:
    for seed in range(15):
        tables, plans = random_problem(seed, max_plans=60)
        best = exhaustive.fastest(plans, 10**6)
        result = search([tables], 10**6, time_limit_s=0.0)
        if best is not None:
            assert result.best is not None, seed
            assert result.best.score_s >= best * (1 - 1e-12), seed
            assert result.lower_bound_s <= best * (1 + 1e-9), seed


@pytest.mark.slow
def test_where_states_are_dropped_other_conditions_are_still_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MAX_CANDIDATES", 12)
    monkeypatch.setattr(layers, "FEW_CANDIDATES", 6)
    num_unproven = 0
    for seed in range(60):
        tables, plans = random_problem(seed, max_plans=300)
        budget = random_budget(np.random.default_rng(seed), plans)
        expected, result = exhaustive.fastest(plans, budget), partition_exact(tables, budget)
        if expected is None or result.solution is None:
            assert expected is None, seed
            continue
        num_unproven += result.status == "feasible"
        assert result.lower_bound_s * (1 - 1e-9) <= expected, seed
        assert expected * (1 - 1e-9) <= result.solution.step_s <= expected * (1 + PROOF), seed
    assert num_unproven


def test_a_condition_of_one_class_changes_no_plan() -> None:
    for seed in range(15):
        tables, plans = random_problem(seed, max_plans=100)
        parts = [plan for each in all_conditions(tables) for plan in exhaustive.all_plans(conditioned(tables, each))]
        expected = sorted((size, seconds) for seconds, size in plans)
        found = sorted((size, seconds) for seconds, size in parts)
        assert [size for size, _ in found] == [size for size, _ in expected], seed
        assert sorted(s for _, s in found) == pytest.approx(sorted(s for _, s in expected), rel=1e-12, abs=1e-12), seed


def test_strategies_of_equal_rows_are_one_class() -> None:
    tables = random_tables(np.random.default_rng(1), num_layers=3, num_types=1, num_strategies=3, num_stages=1)
    tables = replace(tables, legal=np.ones((1, 3), dtype=bool))
    rows = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
    tables = replace(tables, cross_layer_inputs=(CrossLayerInput(source=0, readers=(1, 2), seconds=rows),))
    assert [members.tolist() for members in source_classes(tables, 0)] == [[0, 2], [1]]


def test_cross_layer_inputs_never_make_a_plan_faster() -> None:
    for seed in range(15):
        tables, _ = random_problem(seed)
        without, cheap = (
            replace(tables, cross_layer_inputs=()),
            replace(tables, cross_layer_inputs=tables.cross_layer_inputs[:1]),
        )
        scores = [best.score_s if (best := search([each], 40).best) else np.inf for each in (without, cheap, tables)]
        assert scores == pytest.approx(sorted(scores), rel=1e-12), seed


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in get_args(Partition) if method != "exact"])
def test_other_partitions_are_never_better_than_the_exact_one(method: Partition) -> None:
    for seed in range(15):
        tables, plans = random_problem(seed)
        budget = random_budget(np.random.default_rng(seed), plans)
        other, best = search([tables], budget, partition=method).best, exhaustive.fastest(plans, budget)
        if other is not None:
            assert best is not None, seed
            assert other.score_s >= best * (1 - 1e-12), seed


def test_strategies_are_exact_for_the_even_cuts() -> None:
    for seed in range(15):
        tables, plans = random_problem(seed)
        budget = random_budget(np.random.default_rng(seed), plans)
        expected = exhaustive.fastest(list(exhaustive.plans_with(tables, even_boundaries(tables))), budget)
        found = search([tables], budget, partition="even").best
        assert (found is None) == (expected is None), seed
        if found is not None:
            assert found.score_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed


def unet(num_skips: int, num_strategies: int) -> CostTables:
    """Layers down and up of one stage; each on the way down is also read by its counterpart on the way up."""
    rng = np.random.default_rng(num_skips)
    plain = random_tables(rng, num_stages=1, num_strategies=num_strategies)
    count = 2 * num_skips + 1
    shape = (count, num_strategies)
    last = count - 1
    return replace(
        plain,
        layer_types=tuple(str(layer) for layer in range(count)),
        layers=tuple(range(count)),
        legal=np.ones(shape, dtype=bool),
        time_s=rng.uniform(1, 2, shape),
        static_bytes=rng.integers(1, 100, shape),
        activation_bytes=np.zeros(shape, dtype=np.int64),
        transient_bytes=rng.integers(1, 100, shape),
        switch_s=rng.uniform(0, 1, (count, num_strategies, num_strategies)),
        overhead_bytes=0,
        cross_layer_inputs=tuple(
            CrossLayerInput(source=layer, readers=(last - layer,), seconds=rng.uniform(0, 1, (num_strategies,) * 2))
            for layer in range(num_skips)
        ),
    )


def least_of_unet(tables: CostTables) -> float:
    """Minimum time of all between a layer and its counterpart, by both strategies, from the innermost layer out."""
    num_skips = len(tables.cross_layer_inputs)
    time_s, switch_s = tables.time_s, tables.switch_s
    within = np.where(np.eye(time_s.shape[1], dtype=bool), time_s[num_skips][:, None], np.inf)
    for layer in reversed(range(num_skips)):
        twin = len(tables.layers) - 1 - layer
        into = (switch_s[layer + 1][:, :, None] + within[None]).min(axis=1)
        through = (into[:, :, None] + switch_s[twin][None]).min(axis=1)
        within = through + time_s[layer][:, None] + time_s[twin][None] + tables.cross_layer_inputs[layer].seconds
    return float(within.min()) * tables.pipeline.num_passes


@pytest.mark.slow
def test_a_unet_of_seven_skips_in_ample_memory_is_planned_optimally() -> None:
    tables = unet(7, 4)
    found = search([tables], 10**6)
    assert found.status == "optimal"
    assert found.best is not None
    assert found.best.score_s == pytest.approx(least_of_unet(tables), rel=1e-12)


@pytest.mark.slow
def test_the_skips_of_a_small_unet_in_tight_memory_agree_with_exhaustive_search() -> None:
    tables = unet(3, 3)
    plans = list(exhaustive.all_plans(tables))
    for budget in (250, 300, 400, 600):
        expected, found = exhaustive.fastest(plans, budget), search([tables], budget)
        assert (found.best is None) == (expected is None)
        if found.best is not None:
            assert found.status == "optimal"
            assert found.best.score_s == pytest.approx(expected, rel=1e-12)


def test_the_reported_stages_name_the_time_of_cross_layer_inputs() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=2, num_microbatches=8, global_batch=64)
    size, last = len(tables.strategies), len(tables.layers) - 1
    sides = (CrossLayerInput(source=0, readers=(1, last), seconds=np.full((size, size), 0.25)),)
    best = search([replace(tables, cross_layer_inputs=sides)], 400 * GB).best
    plain = search([tables], 400 * GB).best
    assert best is not None
    assert plain is not None
    assert [stage.side_s for stage in best.solution.stages] == [0.25, 0.25]
    assert [stage.side_s for stage in plain.solution.stages] == [0.0, 0.0]
    for stage in best.solution.stages:
        assert stage.time_s == stage.transfer_s + stage.layer_s + stage.switch_s + stage.side_s
    assert evaluate(best.tables, best.solution.boundaries, best.solution.strategies) == best.solution


def test_an_expensive_tie_makes_source_and_reader_agree() -> None:
    tables = decoder_tables(LLAMA3_8B, num_devices=8, num_stages=1, num_microbatches=8, global_batch=64)
    size, last = len(tables.strategies), len(tables.layers) - 1
    alone = search([tables], 80 * GB).best
    assert alone is not None
    apart = (1 - np.eye(size)) * alone.score_s
    tied = search(
        [replace(tables, cross_layer_inputs=(CrossLayerInput(source=0, readers=(last,), seconds=apart),))], 80 * GB
    )
    assert tied.status == "optimal"
    assert tied.best is not None
    chosen = tied.best.solution.strategies
    assert chosen[0] == chosen[last]
    assert tied.best.score_s >= alone.score_s * (1 - 1e-12)


def test_cross_layer_inputs_survive_the_file(tmp_path: Path) -> None:
    for seed in range(20):
        tables, plans = random_problem(seed, max_plans=50)
        save_problem(tmp_path / "p.json", Problem(name="x", budget_bytes=9, configs=(tables,), samples=(1,)))
        again = load_problem(tmp_path / "p.json").configs[0]
        for one, other in zip(again.cross_layer_inputs, tables.cross_layer_inputs, strict=True):
            assert (one.source, one.readers) == (other.source, other.readers)
            assert np.array_equal(one.seconds, other.seconds)
        assert list(exhaustive.all_plans(again)) == plans


def test_only_files_with_cross_layer_inputs_need_version_2(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = random_tables(rng, num_layers=3)
    for tables, version in ((plain, 1), (with_cross_layer_inputs(rng, plain), 2)):
        save_problem(tmp_path / "p.json", Problem(name="", budget_bytes=9, configs=(tables,), samples=(1,)))
        content = json.loads((tmp_path / "p.json").read_text())
        assert content["version"] == version
        assert ("side_inputs" in content["settings"][0]) == (version == 2)


def documented() -> dict[str, Any]:
    """The example of the module `problem` with its cross-layer input."""
    blocks = [each.split("```")[0] for each in load_problem.__globals__["__doc__"].split("```json")[1:]]
    content: dict[str, Any] = json.loads(blocks[0])
    content["settings"][0] |= json.loads("{" + blocks[1] + "}")
    return content | {"version": 2}


def test_the_documented_cross_layer_input_is_solved() -> None:
    result = solve_problem(parse_problem(documented()))
    assert result.best is not None
    assert result.best.tables.cross_layer_inputs[0].readers == (1,)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("source", 2, "side_inputs.0..source.*\n.*0 to 1"),
        ("source", -1, "side_inputs.0..source"),
        ("readers", [], "side_inputs.0..readers"),
        ("readers", [2], "side_inputs.0..readers"),
        ("readers", [1, 1], "side_inputs.0..readers"),
        ("seconds", [[0.0, 0.0]], "side_inputs.0..seconds.*1 entries"),
        ("seconds", [[0.0], [0.0]], "side_inputs.0..seconds.*1 entries"),
        ("seconds", [[0.0, -1.0], [0.0, 0.0]], "greater than or equal to 0"),
        ("seconds", [[0.0, float("nan")], [0.0, 0.0]], "side_inputs.0..seconds"),
        ("second", [[0.0]], "did you mean seconds"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(key: str, value: object, message: str) -> None:
    content = documented()
    content["settings"][0]["side_inputs"][0][key] = value
    with pytest.raises(InvalidProblemError, match=message):
        parse_problem(content)


def test_a_file_of_version_1_has_no_cross_layer_inputs() -> None:
    with pytest.raises(InvalidProblemError, match="version 2"):
        parse_problem(documented() | {"version": 1})


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (CrossLayerInput(source=3, readers=(1,), seconds=np.zeros((2, 2))), "source: found 3"),
        (CrossLayerInput(source=1, readers=(1,), seconds=np.zeros((2, 2))), "after layer 1"),
        (CrossLayerInput(source=0, readers=(), seconds=np.zeros((2, 2))), "one or more"),
        (CrossLayerInput(source=0, readers=(1,), seconds=np.zeros((2, 3))), "shape"),
        (CrossLayerInput(source=0, readers=(1,), seconds=np.full((2, 2), np.inf)), "non-finite"),
    ],
)
def test_tables_with_a_wrong_cross_layer_input_are_refused(side: CrossLayerInput, message: str) -> None:
    tables = random_tables(np.random.default_rng(0), num_layers=3, num_strategies=2, num_stages=1)
    with pytest.raises(InvalidProblemError, match=message):
        replace(tables, cross_layer_inputs=(side,))
