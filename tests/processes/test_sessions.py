"""Tests of where the processes of a run live and meet."""

import os
import socket
from pathlib import Path

import pytest

from steelyard.processes.agent import _GIVEN, free_port
from steelyard.processes.start import run_processes
from tests.runtime.test_launch import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Session, group and number of each process of a run, and the port where the run meets."""
    folder = tmp_path_factory.mktemp("found")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run_processes("tests.processes.sessions", [str(folder)], num_processes=3)
    return [[int(each) for each in path.read_text().split()] for path in folder.iterdir()]


def test_all_processes_share_one_session_that_is_not_the_callers(found: list[list[int]]) -> None:
    """Linux shares processor time between sessions: processes with one each wait for their turn to answer others."""
    assert len(found) == 3
    sessions, groups, processes, _ = zip(*found, strict=True)
    assert len({*sessions, os.getsid(0)}) == 2
    assert groups == processes


def test_they_meet_on_a_port_that_the_system_gives_to_no_other(found: list[list[int]]) -> None:
    (port,) = {each[-1] for each in found}
    assert 1024 <= port < int(_GIVEN.read_text().split()[0])


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.socket() as taken, socket.socket() as other:
        for each in (taken, other):
            each.bind(("", 0))
        numbers = [each.getsockname()[1] for each in (taken, other)]
        other.close()
        assert free_port(numbers) == numbers[1]
        assert free_port(numbers[:1]) not in numbers[:1]


@pytest.mark.parametrize("text", ["1024\t65535", "", "many"])
def test_where_the_system_gives_all_ports_or_says_nothing_any_free_one_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr("steelyard.processes.agent._GIVEN", tmp_path / "range")
    assert free_port() >= 1024
