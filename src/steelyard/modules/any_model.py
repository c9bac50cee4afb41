"""The chain of any model of transformers: of a known family, or split by its structure once and remembered.

Imports torch and transformers only where a model is not known yet.
"""

import logging
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidProfileError
from steelyard.model.chain import ModelChain
from steelyard.model.families import FAMILIES
from steelyard.model.read import chain_from_config, config_hash, load_config
from steelyard.model.split import ModelSplit
from steelyard.plan.cache import default_folder, digest, keep
from steelyard.plan.file import parse_file

_logger = logging.getLogger(__name__)

SPLIT_VERSION = 2
"""Raised whenever models are split differently."""


def chain_of_any(config: Mapping[str, Any], *, name: str, folder: Path | None = None) -> ModelChain:
    """The chain of a Hugging Face config: of a known family, else split by its structure.

    A split is found and proved once, which takes torch and seconds, and kept in ``folder`` (see `cached_trace`). Raises
    `InvalidModelError` for a type that transformers does not know, and for a model that does not split.
    """
    model_type = str(config.get("model_type", "")) if isinstance(config, Mapping) else ""
    if model_type in FAMILIES or model_type not in _types_of_transformers():
        return chain_from_config(config, name=name)
    key = {"config": config_hash(config), "split": SPLIT_VERSION, "transformers": metadata.version("transformers")}
    path = (folder or default_folder()) / f"split-{digest(key)}.json"
    if path.is_file():
        try:
            found = parse_file(path, ModelSplit, InvalidProfileError, what="split")
            return chain_from_config(config, name=name, split=found)
        except InvalidProfileError as error:
            _logger.warning("split again, since the cached split cannot be read: %s", error)
    from steelyard.modules.split_proof import split_model

    split = split_model(model_type, config)
    keep(path, split.model_dump_json())
    return chain_from_config(config, name=name, split=split)


def load_any_model(name_or_path: str | Path) -> ModelChain:
    """As `steelyard.model.read.load_model`, for models without a family too: see `chain_of_any`."""
    name, config = load_config(name_or_path)
    return chain_of_any(config, name=name)


def _types_of_transformers() -> Collection[str]:
    """The model types that the installed transformers knows."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING.keys()
