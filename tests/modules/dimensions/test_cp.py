"""Models whose sequences are divided over processes compute what one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.modules.dimensions.cp_worker import CASES, NUM_PROCESSES, REFUSED
from tests.runtime.processes import run_ranks

pytestmark = pytest.mark.processes

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("cp")
    return run_ranks("tests.modules.dimensions.cp_worker:compare", NUM_PROCESSES, folder)


@pytest.mark.parametrize("name", CASES)
def test_losses_add_up_to_that_of_one_process(found: dict[str, Any], name: str) -> None:
    assert found["cases"][name]["loss_error"] < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_gradients_add_up_to_those_of_one_process(found: dict[str, Any], name: str) -> None:
    assert found["cases"][name]["gradient_error"] < TOLERANCE, found["cases"][name]["tensor"]


def test_wrong_positions_would_be_found(found: dict[str, Any]) -> None:
    assert found["control"]["gradient_error"] > 100 * TOLERANCE


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(found: dict[str, Any], field: str) -> None:
    assert found["refused"][field] == field
