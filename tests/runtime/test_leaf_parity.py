"""Llama under every leaf of 8 devices, every pipeline degree and every schedule: eight processes against one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.plan.parity import TOLERANCES
from tests.runtime.leaf_cases import CASES, leaves

HANG_LIMIT_S = 1200
LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = tmp_path_factory.mktemp("leaves") / "result.json"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.runtime.worker", str(result), "tests.runtime.leaf_cases"]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False)
    assert finished.returncode == 0, f"{finished.stderr[:6000]}\n…\n{finished.stderr[-6000:]}"
    return json.loads(result.read_text())


def test_every_leaf_of_eight_devices_is_in_a_plan() -> None:
    used = {str(strategy) for case in CASES.values() for strategy in case.plan.strategies}
    assert {str(strategy) for strategy in leaves(8)} <= used


def test_every_pipeline_degree_meets_every_schedule() -> None:
    met = {(case.plan.num_stages, case.plan.schedule) for case in CASES.values() if case.plan.num_stages > 1}
    assert len(met) == 3 * 3


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]
