"""Tests of the command that recommends changes: the longest sequence needs no length; one size is asked at a time."""

import re

import pytest

from steelyard.errors import UserError
from tests.cli.conftest import Run

JOB = ("advise", "llama-demo", "--cluster", "1x1xa100-40gb", "--global-batch", 1)


def test_the_longest_sequence_is_found_without_a_length(run: Run) -> None:
    said = run(*JOB, "--memory", "1500MiB", "--memory-margin", 0.01, "--max", "seq-len").output
    assert re.search(r"largest seq-len: (\d+)(?s:.*) --seq-len \1 ", said)
    assert " --memory 1500MiB --memory-margin 0.01" in said


@pytest.mark.parametrize(("size", "hint"), [("batch,rank", "batch or rank"), ("rank", "add --train lora:r=16")])
def test_a_size_that_cannot_be_asked_for_is_an_error_that_says_what_to_do(run: Run, size: str, hint: str) -> None:
    error = run(*JOB, "--seq-len", 128, "--max", size).exception
    assert isinstance(error, UserError)
    assert error.field == "--max"
    assert hint in error.hint
