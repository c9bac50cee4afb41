"""Output: paths are checked before the work, and files are written as a whole or not at all.

A file is written under another name in the same folder and then renamed, so a full disk, a signal or a loss of power
leaves the previous file intact. Pipes and devices are written directly.
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
    errno.ENOENT: "create the folder first, or write elsewhere",
    errno.EISDIR: "name a file in the folder",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.ENOSPC: "free disk space, or write elsewhere",
    errno.ENAMETOOLONG: "use a shorter name",
}
_BLOCK = b"\0" * 4096
"""Data that is written to test whether a disk is full."""


def command(*words: object) -> str:
    """Return a ``steelyard`` command for a shell, with words that contain blanks quoted."""
    return shlex.join(("steelyard", *map(str, words)))


def check_file(path: Path, option: str, *, makes_folder: bool = False) -> None:
    """Raise `UserError`, naming ``option``, unless a file can be written at ``path``. Nothing is written there.

    With ``makes_folder``, its folder will be created later if it is missing.
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
    """Raise `UserError`, naming ``option``, unless ``path`` is a writable folder or can be created as one."""
    with explained(path, option):
        _try_folder(path)


def make_folder(path: Path, option: str) -> None:
    """Create a folder if it is missing. Raises `UserError`, naming ``option``, unless it is writable."""
    with explained(path, option):
        path.mkdir(parents=True, exist_ok=True)
        _try_block(path)


def write_file(path: Path, text: str, option: str) -> None:
    """Write a text as UTF-8, as a whole or not at all. Raises `UserError`, naming ``option``, if it fails."""
    write_files({path: text}, option)


def write_files(files: Mapping[Path, str], option: str) -> None:
    """Write the texts of several files like `write_file`, or none of them if one cannot be written."""
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
    """Print characters that the encoding of a terminal or pipe lacks as escapes instead of raising errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print immediately. Once the reader is gone (``| head -1``), this and all further text is dropped."""
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
    """Return the target of a link, whether it exists or not."""
    return Path(os.path.realpath(path))


def _part_name() -> str:
    return f".steelyard-{secrets.token_hex(8)}"


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_there(path: Path) -> bool:
    """Return whether the path exists. Raises `OSError` if it cannot exist, for example if a name is too long."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@contextmanager
def explained(path: Path, option: str) -> Iterator[None]:
    """Turn an `OSError` inside the context into a `UserError` about ``path``, naming ``option``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            field=option,
            found=f"{path}: {error.strerror}",
            expected="a writable place",
            hint=_HINTS.get(error.errno or 0, "check the path and its permissions"),
        ) from error
