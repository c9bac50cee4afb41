"""Tests that hybrid sharding trains as one process does: losses, gradients, norms and weights, on 4 and 8."""

from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from tests.runtime.hybrid_cases import CASES, SAMPLE
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]
CONTROLS = ("control: shards not summed over replicas", "bf16")
PLANS = [name for name, case in CASES.items() if case.fault is None and case.precision == "fp32"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = [*asked(request), *CONTROLS]
    return run_parity("tests.runtime.hybrid_cases", tmp_path_factory.mktemp("hybrid") / "result.json", names)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_losses_gradients_and_norms_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=LOSS_TOLERANCE)
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled([name for name, case in CASES.items() if case.fault is None], SAMPLE))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]


def test_shards_that_are_not_summed_over_replicas_fail_the_comparison(results: dict[str, dict[str, Any]]) -> None:
    found = results["control: shards not summed over replicas"]
    assert found["gradient_error"] > 100 * GRADIENT_TOLERANCE


def test_losses_in_bf16_are_near_fp32(results: dict[str, dict[str, Any]]) -> None:
    found = results["bf16"]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=5e-3)
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=5e-2)
