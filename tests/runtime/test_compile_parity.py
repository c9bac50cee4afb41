"""Tests that compiled blocks train as one uncompiled process does: four processes against one."""

import shutil
from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from tests.runtime.compile_cases import BY_INDUCTOR, CASES, SAMPLE
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes
HAS_COMPILER = bool(shutil.which("g++") or shutil.which("clang++"))

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]
EXACT = [name for name in CASES if not name.startswith("bf16")]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = [name for name in asked(request) if HAS_COMPILER or not name.endswith(BY_INDUCTOR)]
    return run_parity("tests.runtime.compile_cases", tmp_path_factory.mktemp("compiled") / "result.json", names)


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_losses_gradients_norms_and_weights_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    if name not in results:
        pytest.skip("needs a C++ compiler")
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=LOSS_TOLERANCE)
    assert found["weight_error"] < GRADIENT_TOLERANCE
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled([name for name in CASES if name not in EXACT], SAMPLE))
def test_losses_in_bf16_are_near_fp32(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=5e-3)
