"""Tests that models with divided experts train as one process does: four or eight processes against one."""

from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from tests.runtime.ep_cases import CASES, SAMPLE
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

EXACT = [name for name, case in CASES.items() if case.precision == "fp32"]
LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = tmp_path_factory.mktemp("ep") / "result.json"
    return run_parity("tests.runtime.ep_cases", result, asked(request))


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_losses_and_gradients_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_norms_and_weights_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=LOSS_TOLERANCE)
    assert found["weight_error"] < GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]


@pytest.mark.parametrize("name", [name for name in CASES if name not in EXACT])
def test_in_bf16_losses_are_near_those_in_fp32(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    loss_tolerance, gradient_tolerance = TOLERANCES["bf16"]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=loss_tolerance)
    assert found["gradient_error"] < gradient_tolerance, found["gradient_tensor"]
