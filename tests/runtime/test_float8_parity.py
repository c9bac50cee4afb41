"""Tests that 8-bit linear layers train as in one process: four processes against one, on the CPU."""

import shutil
from typing import Any

import pytest

from steelyard.levers.float8 import Float8
from tests.runtime.float8_cases import CASES
from tests.runtime.processes import run_parity
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

LOSS_TOLERANCE, GRADIENT_TOLERANCE = Float8.tolerances
EAGER = [name for name in CASES if name != "compiled"]
NAMES = list(CASES) if shutil.which("g++") or shutil.which("clang++") else EAGER


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_parity("tests.runtime.float8_cases", tmp_path_factory.mktemp("float8") / "result.json", asked(request))


@pytest.mark.parametrize("name", sampled(NAMES, EAGER))
def test_losses_gradients_and_norms_are_near_those_of_one_process(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    """Scales of a part of a tensor are other than those of all of it."""
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=1e-2)
    assert found["same_loss_on_all_ranks"]
