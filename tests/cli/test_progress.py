"""Tests of progress without a terminal: a line on standard error at intervals."""

import time

import pytest

from steelyard.cli import options
from steelyard.cli.options import progress


def said(capsys: pytest.CaptureFixture[str], *, within_s: float = 5.0) -> list[str]:
    lines: list[str] = []
    ends = time.monotonic() + within_s
    while not lines and time.monotonic() < ends:
        time.sleep(0.01)
        lines = capsys.readouterr().err.splitlines()
    return lines


def test_a_line_says_from_time_to_time_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "LINE_EVERY_S", 0.05)
    with progress("counting") as show:
        show("7 of 17, without zero2")
        assert said(capsys)[0].startswith("... 7 of 17, without zero2 (")
    capsys.readouterr()
    assert not said(capsys, within_s=0.2)


def test_nothing_is_said_where_json_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "LINE_EVERY_S", 0.01)
    with progress("counting", silent=True) as show:
        show("7 of 17, without zero2")
        assert not said(capsys, within_s=0.2)
