r"""Traces kept for later: in a cache on disk, by everything that a trace depends on, and in the package.

The key is made without importing torch: planning needs no torch if the trace is in either place. The package is looked
up after the folder.

A packaged trace holds the profile of a model at three lengths of each span of lengths, or at a length by itself.
Whatever a layer does or holds is a sum over its operations of products of shapes, and in no operation does the length
stand more than twice; so at another length $S$ of the span every quantity $q$ lies on the parabola through its values
at the three,

$$q(S) = \sum_i q(S_i) \prod_{j \ne i} \frac{S - S_j}{S_i - S_j}$$

computed in whole numbers. That the largest of several bytes (a peak) is the same sum in a whole span is no law, so
whoever makes a packaged trace compares it with traces at further lengths, the ends of the span among them, and packages
single lengths where it misses (`benchmarks/package_traces.py`).

What enters a trace is kept with it, as in the key of the cache; one made otherwise than the tracer of today would, or
than the installed torch and transformers would, counts as missing.
"""

import gzip
import json
import logging
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache, partial
from importlib import resources
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

from steelyard.errors import InvalidProfileError, UserError, first_line
from steelyard.installed import TRAINING, installed_version, is_as_made, require_training
from steelyard.model.chain import ModelChain
from steelyard.modules.any_model import changed_split_refused, split_of
from steelyard.plan.file import default_folder, digest, keep, parse_file
from steelyard.plan.stages import legal_shapes
from steelyard.precision import LayerPrecision
from steelyard.profiles.profile import LayerProfile, Profile, ProfileIdentity

TRACER_VERSION = 13
"""Version of the counts; bump when the tracer counts differently."""
ATTENTION = "sdpa"
"""Attention implementation of transformers that is traced."""
LEFT_OUT = "products"
"""Shapes of matrix products, which only some levers' prices need; how equal ones are folded depends on the length."""


def trace_file(config_hash: str, precision: LayerPrecision) -> Any:
    """Path of the packaged trace of a config; the file need not exist."""
    return resources.files("steelyard.tracer") / "traces" / f"{config_hash}-{precision}.json.gz"


def packaged_trace(
    chain: ModelChain, *, seq_len: int, precision: LayerPrecision, degrees: Iterable[int]
) -> Profile | None:
    """Return the result of `steelyard.tracer.trace.trace` from the package; None if the package does not have it."""
    content = _content(chain, precision)
    if content is None:
        return None
    return profile_at(content, chain, seq_len=seq_len, degrees=sorted(set(degrees) | {1}))


def _content(chain: ModelChain, precision: LayerPrecision) -> dict[str, Any] | None:
    """Return the content of a model's packaged trace; None if there is none that holds for what is installed."""
    file = trace_file(chain.config_hash, precision)
    if not file.is_file():
        return None
    content: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    is_current = content["key"] == {"tracer": TRACER_VERSION, "attention": ATTENTION}
    return content if is_current and is_as_made(content["made_with"]) else None


def packaged_lengths(chain: ModelChain, precision: LayerPrecision) -> str:
    """Return the packaged lengths and degrees of a model as words for messages; empty if there are none that hold."""
    content = _content(chain, precision)
    if content is None:
        return ""
    spans = [
        f"{each['first']}–{each['last']}" if len(each["lengths"]) > 1 else str(each["first"])
        for each in content["spans"]
    ]
    return f"{', '.join(spans)} tokens on nodes of {', '.join(map(str, content['degrees']))} devices"


def profile_at(content: dict[str, Any], chain: ModelChain, *, seq_len: int, degrees: Sequence[int]) -> Profile | None:
    """Return the profile at a length from a packaged trace; None if it does not cover the length or the degrees."""
    wanted = {
        (layer_type.name, frozenset(strategy.shape.items())): degree
        for degree in degrees
        for layer_type in chain.layer_types
        for strategy in legal_shapes(layer_type, degree, seq_len)
    }
    span = next((each for each in content["spans"] if each["first"] <= seq_len <= each["last"]), None)
    if span is None or not set(wanted.values()) <= set(content["degrees"]):
        return None
    shares = _shares(span["lengths"], seq_len)
    layers = [
        LayerProfile.model_validate(_along(at_lengths, shares, content["sizes"]))
        for at_lengths in zip(*span["layers"], strict=True)
        if (at_lengths[0]["kind"], frozenset(at_lengths[0]["degrees"].items())) in wanted
    ]
    identity = span["identity"] | {"model_name": chain.name, "seq_len": seq_len}
    return Profile(identity=ProfileIdentity.model_validate(identity), layers=tuple(layers))


class _Shares(NamedTuple):
    """Weights of the values at each traced length: whole numbers over a common divisor."""

    counts: tuple[int, ...]
    divisor: int


def _shares(lengths: Sequence[int], seq_len: int) -> _Shares:
    parts = [prod(Fraction(seq_len - b, a - b) for b in lengths if b != a) for a in lengths]
    divisor = lcm(*(Fraction(part).denominator for part in parts))
    return _Shares(tuple(int(part * divisor) for part in parts), divisor)


def _along(values: Sequence[Any], shares: _Shares, sizes: Sequence[int]) -> Any:
    """Return one entry of a layer's profile from its values at each traced length."""
    first = values[0]
    if isinstance(first, dict):
        if "at" in first:
            low, high = (_along(each, shares, sizes) for each in zip(*(value["at"] for value in values), strict=True))
            slope = (high - low) / (sizes[1] - sizes[0])
            return {"constant": low - slope * sizes[0], "per_sample": slope}
        return {key: _along([value[key] for value in values], shares, sizes) for key in first}
    if isinstance(first, list):
        return [_along(each, shares, sizes) for each in zip(*values, strict=True)]
    if isinstance(first, str) or first is None or all(value == first for value in values):
        return first
    if all(isinstance(value, int) for value in values):
        total = sum(value * count for value, count in zip(values, shares.counts, strict=True))
        return total / shares.divisor if total % shares.divisor else total // shares.divisor
    exact = sum(Fraction(value) * count for value, count in zip(values, shares.counts, strict=True)) / shares.divisor
    return float(exact)


def counted_at(value: Any, sizes: Sequence[int]) -> Any:
    """Return a part of a profile as packaged traces store it: counts at ``sizes`` instead of the lines through them."""
    if isinstance(value, dict):
        if set(value) == {"constant", "per_sample"}:
            return {"at": [_half(value["constant"] + value["per_sample"] * size) for size in sizes]}
        return {key: counted_at(each, sizes) for key, each in value.items() if key != LEFT_OUT}
    if isinstance(value, list):
        return [counted_at(each, sizes) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _half(value: float) -> int | float:
    """Return a count as it was: a whole number, or a half in causal attention, which does half of the work."""
    twice = round(2 * value)
    return twice / 2 if twice % 2 else twice // 2


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
    gpu_kernels: bool = False,
) -> Profile:
    """Return the traced profile from the cache folder or the package; trace and store the degrees that both lack.

    Degree 1 is always part of it. ``folder`` has one file for each degree and defaults to
    ``$XDG_CACHE_HOME/steelyard/traces`` (``~/.cache`` where unset); if it cannot be written, or a file in it cannot be
    read, that only costs time. ``own`` is a user's own module, if the chain is of one
    (`steelyard.modules.own_pieces.OwnModel`). ``with_products`` asks for shapes of matrix products, which the package
    leaves out; ``fp32_adapters`` and ``gpu_kernels`` are as in `steelyard.tracer.trace.trace`.

    Raises `NotInstalledError` if the model has to be traced and torch is not installed, `InvalidModelError` if tracing
    fails on a split from a plan file, and `UserError` if layers fail in 16 bits.
    """
    if precision == "fp16":  # as wide as bf16, and only widths are counted
        same = cached_trace(
            chain,
            seq_len=seq_len,
            precision="bf16",
            degrees=degrees,
            folder=folder,
            own=own,
            with_products=with_products,
            fp32_adapters=fp32_adapters,
            gpu_kernels=gpu_kernels,
        )
        return same.model_copy(update={"identity": same.identity.model_copy(update={"precision": precision})})
    folder = folder or default_folder()
    degrees = tuple(each for each in sorted({1, *degrees}) if _has_shapes(chain, each, seq_len))
    places = {
        (degree, on): folder / f"{_key(chain, seq_len, precision, degree, fp32_adapters, on)}.json"
        for degree in degrees
        for on in ("any", "gpu" if gpu_kernels else "reference")
    }
    kept = {degree: found for (degree, _), path in places.items() if (found := _kept(path)) is not None}
    missing = tuple(degree for degree in degrees if degree not in kept)
    if not missing:
        return _joined(kept[degree] for degree in degrees)
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
    if packaged is not None and (gpu_kernels or packaged.identity.packages is None):
        return packaged
    part = f" with {chain.freeze.of} frozen" if chain.freeze else ""
    what = f"the trace of {chain.name}{part} at {seq_len} tokens in {precision} for {max(degrees)} devices per node"
    there = "" if chain.freeze else packaged_lengths(chain, precision)
    require_training(f"{what} is neither packaged nor cached" + (f" (packaged: {there})" if there else ""))
    from steelyard.tracer.trace import trace

    try:
        with changed_split_refused(chain.split, partial(split_of, chain.config)):
            profile = trace(
                chain,
                seq_len=seq_len,
                precision=precision,
                degrees=missing,
                own=own,
                fp32_adapters=fp32_adapters,
                gpu_kernels=gpu_kernels,
            )
    except RuntimeError as error:
        if precision == "fp32":
            raise
        raise UserError(
            field="--precision",
            found=f"{precision} for {chain.name}, whose layers fail in it: {first_line(error)[:160]}",
            expected="layers that compute in the dtype of their parameters, whatever it is",
            hint="try --precision fp32, or cast what the layers create themselves",
        ) from error
    for (degree, on), path in places.items():
        if degree in missing and (on == "any") == (profile.identity.packages is None):
            layers = tuple(each for each in profile.layers if max(each.degrees.values(), default=1) == degree)
            kept[degree] = profile.model_copy(update={"layers": layers})
            keep(path, kept[degree].model_dump_json())
    _say_kept(folder)
    return _joined(kept[degree] for degree in degrees)


def _has_shapes(chain: ModelChain, degree: int, seq_len: int) -> bool:
    """Return whether any dimension divides any layer by this degree."""
    return any(True for each in chain.layer_types for _ in legal_shapes(each, degree, seq_len))


def _kept(path: Path) -> Profile | None:
    """Return the trace in a file of the cache; None if there is none, or one that cannot be read."""
    if not path.is_file():
        return None
    try:
        return parse_file(path, Profile, InvalidProfileError, what="profile")
    except InvalidProfileError as error:
        _logger.warning("traced again, because the cached trace cannot be read: %s", error)
        return None


def _joined(profiles: Iterable[Profile]) -> Profile:
    """Return one trace of the layers of several, which are of the same layers at rising degrees."""
    first, *others = profiles
    return first.model_copy(update={"layers": sum((each.layers for each in others), first.layers)})


@cache
def _say_kept(folder: Path) -> None:
    """Log once per process where traces are kept."""
    _logger.info("traced with torch; traces are cached in %s", folder)


def _key(
    chain: ModelChain,
    seq_len: int,
    precision: LayerPrecision,
    degree: int,
    fp32_adapters: bool,
    kernels: str,
) -> str:
    entries: dict[str, Any] = {
        "config": chain.config_hash,
        "name": chain.name,
        "seq_len": seq_len,
        "precision": precision,
        "degree": degree,
        "tracer": TRACER_VERSION,
        **{name: installed_version(name) for name in TRAINING},
        "attention": ATTENTION,
        "kernels": kernels,
    }
    entries |= {"sinks": "fused"} if chain.family.fuses_sinks else {}
    for name, part in (("split", chain.split), ("frozen", chain.freeze)):
        entries |= {name: part.model_dump_json()} if part else {}
    if chain.changes:
        entries |= {"changes": list(map(str, chain.changes)), "peft": installed_version("peft")}
        entries |= {"adapters": "fp32, with their FLOP"} if fp32_adapters else {}
    return digest(entries)
