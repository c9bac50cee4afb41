"""Tests that models with features besides token ids train as one process does: four processes against one."""

from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from tests.runtime.feature_cases import CASES
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

NIGHTLY = {
    *("llava, cut before the text", "llava, cut inside the text", "qwen2_5_vl, cut inside the tower"),
    *("qwen3_vl, one stage", "whisper, cut before the decoder", "qwen3_vl, cut inside the text"),
    *("whisper, one stage",),
}
"""A like model stays with the same cut, and their models with another."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = tmp_path_factory.mktemp("features") / "result.json"
    return run_parity("tests.runtime.feature_cases", result, asked(request))


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_losses_gradients_and_weights_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["weight_error"] < GRADIENT_TOLERANCE
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]
