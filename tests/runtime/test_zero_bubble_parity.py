"""Tests that split backward passes train as one process does."""

from dataclasses import replace
from typing import Any

import pytest

from steelyard.plan.shrink import TOLERANCES
from steelyard.schedules.pass_rows import write_row
from tests.runtime.processes import run_parity
from tests.runtime.zero_bubble_cases import CASES, NIGHTLY, ORDERED
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp32"]
BF16 = [name for name, case in CASES.items() if case.precision == "bf16"]
CONTROL = "control: without weight passes"
PLANS = [name for name in CASES if name not in (CONTROL, *BF16)]
SAMPLE = [name for name in PLANS if name not in NIGHTLY]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = [*asked(request), CONTROL, *BF16]
    return run_parity("tests.runtime.zero_bubble_cases", tmp_path_factory.mktemp("bubble") / "result.json", names)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_losses_gradients_and_norms_equal_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=LOSS_TOLERANCE)
    assert found["gradient_error"] < GRADIENT_TOLERANCE, found["gradient_tensor"]
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=LOSS_TOLERANCE)
    assert found["weight_error"] < GRADIENT_TOLERANCE
    assert found["same_loss_on_all_ranks"]


@pytest.mark.parametrize("name", sampled([*PLANS, *BF16], [*SAMPLE, *BF16]))
def test_the_runtime_applied_the_strategies_of_the_plan(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.make.keywords["schedule"] == ORDERED])
def test_an_order_of_its_own_is_not_the_usual_one(name: str) -> None:
    pipeline = CASES[name].plan.pipeline
    usual = replace(pipeline, pass_order=())
    rows = [write_row(usual.passes(stage), usual.parts_of(stage)) for stage in range(usual.num_stages)]
    assert all(ordered != row for ordered, row in zip(pipeline.pass_order, rows, strict=True))


def test_gradients_that_wait_for_ever_fail_the_comparison(results: dict[str, dict[str, Any]]) -> None:
    assert results[CONTROL]["gradient_error"] > 100 * GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", BF16)
def test_losses_in_bf16_are_near_fp32(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["losses"] == pytest.approx(found["expected_losses"], rel=5e-3)
    assert found["norms"] == pytest.approx(found["expected_norms"], rel=5e-2)
