"""Tests of Llama under every leaf of 4 and 8 devices, pipeline degree and schedule, against one process."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from steelyard.plan.strategy import Remat, Strategy
from tests.runtime.leaf_cases import CASES, FURTHER, dimensions_and_remat, leaves, one_of_each_order
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

DEGREES, SCHEDULES = (2, 4, 8), ("interleaved-1f1b", "1f1b", "gpipe")
PIPELINES = [f"{degree} stages, {schedule}" for degree, schedule in zip(DEGREES, SCHEDULES, strict=True)]
"""Each degree and each schedule once; how one depends on the other `tests.schedules` tells."""
SAMPLE = [name for name in CASES if not name.startswith(FURTHER) and ("stages" not in name or name in PIPELINES)]
LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = tmp_path_factory.mktemp("leaves") / "result.json"
    return run_parity("tests.runtime.leaf_cases", result, asked(request))


def strategies_used(num_devices: int, names: Iterable[str] = CASES) -> list[Strategy]:
    plans = [CASES[name].plan for name in names if CASES[name].plan.num_devices == num_devices]
    return [strategy for plan in plans for strategy in plan.strategies]


@pytest.mark.slow
def test_every_leaf_of_four_devices_is_in_a_plan() -> None:
    assert {*leaves(4)} <= {*strategies_used(4)}


@pytest.mark.slow
def test_every_leaf_of_four_devices_is_in_the_sample_with_some_remat_and_every_order_with_each() -> None:
    used = strategies_used(4, SAMPLE)
    assert {replace(each, remat=Remat.NONE) for each in leaves(4)} <= {replace(each, remat=Remat.NONE) for each in used}
    assert {*map(dimensions_and_remat, leaves(4))} <= {*map(dimensions_and_remat, used)}


@pytest.mark.slow
def test_every_order_and_degree_of_eight_devices_is_in_a_plan_and_what_comes_with_them_takes_turns() -> None:
    some = one_of_each_order(leaves(8))
    assert {*some} <= {*strategies_used(8)}
    assert [strategy.levels for strategy in some] == list({strategy.levels: None for strategy in leaves(8)})
    counts = Counter(strategy.remat for strategy in some)
    assert len(counts) == 3
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {(each.mode("sp"), each.mode("zero")) for each in some} == set(product((False, True), (2, 3)))


@pytest.mark.slow
def test_every_pipeline_degree_meets_every_schedule() -> None:
    met = {(case.plan.num_stages, case.plan.schedule) for case in CASES.values() if case.plan.num_stages > 1}
    assert met == set(product(DEGREES, SCHEDULES))
    assert {*PIPELINES} <= {*SAMPLE}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_losses_and_gradients_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]
