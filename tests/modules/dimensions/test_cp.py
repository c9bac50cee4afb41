"""Tests that models with divided sequences compute what one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.modules.dimensions.cp_worker import CASES, NUM_PROCESSES, REFUSED, SAMPLE
from tests.runtime.processes import run_ranks
from tests.sample import asked, sampled

pytestmark = pytest.mark.processes

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("cp")
    found: dict[str, Any] = run_ranks("tests.modules.dimensions.cp_worker:compare", NUM_PROCESSES, folder)
    if not {*asked(request)} <= {*SAMPLE}:
        more = run_ranks("tests.modules.dimensions.cp_worker:compare_nightly", NUM_PROCESSES, folder)
        found["cases"] |= more["cases"]
    return found


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_losses_add_up_to_that_of_one_process(found: dict[str, Any], name: str) -> None:
    assert found["cases"][name]["loss_error"] < TOLERANCE


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_gradients_add_up_to_those_of_one_process(found: dict[str, Any], name: str) -> None:
    assert found["cases"][name]["gradient_error"] < TOLERANCE, found["cases"][name]["tensor"]


def test_wrong_positions_would_be_found(found: dict[str, Any]) -> None:
    assert found["control"]["gradient_error"] > 100 * TOLERANCE


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(found: dict[str, Any], field: str) -> None:
    assert found["refused"][field] == field
