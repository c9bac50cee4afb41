"""Cache of the splits of Transformers models: those in the package, and those in a folder."""

import logging
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from steelyard.errors import InvalidProfileError, UserError
from steelyard.installed import installed_version
from steelyard.model.read import packaged_split
from steelyard.model.split import SPLIT_VERSION, ModelSplit
from steelyard.plan.file import digest, keep, parse_file

_logger = logging.getLogger(__name__)
Schema = TypeVar("Schema", bound=BaseModel)


def kept_split(config_hash: str, folder: Path | None) -> ModelSplit | None:
    """Return the split of a config's model, or of a small model, from the package or a folder; None if not kept."""
    packaged = packaged_split(config_hash)
    path = packaged is None and folder and _path(config_hash, folder)
    return read_kept(path, ModelSplit, "split again, because the cached split cannot be read") if path else packaged


def read_kept(path: Path, schema: type[Schema], notice: str) -> Schema | None:
    """Parse a cached file; return None if it is missing or, with a warning that begins with ``notice``, unreadable."""
    if not path.is_file():
        return None
    try:
        return parse_file(path, schema, InvalidProfileError, what="split")
    except UserError as error:
        _logger.warning("%s: %s", notice, error)
        return None


def keep_split(config_hash: str, split: ModelSplit, folder: Path | None) -> None:
    """Write the split of a model to a folder, if one is given."""
    if folder is not None:
        keep(_path(config_hash, folder), split.model_dump_json())


def _path(config_hash: str, folder: Path) -> Path:
    version = installed_version("transformers")
    return folder / f"split-{digest({'config': config_hash, 'split': SPLIT_VERSION, 'transformers': version})}.json"
