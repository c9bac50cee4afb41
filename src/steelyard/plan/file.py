"""Versioned JSON files: plans, other values of the package, and the cache of traces and splits.

A mistake in a file becomes one error that names the key, the value found and the value expected. The cache keeps
expensive results between runs; if it cannot be written, a warning is logged and nothing else fails.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from steelyard.arguments import checked
from steelyard.errors import InvalidPlanError, UserError
from steelyard.files import first_error, read_json
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


_WRITERS = {"problem": "plan --save-problem", "record": "train --record"}
"""Commands that write a file, if they do not have its name."""
FileModel = TypeVar("FileModel", bound=BaseModel)


@checked
def read_plan(path: str | Path) -> Plan:
    """Read the plan in a file. Raise `InvalidPlanError` if the file is missing, truncated, or not a valid plan."""
    return parse_file(Path(path), Plan, InvalidPlanError, what="plan")


@checked
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
            expected=f"a complete JSON file written by steelyard {_WRITERS.get(what, what)}",
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


_LINE_WIDTH = 110


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
