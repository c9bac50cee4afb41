"""Tests of the routers' auxiliary loss: four processes against one that runs transformers' functions.

The single process gets the same microbatches, one after another.
"""

from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from tests.runtime.processes import run_parity
from tests.runtime.router_cases import CASES, SAMPLE
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = tmp_path_factory.mktemp("router") / "result.json"
    return run_parity(
        "tests.runtime.router_cases",
        result,
        [*asked(request), "mixtral, bf16", "control: ranks count their own tokens alone"],
    )


EXACT = [name for name, case in CASES.items() if case.precision == "fp32" and case.fault is None]
LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_losses_and_gradients_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_the_loss_of_routers_by_itself_is_that_of_transformers(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["router_losses"] == pytest.approx(found["expected_router_losses"], rel=LOSS_TOLERANCE)


def test_in_bf16_losses_are_near_those_in_fp32(results: dict[str, dict[str, Any]]) -> None:
    found = results["mixtral, bf16"]
    tolerance, _ = TOLERANCES["bf16"]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=tolerance)
    assert found["router_losses"] == pytest.approx(found["expected_router_losses"], rel=tolerance)


def test_the_comparison_finds_ranks_that_count_their_own_tokens_alone(results: dict[str, dict[str, Any]]) -> None:
    found = results["control: ranks count their own tokens alone"]
    assert found["gradient_error"] > 10 * GRADIENT_TOLERANCE
    assert found["router_losses"] != pytest.approx(found["expected_router_losses"], rel=10 * LOSS_TOLERANCE)
