"""Tests that parameters and gradients kept whole during a step, with sharded states, train as one process does."""

from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from tests.runtime.processes import run_parity
from tests.runtime.zero_cases import CASES, SAMPLE
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]
BF16 = [name for name, case in CASES.items() if case.precision == "bf16"]
CONTROL = "control: gradients never reduced"
PLANS = [name for name, case in CASES.items() if case.fault is None and case.precision == "fp32"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = [*asked(request), CONTROL]
    return run_parity("tests.runtime.zero_cases", tmp_path_factory.mktemp("zero") / "result.json", names)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_losses_gradients_and_norms_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=LOSS_TOLERANCE)
    assert found["weight_error"] < GRADIENT_TOLERANCE
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled([name for name, case in CASES.items() if case.fault is None], SAMPLE))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]


def test_gradients_that_are_never_reduced_fail_the_comparison(results: dict[str, dict[str, Any]]) -> None:
    assert results[CONTROL]["gradient_error"] > 100 * GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", sampled(BF16, SAMPLE))
def test_losses_in_bf16_are_near_fp32(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=5e-3)
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=5e-2)
