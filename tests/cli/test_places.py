"""Tests that the path of every output option is checked before anything else, including the plan."""

import pytest

from tests.cli.conftest import Run, user_error

JOB = ("--cluster", "nowhere", "--seq-len", 64, "--global-batch", 8)
PLACES: dict[str, tuple[object, ...]] = {
    "plan": ("plan", "no-model", *JOB, "--output"),
    "problem": ("plan", "no-model", *JOB, "--save-problem"),
    "frontier": ("frontier", "no-model", *JOB, "--output"),
    "explain": ("explain", "no-plan.json", "--output"),
    "report": ("report", "no-plan.json", "--output"),
    "timeline": ("timeline", "no-plan.json", "--output"),
    "export": ("export", "no-plan.json", "--to", "torchrun", "--output"),
    "profile": ("profile", "no-model", "--seq-len", 64, "-n", 2, "--output"),
}


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES)
def test_a_place_that_cannot_be_written_is_found_first(run: Run, words: tuple[object, ...]) -> None:
    error = user_error(run(*words, "missing/out.html"))
    assert (error.field, error.found) == (words[-1], "missing/out.html: No such file or directory")


def test_an_export_into_a_folder_inside_a_file_is_found_first(run: Run) -> None:
    assert user_error(run("export", "no-plan.json", "--to", "torchrun", "-o", f"{__file__}/out")).field == "--output"
