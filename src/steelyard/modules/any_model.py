"""How any model of transformers splits by its structure: as packaged, or found once and remembered.

Imports torch and transformers only where a model is not known yet.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from steelyard.installed import require_training
from steelyard.model.family import wrong_size
from steelyard.model.read import config_hash
from steelyard.model.small import WIDTH_KEYS
from steelyard.model.split import ModelSplit
from steelyard.modules.kept_splits import keep_split, kept_split
from steelyard.plan.file import default_folder

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Where a type knows them, under these names or its own, what a config must give: else they are another's."""
_INSTEAD = {"hidden_size": WIDTH_KEYS, "num_hidden_layers": ("depths",)}
"""What a config may give in the place of one of these, from which it follows."""


def split_of(config: Mapping[str, Any]) -> ModelSplit | None:
    """How the model of a config splits; None for a type that transformers does not know.

    Raises as `steelyard.model.read.chain_from_config`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return None
    return found_once(json.dumps(dict(config)), default_folder())


@cache
def found_once(content: str, folder: Path) -> ModelSplit | None:
    """How the model of a config, as JSON, splits: as remembered, as kept in a folder, or found and kept there."""
    config = json.loads(content)
    known = kept_split(config_hash(config), folder)
    if known is not None:
        return known
    model_type = config["model_type"]
    require_training(f"a model of type {model_type!r} is not packaged and has to be split by its structure")
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    from steelyard.modules.build import read_hub_config
    from steelyard.modules.split_proof import split_model

    for key in (each for each in _NEEDED if not any(map(config.get, (each, *_INSTEAD.get(each, ()))))):
        hub_config = read_hub_config(model_type, config)
        own = type(hub_config).attribute_map.get(key, key)
        if config.get(own) is None and own in hub_config.to_dict():
            raise wrong_size(own, None)
    split = split_model(model_type, config, folder)
    keep_split(config_hash(config), split, folder)
    return split
