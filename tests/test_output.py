"""Tests that output is written completely or not at all, and that unwritable paths give one early message."""

import errno
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard.errors import UserError
from steelyard.output import check_file, check_folder, command, make_folder, write_file, write_files

COMMAND = [sys.executable, "-c", "from steelyard.cli.app import main; main()"]
LONG = "a" * 300

BAD_FILES: dict[str, tuple[str, str]] = {
    "a folder": ("folder", "Is a directory"),
    "a missing folder": ("missing/out.json", "No such file or directory"),
    "inside a file": ("file/out.json", "Not a directory"),
    "a name that is too long": (LONG, "File name too long"),
    "no place for files": ("/proc/out.json", "No such file or directory"),
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("before")


def content() -> dict[str, str]:
    """Every file below this folder."""
    return {str(path): path.read_text() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("act", [check_file, lambda path, option: write_file(path, "text", option)])
def test_a_place_where_no_file_can_be_is_named_with_its_option(case: str, act: Callable[[Path, str], None]) -> None:
    path, reason = BAD_FILES[case]
    with pytest.raises(UserError, match=f"--output: found {path}: {reason}"):
        act(Path(path), "--output")
    assert content() == {"file": "before"}


def test_a_place_is_tried_without_a_trace() -> None:
    check_file(Path("new.json"), "-o")
    check_file(Path("file"), "-o")
    check_file(Path("new/deeper/m.jsonl"), "-o", makes_folder=True)
    check_folder(Path("new/deeper"), "-o")
    assert content() == {"file": "before"}
    assert not Path("new").exists()


def refuse(number: int) -> Callable[..., None]:
    def fail(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("act", [check_file, lambda path, option: write_file(path, "after", option)])
def test_a_full_disk_is_one_message_and_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Path, str], None]
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))
    with pytest.raises(UserError, match="-o: found file: No space left on device"):
        act(Path("file"), "-o")
    assert content() == {"file": "before"}


def test_a_file_that_may_not_be_written_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="Permission denied"):
        check_file(Path("file"), "-o")


def test_of_several_files_none_is_written_where_one_cannot_be() -> None:
    with pytest.raises(UserError, match="missing/b"):
        write_files({Path("file"): "after", Path("missing/b"): "b"}, "-o")
    assert content() == {"file": "before"}


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(Path("file"), "after", "-o")
    assert content() == {"file": "before"}


def test_a_file_keeps_its_mode_and_stays_behind_its_link() -> None:
    Path("file").chmod(0o640)
    Path("link").symlink_to("file")
    write_file(Path("link"), "after", "-o")
    assert Path("link").is_symlink()
    assert (Path("file").read_text(), stat.S_IMODE(Path("file").stat().st_mode)) == ("after", 0o640)


def test_a_link_that_leads_nowhere_yet_is_written_through() -> None:
    Path("link").symlink_to("new")
    check_file(Path("link"), "-o")
    write_file(Path("link"), "text", "-o")
    assert Path("new").read_text() == "text"


def test_a_link_to_itself_gives_way_to_the_file() -> None:
    Path("loop").symlink_to("loop")
    check_file(Path("loop"), "-o")
    write_file(Path("loop"), "text", "-o")
    assert Path("loop").read_text() == "text"


def test_a_new_file_has_the_mode_of_any_other() -> None:
    write_file(Path("new"), "text", "-o")
    Path("other").touch()
    assert Path("new").stat().st_mode == Path("other").stat().st_mode


def test_a_device_is_written_as_it_is() -> None:
    write_file(Path("/dev/null"), "text", "-o")
    assert not Path("/dev/null").is_file()
    with pytest.raises(UserError, match="/dev/full: No space left"):
        write_file(Path("/dev/full"), "text", "-o")


def test_a_folder_is_made_or_its_place_named() -> None:
    make_folder(Path("new/deeper"), "--folder")
    assert Path("new/deeper").is_dir()
    for act in (check_folder, make_folder):
        with pytest.raises(UserError, match="--folder: found file"):
            act(Path("file"), "--folder")


def test_a_folder_whose_name_is_too_long_is_found_before_it_is_made() -> None:
    with pytest.raises(UserError, match="File name too long"):
        check_folder(Path("new") / LONG / "deeper", "--folder")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["devices"], ["devices", "--json"], ["schema", "plan"]])
def test_whoever_stops_reading_makes_no_command_fail(arguments: list[str]) -> None:
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["devices"], ["models", "--json"]])
def test_a_terminal_that_shows_ascii_alone_is_enough(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    finished = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, b"")
    assert finished.stdout.isascii()


def test_a_command_that_is_shown_can_be_copied_into_a_shell() -> None:
    shown = command("report", Path("with space.json"), "-o", Path("it's.html"))
    assert shlex.split(shown) == ["steelyard", "report", "with space.json", "-o", "it's.html"]
    assert command("explain", Path("plan.json")) == "steelyard explain plan.json"
