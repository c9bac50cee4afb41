"""Splits of transformers models by their structure: packaged, or found once and cached.

Imports torch and transformers only if a model is not known yet.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from steelyard.errors import UserError, first_line
from steelyard.installed import require_training
from steelyard.model.own import Split
from steelyard.model.read import config_hash, wrong_size
from steelyard.model.small import WIDTH_KEYS
from steelyard.model.split import ModelSplit, wrong_split
from steelyard.modules.kept_splits import keep_split, kept_split
from steelyard.plan.file import default_folder

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields that a config must give if its type knows them, under these names or its own, because their defaults are those
of another model."""
_INSTEAD = {"hidden_size": WIDTH_KEYS, "num_hidden_layers": ("depths",)}
"""Fields that a config may give instead of a needed one, which follows from them."""


def split_of(config: Mapping[str, Any]) -> ModelSplit | None:
    """Return the split of a config's model; None for a type that transformers does not know.

    Raises the errors of `steelyard.model.read.chain_from_config`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return None
    return found_once(json.dumps(dict(config)), default_folder())


def type_of_class(config: Mapping[str, Any]) -> str:
    """Return the model type whose causal class in transformers a config names in its architectures; empty if none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = config.get("architectures")
    return next((each for each, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if named == [name]), "")


@cache
def found_once(content: str, folder: Path) -> ModelSplit | None:
    """Return the split of a config's model, given as JSON: cached in memory or a folder, or found and saved there."""
    config = json.loads(content)
    known = kept_split(config_hash(config), folder)
    if known is not None:
        return known
    model_type = config["model_type"]
    require_training(f"a model of type {model_type!r} is not packaged and has to be split from its structure")
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


@contextmanager
def changed_split_refused(split: Split, own: Callable[[], Split | None]) -> Iterator[None]:
    """Turn any failure on a split that a plan file holds into `InvalidModelError`, if the model splits differently.

    ``own`` finds the split of the model itself, only after a failure; the error names the first place that differs. A
    failure on a split that is equal is not the user's, and stays as it is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        of_model = own()
        of_plan, found = (each and each.model_dump(mode="json", exclude={"text_alone"}) for each in (split, of_model))
        if found is None or of_plan == found:
            raise
        place, value, expected = _first_difference(of_plan, found, "model.split")
        failure = f"{type(error).__name__}: {first_line(error)[:160]}"
        raise wrong_split(
            place, f"{value!r}, for which layers fail ({failure})", f"{expected!r}, the value of the model"
        ) from error


def _first_difference(one: Any, other: Any, place: str) -> tuple[str, Any, Any]:
    """Return the first place where two JSON values differ, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(f"{place}.{key}", one.get(key), other.get(key)) for key in other | one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{place}[{number}]", *pair) for number, pair in enumerate(zip(one, other, strict=True))]
    else:
        return place, one, other
    return next(_first_difference(mine, theirs, where) for where, mine, theirs in pairs if mine != theirs)
