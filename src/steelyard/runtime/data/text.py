"""The documents of a text: a file is one, a folder has one for each of its text files, JSON lines one for each line.

| path                    | documents                                                                     |
|-------------------------|-------------------------------------------------------------------------------|
| a text file             | its content                                                                   |
| ``.jsonl``, ``.ndjson`` | the value of one key (``text`` unless told otherwise) of each line's object   |
| a folder                | those of its text files, folder by folder in the order of their names         |

In a folder hidden files, links, binary files and files that are no UTF-8 are left out; a file that is named directly
must be text.
"""

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path

from steelyard.errors import InvalidDataError

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_TEXT_SUFFIXES = (
    *(".md", ".rst", ".tex", ".txt"),
    *(".cfg", ".csv", ".css", ".html", ".json", ".toml", ".tsv", ".xml", ".yaml", ".yml"),
    *(".c", ".cc", ".cpp", ".go", ".h", ".hpp", ".java", ".js", ".py", ".pyi", ".rs", ".sh", ".ts"),
    *JSON_LINES_SUFFIXES,
)
_PROBED_BYTES = 1 << 16


def documents(path: Path, *, text_key: str) -> Iterator[str]:
    """The documents at ``path`` in order; raises `InvalidDataError` for a line that has no text."""
    for file in text_files(path):
        if file.suffix in JSON_LINES_SUFFIXES:
            yield from _json_lines(file, text_key)
        elif path.is_dir():
            yield from _readable(file)
        else:
            check_is_text(file)
            yield _decoded(file)


def text_files(path: Path) -> list[Path]:
    """The file at ``path``, or the text files below the folder, in the order in which they are read."""
    if path.is_file():
        return [path]
    found: list[Path] = []
    for where, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            file = Path(where) / name
            if file.suffix.lower() in _TEXT_SUFFIXES and not name.startswith(".") and not file.is_symlink():
                found.append(file)
    return found


def check_is_text(file: Path) -> None:
    """Raises `InvalidDataError` if the beginning of a file is not UTF-8 text."""
    with file.open("rb") as opened:
        beginning = opened.read(_PROBED_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError as error:
        raise _no_text(file, str(error)) from error
    if b"\0" in beginning:
        raise _no_text(file, "a zero byte")


def _decoded(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _no_text(file, str(error)) from error


def _no_text(file: Path, reason: str) -> InvalidDataError:
    return InvalidDataError(
        found=f"no text in {file} ({reason})",
        expected="UTF-8 text, JSON lines, or token ids in a .npy or .bin file",
        hint="convert the file, or name it as what it is",
    )


def _readable(file: Path) -> Iterator[str]:
    """The content of a file of a folder; nothing where it is empty, unreadable, binary or not UTF-8."""
    try:
        content = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return
    if content and "\0" not in content:
        yield content


def _json_lines(file: Path, text_key: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise _bad_line(file, number, f"no JSON ({error})", text_key) from error
            if not isinstance(entry, dict) or not isinstance(entry.get(text_key), str):
                keys = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
                raise _bad_line(file, number, keys or "an empty object", text_key)
            yield entry[text_key]


def _bad_line(file: Path, number: int, found: str, text_key: str) -> InvalidDataError:
    return InvalidDataError(
        found=f"{found} in line {number} of {file}",
        expected=f"a JSON object with a string under {text_key!r}",
        hint="name the key that holds the text with --text-key",
    )
