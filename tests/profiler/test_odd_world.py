"""Test on three processes that a transfer is between two of them."""

from pathlib import Path

import pytest

from tests.runtime.processes import run_ranks

pytestmark = pytest.mark.processes


def test_a_transfer_is_measured_between_two_of_three_ranks(tmp_path: Path) -> None:
    found = run_ranks("tests.profiler.odd_world:handed_over", 3, tmp_path)
    assert ["send_recv", 2, False] in found
    assert len(found) == 5
