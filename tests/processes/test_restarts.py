"""Tests of restarts by torchrun: what starts again, and what does not."""

from pathlib import Path

import pytest

from steelyard.processes.failure import RankFailedError
from steelyard.processes.start import RankUserError, run_processes
from tests.processes.forking_agent import fork_ranks
from tests.runtime.test_launch import ROOT, assert_gone

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_killed_rank_is_started_again_as_often_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    with pytest.raises(RankFailedError, match="rank 1 was ended by SIGKILL"):
        run_processes("tests.runtime.faulty", ["kill", str(tmp_path)], num_processes=2, restarts=1)
    assert len(list(tmp_path.glob("*.pid"))) == 2 * 2
    assert_gone(tmp_path)


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    with pytest.raises(RankUserError, match="--option: found this"):
        run_processes("tests.runtime.faulty", ["mistake", str(tmp_path)], num_processes=2, restarts=1)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert_gone(tmp_path)


def test_what_a_rank_beside_the_first_wrote_before_its_end_is_shown(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 ended with exit code 3 .* output:\n(.*\n)*the library gives up"):
        run_processes("tests.runtime.faulty", ["exit", str(tmp_path)], num_processes=2)
