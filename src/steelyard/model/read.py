"""Reads a model: a name from the packaged list, a path to a ``config.json``, or the config itself as a mapping."""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidModelError, nearest
from steelyard.files import read_json
from steelyard.model.chain import ModelChain
from steelyard.model.config_values import check_values
from steelyard.model.families import family_of
from steelyard.model.family import Sizes
from steelyard.model.split import ModelSplit, family_of_split


@cache
def model_names() -> tuple[str, ...]:
    """Names of the packaged configs, sorted."""
    folder = resources.files("steelyard.model") / "configs"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_model(name_or_path: str | Path) -> ModelChain:
    """The chain of a packaged model, or of the config at a path (a file, or a folder that holds ``config.json``).

    Raises `InvalidModelError` if there is no such model, or the config is not of a known family or lacks a size.
    """
    name, config = load_config(name_or_path)
    return chain_from_config(config, name=name)


def load_config(name_or_path: str | Path) -> tuple[str, Mapping[str, Any]]:
    """The name and the config of a packaged model, or of the config at a path; raises `InvalidModelError`."""
    text = str(name_or_path)
    if text in model_names():
        source = resources.files("steelyard.model") / "configs" / f"{text}.json"
        return text, json.loads(source.read_text())
    path = Path(text)
    if os.path.isdir(path):
        path = path / "config.json"
    if not os.path.isfile(path):
        raise InvalidModelError(
            field="model",
            found=repr(text[:200]),
            expected="a packaged model or the path of an existing config.json",
            hint=nearest(text, model_names()),
        )
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise InvalidModelError(
            field="model", found=f"{path}: {error}", expected="a JSON file", hint="check that the file is complete"
        ) from error
    name = path.parent.name if path.name == "config.json" else path.stem
    return name or "model", config


def chain_from_config(config: Mapping[str, Any], *, name: str, split: ModelSplit | None = None) -> ModelChain:
    """The chain of a Hugging Face config, of a family that is known or split as ``split`` says.

    Raises `InvalidModelError` naming the key that is missing or wrong.
    """
    if not isinstance(config, Mapping):
        raise InvalidModelError(field="config", found=type(config).__name__, expected="a JSON object")
    family = family_of_split(split) if split else family_of(str(config.get("model_type", "")))
    check_values(config)
    sizes = Sizes(config)
    layout = family.layout(sizes)
    return ModelChain(
        name=name,
        family=family,
        config=dict(config),
        config_hash=config_hash(config),
        sizes=sizes.read,
        layout=layout,
        split=split,
    )


def config_hash(config: Mapping[str, Any]) -> str:
    """A short identity of a config: equal for equal content, whatever the order of its keys.

    Raises `InvalidModelError` if a value of the config has no form in JSON.
    """
    try:
        canonical = json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidModelError(
            field="config",
            found=str(error),
            expected="values that JSON can hold",
            hint="give the content of config.json",
        ) from error
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
