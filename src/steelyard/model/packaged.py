"""Splits that come in the package, for packaged models: found ahead, where transformers was at hand.

They are kept by the hash of the config, and hold for the version of transformers that they were made with; where
another one is installed they count as missing, as do those of an older way of splitting. So are the proved splits of
the small models of their structures, by which other models of these need no proof.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from steelyard.installed import is_as_made
from steelyard.model.split import SPLIT_VERSION, ModelSplit


def packaged_split(config_hash: str, *, must_hold: bool = True) -> ModelSplit | None:
    """How the model of a config, or a small one, splits, where the package has it and it holds for what is installed.

    ``must_hold`` is not asked where it is only shown.
    """
    content = _content(config_hash)
    if content is None:
        return None
    holds = content["split_version"] == SPLIT_VERSION and is_as_made(content["made_with"])
    return ModelSplit.model_validate(content["split"]) if holds or not must_hold else None


def packaged_structure(config_hash: str) -> str:
    """The identity of the small model of a packaged model's structure; empty where no split is packaged."""
    content = _content(config_hash)
    return content["structure"] if content else ""


def _content(config_hash: str) -> dict[str, Any] | None:
    file = resources.files("steelyard.model") / "splits" / f"{config_hash}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def packaged_split_text(split: ModelSplit, structure: str, made_with: Mapping[str, str]) -> str:
    """The content of a file that `packaged_split` reads."""
    content: dict[str, Any] = {
        "split_version": SPLIT_VERSION,
        "made_with": dict(made_with),
        "structure": structure,
        "split": split.model_dump(mode="json"),
    }
    return json.dumps(content) + "\n"
