"""Splits that come in the package, for packaged models without a family: found ahead, where transformers was at hand.

They are kept by the hash of the config, and hold for the version of transformers that they were made with; where
another one is installed they count as missing, as do those of an older way of splitting.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from steelyard.installed import is_as_made
from steelyard.model.split import SPLIT_VERSION, ModelSplit


def packaged_split(config_hash: str, *, must_hold: bool = True) -> ModelSplit | None:
    """How the model of a config splits, where that comes in the package and holds for what is installed.

    ``must_hold`` is not asked where it is only shown.
    """
    file = resources.files("steelyard.model") / "splits" / f"{config_hash}.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    holds = content["split_version"] == SPLIT_VERSION and is_as_made(content["made_with"])
    if must_hold and not holds:
        return None
    return ModelSplit.model_validate(content["split"])


def packaged_split_text(split: ModelSplit, made_with: Mapping[str, str]) -> str:
    """The content of a file that `packaged_split` reads."""
    content: dict[str, Any] = {
        "split_version": SPLIT_VERSION,
        "made_with": dict(made_with),
        "split": split.model_dump(mode="json"),
    }
    return json.dumps(content) + "\n"
