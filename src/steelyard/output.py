"""What is written and printed: a place is tried before the work, a file is there as a whole or not at all.

A file is written beside its place under another name and then renamed, so that a full disk, a signal or a loss of power
leaves what was there before. What is no file (a pipe, a device) is written as it is.
"""

import errno
import io
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from steelyard.errors import UserError

_HINTS = {
    errno.ENOENT: "make its folder first, or write elsewhere",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.ENOSPC: "make room there, or write elsewhere",
    errno.ENAMETOOLONG: "take a shorter name",
}
_BLOCK = b"\0" * 4096
"""A disk that has no room for this is full."""


def command(*words: object) -> str:
    """A ``steelyard`` command as a shell takes it: words that hold blanks are quoted."""
    return shlex.join(("steelyard", *map(str, words)))


def check_file(path: Path, option: str, *, makes_folder: bool = False) -> None:
    """Raises `UserError`, naming ``option``, unless a file can be written at ``path``; writes nothing there.

    With ``makes_folder`` its folder will be made where there is none.
    """
    with explained(path, option):
        if _is_there(path) and path.exists():
            if path.is_dir():
                raise _error(errno.EISDIR)
            if not os.access(path, os.W_OK):
                raise _error(errno.EACCES)
        if not _is_stream(path):
            (_try_folder if makes_folder else _try_block)(_target(path).parent)


def check_folder(path: Path, option: str) -> None:
    """Raises `UserError`, naming ``option``, unless ``path`` is a folder, or can be made one, that can be written."""
    with explained(path, option):
        _try_folder(path)


def make_folder(path: Path, option: str) -> None:
    """Makes a folder where there is none; raises `UserError`, naming ``option``, unless it can be written."""
    with explained(path, option):
        path.mkdir(parents=True, exist_ok=True)
        _try_block(path)


def write_file(path: Path, text: str, option: str) -> None:
    """Writes a text as UTF-8, as a whole or not at all; raises `UserError`, naming ``option``, where it cannot be."""
    write_files({path: text}, option)


def write_files(files: Mapping[Path, str], option: str) -> None:
    """Writes the texts of several files, none where one cannot be written; otherwise as `write_file`."""
    parts: dict[Path, Path] = {}
    try:
        for path, text in files.items():
            with explained(path, option):
                if _is_stream(path):
                    path.write_text(text, encoding="utf-8")
                    continue
                parts[path] = _target(path).with_name(_part_name())
                _write_part(parts[path], text, like=path)
        for path, part in parts.items():
            with explained(path, option):
                part.replace(_target(path))
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()


def escape_unprintable() -> None:
    """Has characters that the encoding of a terminal or pipe lacks printed as escapes; else they would be errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Prints at once, for whoever listens: once nobody does (``| head -1``), this and all that follows is dropped."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _write_part(part: Path, text: str, *, like: Path) -> None:
    with part.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if like.exists():
        if like.is_dir():
            raise _error(errno.EISDIR)
        shutil.copymode(like, part)


def _try_folder(path: Path) -> None:
    missing = []
    while not _is_there(path):
        missing.append(path.name)
        path = path.parent
    for name in missing:
        _is_there(path / name)
    _try_block(path)


def _try_block(folder: Path) -> None:
    part = folder / _part_name()
    try:
        with part.open("xb") as file:
            file.write(_BLOCK)
            file.flush()
            os.fsync(file.fileno())
    finally:
        with suppress(OSError):
            part.unlink()


def _target(path: Path) -> Path:
    """What a link leads to, be it there or not."""
    return Path(os.path.realpath(path))


def _part_name() -> str:
    return f".steelyard-{secrets.token_hex(8)}"


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_there(path: Path) -> bool:
    """Whether something is there; raises `OSError` where nothing can be, as for a name that is too long."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@contextmanager
def explained(path: Path, option: str) -> Iterator[None]:
    """Makes an `OSError` of the work inside a `UserError` about ``path``, naming ``option``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            field=option,
            found=f"{path}: {error.strerror}",
            expected="a place that can be written",
            hint=_HINTS.get(error.errno or 0, "check the path and its permissions"),
        ) from error
