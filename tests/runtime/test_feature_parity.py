"""Models whose samples hold more than token ids train under mixed plans as one process does: four against one."""

from typing import Any

import pytest

from steelyard.plan.parity import TOLERANCES
from tests.runtime.feature_cases import CASES
from tests.runtime.processes import run_parity

pytestmark = pytest.mark.processes

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_parity("tests.runtime.feature_cases", tmp_path_factory.mktemp("features") / "result.json")


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["weight_error"] < GRADIENT_TOLERANCE
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", CASES)
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]
