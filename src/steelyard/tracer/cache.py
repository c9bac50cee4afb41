"""Keeps traces on disk, by everything that enters them, so that a model is traced once.

The key is made without importing torch: a planner that finds its trace here needs no torch at all.
"""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidProfileError
from steelyard.model.chain import ModelChain
from steelyard.model.families import FAMILIES
from steelyard.model.read import chain_from_config, config_hash, load_config
from steelyard.model.split import ModelSplit
from steelyard.plan.file import parse_file
from steelyard.plan.plan import Precision
from steelyard.profiles.profile import Profile

_logger = logging.getLogger(__name__)

TRACER_VERSION = 8
"""Raised whenever the tracer counts differently."""
SPLIT_VERSION = 1
"""Raised whenever models are split differently."""


def cached_trace(
    chain: ModelChain,
    *,
    seq_len: int,
    precision: Precision,
    degrees: tuple[int, ...],
    folder: Path | None = None,
) -> Profile:
    """The traced profile from the cache folder, traced and stored there if it is new.

    ``folder`` defaults to ``$XDG_CACHE_HOME/steelyard/traces`` (``~/.cache`` where unset). A folder that cannot be
    written, or a file in it that cannot be read, costs time and nothing else.
    """
    path = (folder or default_folder()) / f"{_key(chain, seq_len, precision, degrees)}.json"
    if path.is_file():
        try:
            return parse_file(path, Profile, InvalidProfileError, what="profile")
        except InvalidProfileError as error:
            _logger.warning("traced again, since the cached trace cannot be read: %s", error)
    from steelyard.tracer.trace import trace

    profile = trace(chain, seq_len=seq_len, precision=precision, degrees=degrees)
    _keep(path, profile.model_dump_json())
    return profile


def _keep(path: Path, content: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(content)
        scratch.replace(path)
    except OSError as error:
        _logger.warning("not kept for the next time: %s", error)


def default_folder() -> Path:
    """Where traces, and splits of models without a family, are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steelyard" / "traces"


def chain_of_any(config: Mapping[str, Any], *, name: str, folder: Path | None = None) -> ModelChain:
    """The chain of a Hugging Face config: of a known family, else split by its structure.

    A split is found and proved once, which takes torch and seconds, and kept in ``folder`` (see `cached_trace`). Raises
    `InvalidModelError` for a type that transformers does not know, and for a model that does not split.
    """
    model_type = str(config.get("model_type", "")) if isinstance(config, Mapping) else ""
    if model_type in FAMILIES or model_type not in _types_of_transformers():
        return chain_from_config(config, name=name)
    key = {"config": config_hash(config), "split": SPLIT_VERSION, "transformers": metadata.version("transformers")}
    path = (folder or default_folder()) / f"split-{_digest(key)}.json"
    if path.is_file():
        try:
            found = parse_file(path, ModelSplit, InvalidProfileError, what="split")
            return chain_from_config(config, name=name, split=found)
        except InvalidProfileError as error:
            _logger.warning("split again, since the cached split cannot be read: %s", error)
    from steelyard.modules.split_proof import split_model

    split = split_model(model_type, config)
    _keep(path, split.model_dump_json())
    return chain_from_config(config, name=name, split=split)


def load_any_model(name_or_path: str | Path) -> ModelChain:
    """As `steelyard.model.read.load_model`, for models without a family too: see `chain_of_any`."""
    name, config = load_config(name_or_path)
    return chain_of_any(config, name=name)


def _types_of_transformers() -> Collection[str]:
    """The model types that the installed transformers knows."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING.keys()


def _key(chain: ModelChain, seq_len: int, precision: Precision, degrees: tuple[int, ...]) -> str:
    entries = {
        "config": chain.config_hash,
        "name": chain.name,
        "seq_len": seq_len,
        "precision": precision,
        "degrees": sorted(degrees),
        "tracer": TRACER_VERSION,
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "attention": "sdpa",
    }
    return _digest(entries)


def _digest(entries: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:24]
