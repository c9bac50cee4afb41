"""Llama under every leaf of 8 devices, every pipeline degree and every schedule: eight processes against one."""

from typing import Any

import pytest

from steelyard.plan.parity import TOLERANCES
from tests.runtime.leaf_cases import CASES, leaves
from tests.runtime.processes import run_parity

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_parity("tests.runtime.leaf_cases", tmp_path_factory.mktemp("leaves") / "result.json")


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
