"""Tests that any plan trains as one process does: losses, gradients, norms and weights, on 4 and 8 processes."""

from typing import Any

import pytest

from tests.runtime.cases import CASES, NIGHTLY
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
PLANS = [name for name in CASES if not name.startswith("control") and name != "bf16"]
SAMPLE = [name for name in CASES if name not in NIGHTLY]
FAULTS = [name for name, case in CASES.items() if case.fault is not None]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = [*asked(request), "control: no fault", "bf16"]
    return run_parity("tests.runtime.cases", tmp_path_factory.mktemp("parity") / "result.json", names)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_losses_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert len(found["losses"]) == CASES[name].num_steps
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_gradients_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["gradient_error"] < GRADIENT_TOLERANCE, results[name]["gradient_tensor"]


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_gradient_norms_before_clipping_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["norms"] == pytest.approx(results[name]["expected_norms"], rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_weights_after_the_last_step_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["weight_error"] < GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", sampled([name for name in CASES if CASES[name].fault is None], SAMPLE))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_comparison(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results["control: no fault"]["gradient_error"] < GRADIENT_TOLERANCE
    assert results[name]["gradient_error"] > 100 * GRADIENT_TOLERANCE


def test_losses_in_bf16_are_near_fp32(results: dict[str, dict[str, Any]]) -> None:
    found = results["bf16"]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=5e-3)
    assert found["losses"] != pytest.approx(found["expected_losses"], rel=1e-7)
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=5e-2)
