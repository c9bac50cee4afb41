"""Where what takes long to find is kept between runs: traces, and how models split."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

_logger = logging.getLogger(__name__)


def default_folder(what: str = "traces") -> Path:
    """Where traces are kept, and how models split; or what else has a folder beside theirs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steelyard" / what


def keep(path: Path, content: str) -> None:
    """Writes a file of the cache; where that fails, says so in the log and goes on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(content)
        scratch.replace(path)
    except OSError as error:
        _logger.warning("not kept for the next time: %s", error)


def digest(entries: Mapping[str, object]) -> str:
    """A short name for everything that enters a file of the cache."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:24]
