"""Tests of which of several failures is shown."""

import re
from pathlib import Path

import pytest

from steelyard.errors import UserError
from steelyard.processes.failure import (
    FAILURES_VARIABLE,
    RESTART_VARIABLE,
    End,
    Failure,
    begin_attempt,
    read_ends,
    read_failures,
    write_ends,
    write_failure,
)
from steelyard.processes.start import describe, first_failure

LOST_PEER = "Connection closed by peer [127.0.0.1]:30000"


def failure(rank: int, time_s: float, message: str = "a mistake") -> Failure:
    return Failure(rank=rank, exit_code=1, time_s=time_s, error_type="ValueError", message=message, traceback="Trace\n")


STILL = End(exit_code=-9, stood_still=True)


def codes(exit_codes: dict[int, int]) -> dict[int, End]:
    return {rank: End(exit_code=code) for rank, code in exit_codes.items()}


def test_failures_and_exit_codes_survive_the_folder(tmp_path: Path) -> None:
    late, early = failure(0, 2.0), failure(1, 1.0)
    write_failure(late, tmp_path)
    write_failure(early, tmp_path)
    ends = codes({0: 1, 1: -9}) | {2: STILL}
    write_ends(ends, tmp_path)
    assert read_failures(tmp_path) == [early, late]
    assert read_ends(tmp_path) == ends


def test_the_earliest_failure_is_the_first() -> None:
    assert first_failure([failure(0, 2.0), failure(1, 1.0)], codes({0: 1, 1: 1})) == failure(1, 1.0)


def test_a_killed_rank_comes_before_those_that_lost_it() -> None:
    found = first_failure([failure(0, 2.0, LOST_PEER)], codes({0: 1, 1: -9}))
    assert found is not None
    assert describe(found) == "rank 1 was ended by SIGKILL (often: the machine ran out of memory)"


def test_what_a_silent_rank_wrote_last_is_shown() -> None:
    found = first_failure([], {1: End(exit_code=1, last_words="No module named 'x'"), 0: End(exit_code=-15)})
    assert found is not None
    assert describe(found) == ("rank 1 ended with exit code 1 and no message; its last output:\nNo module named 'x'")


def test_a_rank_that_was_ended_after_a_failure_is_not_the_first() -> None:
    assert first_failure([failure(0, 2.0)], codes({0: 1, 1: -15})) == failure(0, 2.0)


def test_a_killed_rank_comes_before_one_that_torchrun_ended_for_it() -> None:
    found = first_failure([], codes({0: -15, 1: -9}))
    assert found is not None
    assert describe(found).startswith("rank 1 was ended by SIGKILL")


def test_a_rank_that_stood_still_comes_before_those_that_waited_for_it() -> None:
    waited = failure(0, 2.0, "Timed out waiting 15000ms for recv operation to complete")
    expected = r"^rank 1 hung: .* \(stopped, or waiting for a disk\); rank 0 waited for it: Timed out waiting"
    found = first_failure([waited], codes({0: 1, 2: -15}) | {1: STILL})
    assert found is not None
    assert re.search(expected, describe(found))
    found = first_failure([], codes({0: -6, 2: -6}) | {1: STILL})
    assert found is not None
    assert describe(found).startswith("rank 1 hung")


def test_a_rank_that_stood_still_comes_after_one_that_failed_by_itself() -> None:
    assert first_failure([failure(0, 2.0)], codes({0: 1}) | {1: STILL}) == failure(0, 2.0)
    found = first_failure([failure(0, 2.0, LOST_PEER)], codes({0: 1, 2: -9}) | {1: STILL})
    assert found is not None
    assert describe(found).startswith("rank 2 was ended by SIGKILL")


def test_a_lost_peer_is_shown_where_nothing_better_is_known() -> None:
    assert first_failure([failure(0, 2.0, LOST_PEER)], codes({0: 1})) == failure(0, 2.0, LOST_PEER)
    assert first_failure([], {}) is None


def test_a_failure_is_described_with_rank_type_message_and_traceback() -> None:
    assert describe(failure(3, 1.0)) == "rank 3 failed: ValueError: a mistake\nTrace"


def test_failures_of_an_attempt_are_those_of_that_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURES_VARIABLE, str(tmp_path))
    begin_attempt()
    write_failure(failure(1, 1.0), tmp_path)
    assert read_failures(tmp_path) == [failure(1, 1.0)]
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    begin_attempt()
    write_failure(failure(0, 2.0), tmp_path)
    assert read_failures(tmp_path) == [failure(0, 2.0)]


def test_where_the_last_attempt_ended_without_a_word_no_earlier_one_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILURES_VARIABLE, str(tmp_path))
    begin_attempt()
    write_failure(failure(1, 1.0), tmp_path)
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    begin_attempt()
    assert read_failures(tmp_path) == []


def test_a_mistake_of_the_user_would_come_again_and_a_lost_peer_would_not() -> None:
    mistake = UserError(field="f", found="a", expected="b")
    assert Failure.of(mistake, rank=0, exit_code=2).is_final
    assert not Failure.of(RuntimeError(LOST_PEER), rank=0, exit_code=1).is_final
