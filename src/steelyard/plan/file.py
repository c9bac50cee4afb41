"""Versioned JSON files: plans, other values of the package, and the cache of traces and splits.

A mistake in a file becomes one error that names the key, the value found and the value expected. The cache keeps
expensive results between runs; if it cannot be written, a warning is logged and nothing else fails.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from steelyard.errors import InvalidPlanError, UserError, nearest
from steelyard.files import read_json
from steelyard.output import write_file
from steelyard.plan.plan import Plan

_logger = logging.getLogger(__name__)


def default_folder(what: str = "traces") -> Path:
    """Return the cache folder of traces and model splits, or its sibling folder ``what``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steelyard" / what


def keep(path: Path, content: str) -> None:
    """Write a cache file; log a warning if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(content)
        scratch.replace(path)
    except OSError as error:
        _logger.warning("not cached: %s", error)


def digest(entries: Mapping[str, object]) -> str:
    """Return a short key for everything that determines a cache file."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:24]


FileModel = TypeVar("FileModel", bound=BaseModel)


def read_plan(path: str | Path) -> Plan:
    """Read the plan in a file. Raise `InvalidPlanError` if the file is missing, truncated, or not a valid plan."""
    return parse_file(Path(path), Plan, InvalidPlanError, what="plan")


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON that `read_plan` reads back to an equal plan. Raise `UserError` if it cannot be written."""
    write_file(Path(path), dump_json(plan) + "\n", "plan")


def dump_json(value: BaseModel) -> str:
    """Return the value as indented JSON with short lists on one line, keys in the order of the model."""
    return _dump(value.model_dump(mode="json", exclude_none=True), indent=0)


def parse_file(path: Path, model: type[FileModel], error_type: type[UserError], *, what: str) -> FileModel:
    """Read the JSON file at ``path`` as a ``model``; every failure is an ``error_type``."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        written = "; `steelyard plan MODEL --cluster CLUSTER -o plan.json` writes one" if what == "plan" else ""
        raise error_type(
            field=what, found=f"no file {path}", expected=f"the path of a {what} file", hint=f"check the path{written}"
        ) from None
    except (OSError, ValueError) as error:
        raise error_type(
            field=what,
            found=f"{path}: {error}",
            expected=f"a complete JSON file written by steelyard {what}",
            hint="the file is damaged or not JSON; write it again",
        ) from error
    return parse_value(content, model, error_type, what=what)


def parse_value(content: Any, model: type[FileModel], error_type: type[UserError], *, what: str) -> FileModel:
    """Validate JSON-like ``content`` as a ``model``; every failure is an ``error_type``."""
    version = content.get("version") if isinstance(content, dict) else None
    known = model.model_fields.get("version")
    supported = None if known is None or known.is_required() else known.default
    if version is not None and supported is not None and version != supported:
        raise error_type(
            field="version",
            found=repr(version),
            expected=f"{supported}, the {what} version that this steelyard reads",
            hint="write the file again with this steelyard",
        )
    try:
        return model.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise first_error(error, model, error_type) from error
    except RecursionError:
        raise error_type(field="file", found="values nested too deep", expected=f"a {what} in JSON") from None


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
_LINE_WIDTH = 110
_SHOWN_WIDTH = 120
_LENGTHS = {"too_short": "at least {min_length} in the list", "too_long": "at most {max_length} in the list"}


def _dump(value: Any, *, indent: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list):
        return flat
    items = value.values() if isinstance(value, dict) else value
    is_nested = any(isinstance(item, dict) for item in items) or (isinstance(value, dict) and len(value) > 8)
    if len(flat) + indent <= _LINE_WIDTH and not is_nested:
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        rows = [
            f"{pad}{json.dumps(key, ensure_ascii=False)}: {_dump(item, indent=indent + 2)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    rows = [pad + _dump(item, indent=indent + 2) for item in value]
    return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"
