"""Pins: requirements of the user on the strategies of some layers, or on the pipeline.

A pin reads ``layers 0-3: tp=4``, ``blocks 8-15: fsdp8, remat=full`` or, for all layers, ``tp=8``. The name of a
dimension alone, such as ``fsdp``, requires it at the best degree, for all blocks if no layers are named. Layer 0 is the
embedding, as in a plan file, and block 0 is layer 1. In the cost tables, a pinned layer gets its own layer type with
fewer legal strategies, so the search knows nothing of pins.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import LAST, CostTables
from steelyard.errors import InvalidPlanError, UserError, nearest
from steelyard.model.chain import ModelChain
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import DIMENSIONS, dimension_named, level_dimensions, modes
from steelyard.plan.strategy import Remat, Strategy, parse_strategy
from steelyard.schedules import SCHEDULES, PipelineConfig

SHOWN_CHOICES = 6
"""Number of values that a message lists before it ends in …"""
_PLACE = re.compile(r"(layers?|blocks?)\s+(\d{1,6})(?:\s*[-–]\s*(\d{1,6}))?")
_PIPELINE = re.compile(r"pp\s*=?\s*([0-9]{0,6})")
_PIPELINE_KEYS = ("stages", "microbatches", "schedule")
MICRO_BATCH = "micro-batch"
"""Key of the micro-batch size, which depends on both the strategy and the pipeline configuration."""
OR_MORE = " or more"
_ANY_DEGREE = f"2{OR_MORE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Requirement on the layers from ``first`` to ``last`` (inclusive; all if None), as keys and values."""

    text: str
    first: int | None
    last: int | None
    wanted: tuple[tuple[str, str], ...]
    is_lax: bool = False
    """Whether layers that a dimension can never divide are exempt, which holds if no layers are named."""

    def allows(self, strategy: Strategy) -> bool:
        """Return whether a strategy meets the pin."""
        return all(
            dimension_named(key) in strategy.dimensions if value == _ANY_DEGREE else _value(strategy, key) == value
            for key, value in self.wanted
            if key not in (*_PIPELINE_KEYS, MICRO_BATCH)
        )

    def demands(self, strategy: Strategy) -> bool:
        """Return whether a strategy meets the pin and the pin requires a parallelism dimension."""
        names = {dimension.name for dimension in strategy.dimensions} | {"parallel"}
        return any(key in names and value != "1" for key, value in self.wanted) and self.allows(strategy)

    def allows_samples(self, strategy: Strategy, microbatch_samples: int) -> bool:
        """Return whether the micro-batch size of a rank is the required one."""
        sizes = (int(value) for key, value in self.wanted if key == MICRO_BATCH)
        return all(microbatch_samples == size * strategy.sample_degree for size in sizes)

    def of_levels(self) -> "Pin":
        """Return the pin without requirements on dimensions that use ranks of other levels, such as ep.

        Some layers have nothing that these dimensions could divide, so the requirement is on the others alone.
        """
        return self.without(*(key for key, (dimension, _) in modes().items() if not dimension.is_level))

    def only(self, *keys: str) -> "Pin":
        """Return the pin with only its requirements on these keys."""
        return replace(self, wanted=tuple((key, value) for key, value in self.wanted if key in keys))

    def without(self, *keys: str) -> "Pin":
        """Return the pin without its requirements on these keys."""
        return replace(self, wanted=tuple((key, value) for key, value in self.wanted if key not in keys))

    def takes(self, pipeline: PipelineConfig) -> bool:
        """Return whether a pipeline configuration meets the pin."""
        found = {
            "stages": str(pipeline.num_stages),
            "microbatches": str(pipeline.num_microbatches),
            "schedule": pipeline.schedule.name,
        }
        return all(found[key] == value for key, value in self.wanted if key in _PIPELINE_KEYS)

    def covers(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, is pinned."""
        return self.first is None or self.last is None or self.first <= layer <= self.last


def pins_of(decisions: Decisions, chain: ModelChain) -> tuple[Pin, ...]:
    """Return the pins among decisions. Raises `UserError` for a pin that the model cannot have."""
    return tuple(parse_pin(text, option="--pin", num_layers=chain.num_layers) for text in decisions.pins)


@lru_cache(maxsize=256)
def parse_pin(text: str, *, option: str, num_layers: int) -> Pin:
    """Parse a pin. Raises `UserError` with the name of the ``option`` for invalid text."""
    place, colon, rest = text.rpartition(":")
    degrees = (dimension.name for dimension in level_dimensions())
    keys = (*degrees, *modes(), "remat", *_PIPELINE_KEYS, MICRO_BATCH)
    wanted = tuple(pair for part in rest.split(",") for pair in _requirement(part.strip(), option, keys))
    if not colon and any(value == _ANY_DEGREE for _, value in wanted):
        place = "blocks"
    first, last = _layers(place.strip(), option, num_layers) if colon or place else (None, None)
    return Pin(text=text, first=first, last=last, wanted=wanted, is_lax=not colon)


def pinned(tables: CostTables, pins: Sequence[Pin], global_batch: int) -> CostTables:
    """Return the tables in which every pinned layer has its own layer type, restricted to the strategies that its pins
    allow."""
    if not pins:
        return tables
    layer_types: dict[tuple[int, tuple[int, ...]], int] = {}
    layers = []
    for layer, layer_type in enumerate(tables.layers):
        key = (layer_type, tuple(index for index, pin in enumerate(pins) if pin.covers(layer)))
        layers.append(layer_types.setdefault(key, len(layer_types)))
    ends = {each: (tables.last_types[each[0]], each[1]) for each in layer_types} if tables.last_types else {}
    for end in ends.values():
        layer_types.setdefault(end, len(layer_types))
    source = [layer_type for layer_type, _ in layer_types]
    chosen = tables.select(source, layers=layers)
    legal, samples = chosen.legal.copy(), global_batch // tables.pipeline.num_microbatches
    for row, (_, own) in enumerate(layer_types):
        for index in own:
            legal[row] &= _allowed(pins[index], row, chosen)
            legal[row] &= [pins[index].allows_samples(strategy, samples) for strategy in chosen.strategies]
    return replace(
        chosen,
        layer_types=tuple(
            tables.layer_types[layer_type].removesuffix(LAST)
            + "".join(f" ({pins[index].text})" for index in own)
            + (LAST if tables.layer_types[layer_type].endswith(LAST) else "")
            for layer_type, own in layer_types
        ),
        legal=legal,
        last_types=tuple(layer_types[ends.get(each, each)] for each in layer_types) if ends else (),
    )


def _allowed(pin: Pin, layer_type: int, tables: CostTables) -> NDArray[np.bool_]:
    """Mask [S] of the strategies that a pin allows for a layer type, by `Pin.of_levels` if only other layer types can
    meet the whole pin."""
    allowed = np.array([pin.allows(strategy) for strategy in tables.strategies], dtype=bool)
    able = (tables.legal & allowed).any(axis=1)
    if pin.is_lax and able.any() and not able[layer_type]:
        lax = pin.of_levels()
        return np.array([lax.allows(strategy) for strategy in tables.strategies], dtype=bool)
    return allowed


def _value(strategy: Strategy, key: str) -> str:
    if key == "parallel":
        return strategy.parallel
    if key == "remat":
        return strategy.remat.value
    if key in modes():
        (dimension, mode), value = modes()[key], strategy.mode(key)
        if dimension.is_level and value is not False and dimension not in strategy.dimensions:
            return ""  # the mode's default, which says how to use a dimension that the strategy lacks
        return next(text for text, each in mode.pin.items() if each == value)
    return str(strategy.degree(dimension_named(key)))


def _layers(place: str, option: str, num_layers: int) -> tuple[int, int]:
    named = {"embedding": (0, 0), "head": (num_layers - 1, num_layers - 1), "blocks": (1, num_layers - 2)}
    if place in named:
        return named[place]
    match = _PLACE.fullmatch(place)
    shift = 1 if match and match.group(1).startswith("block") else 0
    first = int(match.group(2)) + shift if match else -1
    last = int(match.group(3)) + shift if match and match.group(3) else first
    if match is None or not 0 <= first <= last < num_layers:
        raise UserError(
            field=option,
            found=repr(place),
            expected=f"layers 0-{num_layers - 1}, blocks 0-{num_layers - 3}, embedding or head before the colon",
            hint=f"write for example {option} 'layers 0-3: tp=4'",
        )
    return first, last


def _requirement(part: str, option: str, keys: Sequence[str]) -> list[tuple[str, str]]:
    if pipeline := _PIPELINE.fullmatch(part):
        raise UserError(
            field=option,
            found=repr(part),
            expected="the number of stages: pp is the pipeline, which all layers share",
            hint=f"write {option} stages={pipeline[1] or 2}, or stages=1 for no pipeline",
        )
    key, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals:
        return [(part, _ANY_DEGREE)] if part in DIMENSIONS else _levels(part, option)
    if key not in keys:
        raise UserError(field=option, found=repr(key), expected="one of " + ", ".join(keys), hint=nearest(key, keys))
    choices = {"remat": tuple(each.value for each in Remat), "schedule": tuple(SCHEDULES)}.get(key)
    choices = tuple(modes()[key][1].pin) if key in modes() else choices
    if choices is not None and value not in choices:
        shown = "|".join(choices[:SHOWN_CHOICES]) + "|…" * (len(choices) > SHOWN_CHOICES)
        raise UserError(field=option, found=repr(part), expected=f"{key}={shown}", hint=nearest(value, choices))
    if choices is None and not (value.isascii() and value.isdigit() and int(value) > 0):
        raise UserError(
            field=option,
            found=repr(part),
            expected=f"{key}= a whole number of 1 or more",
            hint=f"write for example {option} {key}=2",
        )
    return [(key, value)]


def _levels(part: str, option: str) -> list[tuple[str, str]]:
    """Parse a strategy such as ``fsdp4-tp2+sp`` into requirements: its levels in this order, and the written modes."""
    try:
        wanted = parse_strategy(part)
    except InvalidPlanError as error:
        parts = error.parts() | {"field": option, "found": repr(part)}
        if re.match(r"[a-z]+[0-9]+", part) is None:
            parts["expected"] = "requirements such as tp=4, remat=full or fsdp4-tp2, separated by commas"
        raise UserError(**parts) from None
    return [("parallel", wanted.parallel), *((key, _value(wanted, key)) for key, _ in wanted.modes)]
