"""Where the processes of a run live."""

import os
from pathlib import Path

import pytest

from steelyard.processes.start import run_processes
from tests.runtime.test_launch import ROOT

pytestmark = pytest.mark.processes


def test_all_processes_share_one_session_that_is_not_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux shares processor time between sessions: processes with one each wait for their turn to answer others."""
    monkeypatch.chdir(ROOT)
    run_processes("tests.processes.sessions", [str(tmp_path)], num_processes=3)
    found = [[int(each) for each in path.read_text().split()] for path in tmp_path.iterdir()]
    assert len(found) == 3
    sessions, groups, processes = zip(*found, strict=True)
    assert len({*sessions, os.getsid(0)}) == 2
    assert groups == processes
