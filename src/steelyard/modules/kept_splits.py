"""Splits of models of transformers that were found before: those of the package, and those kept in a folder."""

import logging
from pathlib import Path

from steelyard.errors import InvalidProfileError, UserError
from steelyard.installed import installed_version
from steelyard.model.read import packaged_split
from steelyard.model.split import SPLIT_VERSION, ModelSplit
from steelyard.plan.file import digest, keep, parse_file

_logger = logging.getLogger(__name__)


def kept_split(config_hash: str, folder: Path | None) -> ModelSplit | None:
    """Return the split of a config's model, or of a small model, from the package or a folder; None if not kept."""
    packaged = packaged_split(config_hash)
    path = packaged is None and folder and _path(config_hash, folder)
    if not path or not path.is_file():
        return packaged
    try:
        return parse_file(path, ModelSplit, InvalidProfileError, what="split")
    except UserError as error:
        _logger.warning("split again, since the cached split cannot be read: %s", error)
        return None


def keep_split(config_hash: str, split: ModelSplit, folder: Path | None) -> None:
    """Keeps how a model splits in a folder, where there is one."""
    if folder is not None:
        keep(_path(config_hash, folder), split.model_dump_json())


def _path(config_hash: str, folder: Path) -> Path:
    version = installed_version("transformers")
    return folder / f"split-{digest({'config': config_hash, 'split': SPLIT_VERSION, 'transformers': version})}.json"
