"""Tests that plans with context parallelism train as one process does: four and eight processes against one."""

from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from tests.runtime.context_cases import CASES, SAMPLE
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

EXACT = [name for name, case in CASES.items() if case.precision == "fp32"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = tmp_path_factory.mktemp("context") / "result.json"
    return run_parity("tests.runtime.context_cases", result, asked(request))


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_losses_and_gradients_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found, (loss_tolerance, gradient_tolerance) = results[name], TOLERANCES[CASES[name].precision]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=loss_tolerance)
    assert found["same_loss_on_all_ranks"]
    assert found["gradient_error"] < gradient_tolerance, found["gradient_tensor"]


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_norms_and_weights_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found, (loss_tolerance, gradient_tolerance) = results[name], TOLERANCES["fp32"]
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=loss_tolerance)
    assert found["weight_error"] < gradient_tolerance


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]
