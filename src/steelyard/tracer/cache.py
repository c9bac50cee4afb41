"""Keeps traces on disk, by everything that enters them, so that a model is traced once.

The key is made without importing torch: a planner that finds its trace here needs no torch at all.
"""

import logging
from importlib import metadata
from pathlib import Path

from steelyard.errors import InvalidProfileError
from steelyard.model.chain import ModelChain
from steelyard.plan.cache import default_folder, digest, keep
from steelyard.plan.file import parse_file
from steelyard.plan.plan import Precision
from steelyard.profiles.profile import Profile

_logger = logging.getLogger(__name__)

TRACER_VERSION = 10
"""Raised whenever the tracer counts differently."""


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
    keep(path, profile.model_dump_json())
    return profile


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
    return digest(entries)
