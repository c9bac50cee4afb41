"""Tests that adapters train as in one process and the rest is unchanged, and that a loss in chunks is equal.

Four processes are compared with one, which computes the loss whole.
"""

from typing import Any

import pytest

from steelyard.modules.levers.train import is_added
from steelyard.plan.shrink import TOLERANCES
from tests.runtime.lora_cases import CASES, SAMPLE
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]
EXACT = [name for name in CASES if name != "bf16"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_parity("tests.runtime.lora_cases", tmp_path_factory.mktemp("lora") / "result.json", asked(request))


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_losses_gradients_norms_and_weights_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["losses"][0] != found["losses"][1]
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert is_added(found["gradient_tensor"]) == (CASES[name].plan.model.frozen is not None)
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=LOSS_TOLERANCE)
    assert found["weight_error"] < GRADIENT_TOLERANCE
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    """Layers without a backward pass do not keep gathered parameters."""
    plan, chain = CASES[name].plan, CASES[name].plan.chain()
    expected = [str(strategy) for strategy in plan.strategies]
    kept = [text if chain.has_backward(layer) else text.replace(" zero2", "") for layer, text in enumerate(expected)]
    assert results[name]["strategies"] == kept


def test_losses_in_bf16_are_near_fp32(results: dict[str, dict[str, Any]]) -> None:
    found = results["bf16"]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=5e-3)
