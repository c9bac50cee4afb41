"""Reads the text, JSON and YAML of files that a user names, within bounds that no file of ours comes near.

A file that is too long, nested too deep or of too many parts is refused before it takes time or memory, whatever is in
it: what stands behind a path may be a device without an end, and a few aliases of YAML can stand for billions of
values. Everything that cannot be read raises `OSError` or `ValueError` with a reason in words, which each reader turns
into an error of its own.
"""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from steelyard.units import KIB, MIB, format_bytes

MOST_BYTES = 64 * MIB
"""Of a JSON file: cost tables of 16 devices take 37 MiB."""
MOST_YAML_BYTES = 64 * KIB
"""Of a YAML file, of which people write a page; its parser takes a second for each few hundred kilobytes."""
MOST_DEPTH = 64
MOST_CONTAINERS = 2**20
"""Objects and lists of a file."""
MOST_VALUES = 2**23
MOST_KEYS = 2**18
"""Keys of one object: the index of a model with many experts names a hundred thousand tensors."""
MOST_YAML_VALUES = 2**14
"""With what aliases stand for counted as often as they occur."""

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: str | Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8; raises `ValueError` where it is longer than ``most_bytes`` or no text."""
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"more than {format_bytes(most_bytes)}, which no such file has")
    return content.decode("utf-8")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file of at most `MOST_BYTES`."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """The value that a JSON text describes, whose objects have no key twice."""
    num_objects, num_lists, num_keys, num_others = (text.count(mark) for mark in "{[:,")
    if num_objects + num_lists > MOST_CONTAINERS or num_keys + num_others > MOST_VALUES:
        raise ValueError(f"{num_objects + num_lists + num_keys + num_others} values, more than any such file has")
    if num_keys > MOST_KEYS * max(num_objects, 1):
        raise ValueError(f"{num_keys} keys, more than {MOST_KEYS} in an object")
    try:
        content = json.loads(text, object_pairs_hook=_distinct_keys)
    except RecursionError:
        raise _too_deep() from None
    check_json(content, most_values=MOST_VALUES)
    if _HALF_CHARACTER.search(text):
        json.dumps(content, ensure_ascii=False).encode()  # refuses what no terminal and no file can take
    return content


def parse_yaml(text: str) -> Any:
    """The value that a YAML text describes, of what JSON could hold too."""
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"more than {format_bytes(MOST_YAML_BYTES)}, which no such file has")
    try:
        content = yaml.safe_load(text)
    except RecursionError:
        raise _too_deep() from None
    except (yaml.YAMLError, AttributeError, LookupError, TypeError) as error:  # of its parser, at a misused tag
        raise ValueError(f"no valid YAML: {error}") from error
    check_json(content, most_values=MOST_YAML_VALUES)
    json.dumps(content, ensure_ascii=False).encode()
    return content


def read_packaged_yaml(package: str, name: str) -> Any:
    """What a YAML file of ours holds, by the fast parser where PyYAML was built with it."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def check_json(content: Any, *, most_values: int) -> None:
    """Raises `ValueError` for a value that JSON cannot hold, nested deeper than `MOST_DEPTH`, or of too many parts.

    One that holds itself is nested without end.
    """
    level, num_values = [content], 0
    for _ in range(MOST_DEPTH):
        num_values += len(level)
        if num_values > most_values:
            raise ValueError(f"more than {most_values} values, counted as often as they occur")
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                _check_keys(value)
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif not isinstance(value, str | int | float | None):
                raise ValueError(f"{value!r:.40}, a {type(value).__name__}, which JSON cannot hold")
            if len(inner) > most_values:
                break
        if not inner:
            return
        level = inner
    raise _too_deep()


def _check_keys(value: dict[Any, Any]) -> None:
    if len(value) > MOST_KEYS:
        raise ValueError(f"an object of {len(value)} keys, more than {MOST_KEYS}")
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise ValueError(f"the key {wrong[0]!r:.40}, which is no text")


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict; raises ValueError for a repeated key, of which JSON would silently keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated!r:.80} is there twice")
    return found


def _too_deep() -> ValueError:
    return ValueError(f"values nested too deep, more than {MOST_DEPTH} levels")
