"""Reading of text, JSON and YAML files that a user names, within bounds far above the files of steelyard.

A file that is too long, nested too deep or has too many parts is refused before it costs time or memory, because a path
may be an endless device, and a few YAML aliases can stand for billions of values. If a file cannot be read, the reader
raises `OSError` or `ValueError` with a reason in words, which each caller turns into its own error.
"""

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from steelyard.errors import UserError, nearest
from steelyard.units import KIB, MIB, format_bytes

MOST_BYTES = 64 * MIB
"""Maximum size of a JSON file in bytes. Cost tables of 16 devices have 37 MiB."""
MOST_YAML_BYTES = 64 * KIB
"""Maximum size of a YAML file in bytes. People write a page, and the parser needs a second per few hundred
kilobytes."""
MOST_DEPTH = 64
MOST_CONTAINERS = 2**20
"""Maximum number of objects and lists in a file."""
MOST_VALUES = 2**23
MOST_KEYS = 2**18
"""Maximum number of keys of one object. The index of a model with many experts names a hundred thousand tensors."""
MOST_YAML_VALUES = 2**14
"""Maximum number of values of a YAML file, with aliased values counted at every occurrence."""

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class FilePart(BaseModel):
    """Base class of all parts of the package's own files: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def read_text(path: str | Path, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file in UTF-8. Raises `ValueError` if it is longer than ``most_bytes`` or no text."""
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"more than {format_bytes(most_bytes)}, the limit for such files")
    return content.decode("utf-8")


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file of at most `MOST_BYTES`."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if an object has a key twice."""
    num_objects, num_lists, num_keys, num_others = (text.count(mark) for mark in "{[:,")
    if num_objects + num_lists > MOST_CONTAINERS or num_keys + num_others > MOST_VALUES:
        raise ValueError(
            f"{num_objects + num_lists + num_keys + num_others} values, more than the limit for such files"
        )
    if num_keys > MOST_KEYS * max(num_objects, 1):
        raise ValueError(f"{num_keys} keys, more than {MOST_KEYS} in an object")
    try:
        content = json.loads(text, object_pairs_hook=_distinct_keys)
    except RecursionError:
        raise _too_deep() from None
    check_json(content, most_values=MOST_VALUES)
    if _HALF_CHARACTER.search(text):
        json.dumps(content, ensure_ascii=False).encode()  # refuses text that no terminal and no file can hold
    return content


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, restricted to values that JSON can hold."""
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"more than {format_bytes(MOST_YAML_BYTES)}, the limit for such files")
    try:
        content = yaml.safe_load(text)
    except RecursionError:
        raise _too_deep() from None
    except (yaml.YAMLError, AttributeError, LookupError, TypeError) as error:  # of its parser, at a misused tag
        raise ValueError(f"not valid YAML: {error}") from error
    check_json(content, most_values=MOST_YAML_VALUES)
    json.dumps(content, ensure_ascii=False).encode()
    return content


def read_packaged_yaml(package: str, name: str) -> Any:
    """Return the content of a packaged YAML file, read by the fast parser if PyYAML was built with it."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def check_json(content: Any, *, most_values: int) -> None:
    """Raise `ValueError` if JSON cannot hold a value, or if it is nested deeper than `MOST_DEPTH` or too large.

    A value that contains itself is nested infinitely deep.
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
                raise ValueError(f"{value!r:.40}, a {type(value).__name__}, which JSON does not support")
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
        raise ValueError(f"the key {wrong[0]!r:.40}, which is not a string")


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ValueError for a repeated key, because JSON would silently keep the last
    value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated!r:.80} twice")
    return found


def _too_deep() -> ValueError:
    return ValueError(f"values nested too deep, more than {MOST_DEPTH} levels")


def first_error(error: ValidationError, model: type[BaseModel], error_type: type[UserError]) -> UserError:
    """Return the most informative mistake: a misspelt key rather than the missing key that it was meant to be."""
    details = error.errors()
    detail = next((entry for entry in details if entry["type"] == "extra_forbidden"), details[0])
    location = detail["loc"]
    field = _dotted(part for part in location if part not in _CLASSES) or "file"
    if detail["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        return error_type(
            field=field,
            found=f"the unknown key {location[-1]!r}",
            expected="one of " + ", ".join(known),
            hint=_REMOVED_KEYS.get(str(location[-1])) or nearest(str(location[-1]), known),
        )
    if detail["type"] == "missing":
        return error_type(field=field, found="nothing", expected="a value: this key is required", hint="add the key")
    text = repr(detail["input"])
    return error_type(
        field=field,
        found=text if len(text) <= _SHOWN_WIDTH else text[:_SHOWN_WIDTH] + "…",
        expected=_LENGTHS.get(detail["type"], "").format(**detail.get("ctx", {}))
        or detail["msg"].removeprefix("Input should be "),
        hint=detail.get("ctx", {}).get("hint", "correct the value"),
    )


_CLASSES = ("ModelSplit", "OwnSplit")
"""Class names that pydantic inserts into the location of a mistake when a value may be of several classes."""


def _dotted(location: Iterable[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the part of the file at ``location`` may have."""
    current: list[type[BaseModel]] = [model]
    for part in (each for each in location if isinstance(each, str)):
        if part in _CLASSES:
            current = [each for each in current if each.__name__ == part]
        elif current:
            types = _model_types(current[0].model_fields[part].annotation)
            current = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
    return list(current[0].model_fields) if current else []


def _model_types(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    found = [annotation]
    for argument in arguments:
        found.extend(_model_types(argument))
    return found


_REMOVED_KEYS = {
    "spares": "remove the key: `steelyard train --elastic` plans when a node is lost",
    "gathered_entries": "remove the key: a loss over pairs is no longer supported",
}
_SHOWN_WIDTH = 120
_LENGTHS = {"too_short": "at least {min_length} in the list", "too_long": "at most {max_length} in the list"}
