"""Cache of traces on disk, by everything that a trace depends on, so that a model is traced once.

Traces of the package (`steelyard.tracer.packaged`) are looked up after the folder. The key is made without importing
torch: planning needs no torch if the trace is in either place.
"""

import logging
from functools import cache, partial
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidProfileError
from steelyard.installed import TRAINING, installed_version, require_training
from steelyard.model.chain import ModelChain
from steelyard.modules.any_model import changed_split_refused, split_of
from steelyard.plan.file import default_folder, digest, keep, parse_file
from steelyard.precision import LayerPrecision
from steelyard.profiles.profile import Profile
from steelyard.tracer.packaged import ATTENTION, TRACER_VERSION, packaged_lengths, packaged_trace

_logger = logging.getLogger(__name__)


def cached_trace(
    chain: ModelChain,
    *,
    seq_len: int,
    precision: LayerPrecision,
    degrees: tuple[int, ...],
    folder: Path | None = None,
    own: Any = None,
    with_products: bool = False,
    fp32_adapters: bool = False,
) -> Profile:
    """Return the traced profile from the cache folder or the package; trace and store it in the folder if it is new.

    ``folder`` defaults to ``$XDG_CACHE_HOME/steelyard/traces`` (``~/.cache`` where unset). A folder that cannot be
    written, or a file in it that cannot be read, only costs time. ``own`` is a user's own module, if the chain is of
    one (`steelyard.modules.own_pieces.OwnModel`). ``with_products`` asks for shapes of matrix products, which the
    package leaves out; ``fp32_adapters`` is as in `steelyard.tracer.layer.TracedLayer`.

    Raises `NotInstalledError` if the model has to be traced and torch is not installed, and `InvalidModelError` if
    tracing fails on a split from a plan file.
    """
    if precision == "fp16":  # as wide as bf16, and only widths are counted
        options: dict[str, Any] = {"with_products": with_products, "fp32_adapters": fp32_adapters}
        same = cached_trace(
            chain, seq_len=seq_len, precision="bf16", degrees=degrees, folder=folder, own=own, **options
        )
        return same.model_copy(update={"identity": same.identity.model_copy(update={"precision": precision})})
    path = (folder or default_folder()) / f"{_key(chain, seq_len, precision, degrees, fp32_adapters)}.json"
    if path.is_file():
        try:
            return parse_file(path, Profile, InvalidProfileError, what="profile")
        except InvalidProfileError as error:
            _logger.warning("traced again, because the cached trace cannot be read: %s", error)
    if chain.split.module and own is None:
        raise InvalidProfileError(
            field="trace",
            found=f"no trace of {chain.split.module} with this torch on this machine",
            expected="a trace cached by planning, or the module itself",
            hint="plan again with the module; the prediction in the plan remains valid",
        )
    packaged = None
    if chain.freeze is None and not chain.changes and not with_products:
        packaged = packaged_trace(chain, seq_len=seq_len, precision=precision, degrees=degrees)
    if packaged is not None:
        return packaged
    part = f" with {chain.freeze.of} frozen" if chain.freeze else ""
    what = f"the trace of {chain.name}{part} at {seq_len} tokens in {precision} for {max(degrees)} devices per node"
    there = "" if chain.freeze else packaged_lengths(chain, precision)
    require_training(f"{what} is neither packaged nor cached" + (f" (packaged: {there})" if there else ""))
    from steelyard.tracer.trace import trace

    with changed_split_refused(chain.split, partial(split_of, chain.config)):
        profile = trace(
            chain, seq_len=seq_len, precision=precision, degrees=degrees, own=own, fp32_adapters=fp32_adapters
        )
    keep(path, profile.model_dump_json())
    _say_kept(path.parent)
    return profile


@cache
def _say_kept(folder: Path) -> None:
    """Log once per process where traces are kept."""
    _logger.info("traced with torch; traces are cached in %s", folder)


def _key(
    chain: ModelChain, seq_len: int, precision: LayerPrecision, degrees: tuple[int, ...], fp32_adapters: bool
) -> str:
    entries: dict[str, Any] = {
        "config": chain.config_hash,
        "name": chain.name,
        "seq_len": seq_len,
        "precision": precision,
        "degrees": sorted({1, *degrees}),  # undivided layers are always traced
        "tracer": TRACER_VERSION,
        **{name: installed_version(name) for name in TRAINING},
        "attention": ATTENTION,
    }
    for name, part in (("split", chain.split), ("frozen", chain.freeze)):
        entries |= {name: part.model_dump_json()} if part else {}
    if chain.changes:
        entries |= {"changes": list(map(str, chain.changes)), "peft": installed_version("peft")}
        entries |= {"adapters": "fp32"} if fp32_adapters else {}
    return digest(entries)
