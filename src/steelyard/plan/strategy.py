r"""A strategy: how the devices of one pipeline stage share the work of one layer.

A strategy is one leaf of the papers' decision tree: an ordered product of degrees, each with its dimension, over the
$G$ devices of a stage, together with the modes of these dimensions and activation checkpointing (remat).
`steelyard.plan.dimensions` defines dimensions.

A strategy is written ``fsdp4-tp2``: the outermost level first, so the last level acts on neighbouring ranks (here ranks
0 and 1 share a tensor-parallel pair and ranks 0, 2, 4, 6 share parameters). No levels (``single``) means one device.
Modes other than the default follow the levels: ``fsdp4-tp2+sp zero2``. A degree is 2 or more, or 1 for fsdp if the
states are sharded only over the ranks of another dimension: ``fsdp1-cp8``.

The devices of a stage form a mesh of small axes, one per prime factor of $G$, largest factor first (8 devices: 2×2×2;
12: 3×2×2). A level takes a run of consecutive axes, so that any two strategies of one stage live on the same mesh and a
layout change between them is a redistribution on it. Rank $r$ has coordinates in row-major order.

Source: Miao et al. 2022 (arXiv 2211.13878), section 3.2 (decision tree); Korthikanti et al. 2022 for selective remat.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from steelyard.errors import InvalidPlanError, nearest
from steelyard.plan.dimensions import DIMENSIONS, Dimension, Value, level_dimensions, modes
from steelyard.plan.dimensions.dimension import (
    Contradiction,
    Divides,
    Level,
    Levels,
    Placed,
    States,
    data_levels,
    degree_of,
    has_following,
    replica_levels,
    shard_levels,
)


class Remat(StrEnum):
    """Activations of a layer that the backward pass recomputes instead of keeping them."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Parallelisation of one layer inside its stage; valid once constructed.

    ``levels`` are outermost first; ``modes`` are key and value of non-default modes, in the order of the registry
    (`Strategy.of` takes them by name). Raises `InvalidPlanError` naming the field if the parts contradict each other.
    """

    levels: Levels = ()
    remat: Remat = Remat.NONE
    modes: tuple[tuple[str, Value], ...] = ()
    dimensions: tuple[Dimension, ...] = field(init=False, repr=False, compare=False)
    """Dimensions in use: those of the levels, and those that use ranks of other levels."""
    num_devices: int = field(init=False, repr=False, compare=False)
    """Number of devices that the strategy spans."""
    tensor_degree: int = field(init=False, repr=False, compare=False)
    """Number of ranks that divide the layer's matrices."""
    sample_degree: int = field(init=False, repr=False, compare=False)
    """Number of ranks that divide the samples of a microbatch."""
    token_degree: int = field(init=False, repr=False, compare=False)
    """Number of ranks that divide the tokens of every sample throughout the layer."""
    expert_degree: int = field(init=False, repr=False, compare=False)
    """Number of data ranks that divide routed experts."""
    state_shards: int = field(init=False, repr=False, compare=False)
    """Number of shards of parameters, gradients and optimizer states, in addition to the division of the layer."""
    replicas: int = field(init=False, repr=False, compare=False)
    """Number of data ranks that hold the same shard."""
    shape: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Degrees, by name, that change the layer's shape on a rank; the layer is traced and measured under these."""
    hidden: "HiddenPlacement" = field(init=False, repr=False, compare=False)
    """Placement of the layer's input and output activations on the stage mesh; equal placements need no resharding."""
    sequence_degree: int = field(init=False, repr=False, compare=False)
    """Number of ranks that divide the sequence of the hidden state between layers."""
    keeps_gathered: bool = field(init=False, repr=False, compare=False)
    """Whether all parameters stay whole between forward and backward: not sharded, or gathered once (ZeRO-2)."""
    keeps_whole: bool = field(init=False, repr=False, compare=False)
    """Whether shards stay gathered throughout a step, and gradients whole until they are reduced once (ZeRO-1)."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., "Strategy"], tuple[object, ...]]:
        return _strategy, (self.levels, self.remat, self.modes)  # hashes of strings differ between processes

    def __post_init__(self) -> None:
        self._derive()
        dimensions = [level.dimension for level in self.levels]
        if len(set(dimensions)) < len(dimensions):
            raise InvalidPlanError(
                field="parallel",
                found=self.parallel,
                expected="each parallelism dimension on one level only",
                hint="merge the two levels into one with the product of their degrees",
            )
        for level in self.levels:
            if level.degree < (1 if level.dimension.states is States.SHARDED and has_following(self.levels) else 2):
                raise InvalidPlanError(
                    field="parallel", found=str(level), expected="a degree of 2 or more", hint="leave the level out"
                )
        chosen = dict(self.modes)
        contradictions = [dimension.contradiction(self.levels, chosen) for dimension in self.dimensions]
        for key in chosen:
            dimension, mode = modes()[key]
            if dimension not in self.dimensions:
                expected = f"{mode.texts[self.mode(key)] or key} only together with {dimension}"
                hint = f"add a {dimension} level, or leave {key} out"
                contradictions.append(Contradiction(field=key, expected=expected, hint=hint))
        for found in contradictions:
            if found is not None:
                raise InvalidPlanError(field=found.field, found=str(self), expected=found.expected, hint=found.hint)

    @classmethod
    def of(cls, levels: Levels = (), remat: Remat = Remat.NONE, **chosen: Value) -> "Strategy":
        """Build the strategy from modes by name, defaults included. Raise `InvalidPlanError` for an unknown one."""
        known = modes()
        for key, value in chosen.items():
            if key not in known:
                expected = "one of " + ", ".join(known)
                raise InvalidPlanError(field=key, found=repr(key), expected=expected, hint=nearest(key, list(known)))
            mode = known[key][1]
            if type(value) is not type(mode.default) or value not in mode.texts:
                most = [repr(each) for each in mode.texts][:4]
                raise InvalidPlanError(
                    field=key, found=repr(value), expected="one of " + ", ".join(most), hint="correct the value"
                )
        kept = tuple((key, chosen[key]) for key in known if key in chosen and chosen[key] != known[key][1].default)
        return _strategy(levels, remat, kept)

    def _derive(self) -> None:
        """Derive the fields that follow from levels and modes; a search reads them thousands of times per strategy."""
        known, levels = modes(), self.levels
        beside = dict.fromkeys(known[key][0] for key, _ in self.modes if not known[key][0].is_level)
        experts = [int(value) for key, value in self.modes if known[key][0].divides is Divides.EXPERTS]
        derived = {
            "dimensions": (*(level.dimension for level in levels), *beside),
            "num_devices": degree_of(levels),
            "tensor_degree": self._divided(Divides.TENSORS),
            "sample_degree": self._divided(Divides.SAMPLES),
            "token_degree": self._divided(Divides.TOKENS),
            "expert_degree": math.prod(experts),
            "state_shards": degree_of(shard_levels(levels)),
            "replicas": degree_of(replica_levels(levels)),
            "_hash": hash((levels, self.remat, self.modes)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        shape = {name: degree for dimension in self.dimensions for name, degree in dimension.shape(self).items()}
        object.__setattr__(self, "shape", shape)
        gathered = self.state_shards == 1 or any(dimension.keeps_gathered(self) for dimension in self.dimensions)
        object.__setattr__(self, "keeps_gathered", gathered)
        object.__setattr__(self, "keeps_whole", any(dimension.keeps_whole(self) for dimension in self.dimensions))
        hidden = HiddenPlacement.of((level.dimension.placement(self), level.degree) for level in levels)
        object.__setattr__(self, "hidden", hidden)
        object.__setattr__(self, "sequence_degree", hidden.sequence_degree)

    @property
    def parallel(self) -> str:
        """Levels as text, ``fsdp4-tp2``, or ``single``."""
        return "-".join(str(level) for level in self.levels) or "single"

    def __str__(self) -> str:
        known = modes()
        flags = [known[key][1].texts[value] for key, value in self.modes]
        text = self.parallel + "".join(flag for flag in flags if flag.startswith("+"))
        text = " ".join([text, *(flag for flag in flags if not flag.startswith("+"))])
        return text if self.remat is Remat.NONE else f"{text} remat={self.remat}"

    def mode(self, key: str) -> Value:
        """Return the value of a mode, by default the mode's default. Raise `KeyError` for an unknown mode."""
        for name, value in self.modes:
            if name == key:
                return value
        return modes()[key][1].default

    def with_remat(self, remat: Remat) -> "Strategy":
        """Return the strategy with another remat choice."""
        return _strategy(self.levels, remat, self.modes)

    def without_remat(self) -> "Strategy":
        """Return the strategy without recomputation."""
        return self.with_remat(Remat.NONE)

    def with_whole_experts(self) -> "Strategy":
        """Return the strategy for a neighbouring layer without experts: no modes of dimensions without own ranks."""
        known = modes()
        own = tuple((key, value) for key, value in self.modes if known[key][0].is_level)
        return _strategy(self.levels, self.remat, own)

    def with_whole_tensors(self) -> "Strategy":
        """Return the strategy for a neighbouring layer that cannot use tp: ranks that divide tensors divide samples
        instead.

        They widen a sharding level, or else another level that divides samples; without either they form a sharding
        level.
        """
        if self.tensor_degree == 1:
            return self
        levels = [level for level in self.levels if level.dimension.divides is not Divides.TENSORS]
        taking = [level for level in levels if level.dimension.divides is Divides.SAMPLES]
        sharding = [level for level in taking if level.dimension.states is States.SHARDED]
        widened = next(iter(sharding + taking), None)
        if widened is None:
            of_samples = (each for each in DIMENSIONS.values() if each.divides is Divides.SAMPLES)
            dimension = next(each for each in of_samples if each.states is States.SHARDED)
            levels.insert(0, Level(dimension=dimension, degree=self.tensor_degree))
        else:
            degree = widened.degree * self.tensor_degree
            levels[levels.index(widened)] = Level(dimension=widened.dimension, degree=degree)
        left = {level.dimension for level in levels}
        own = {key: value for key, value in self.modes if modes()[key][0] in left}
        return Strategy.of(tuple(levels), self.remat, **own)

    def level(self, dimension: Dimension) -> Level | None:
        """Return the level of a dimension, None if the dimension is not used."""
        for level in self.levels:
            if level.dimension is dimension:
                return level
        return None

    def degree(self, dimension: Dimension) -> int:
        """Return the degree of a dimension's level; 1 if the dimension is not used."""
        level = self.level(dimension)
        return 1 if level is None else level.degree

    @property
    def head_degree(self) -> int:
        """Number of ranks that divide the heads of attention."""
        return math.prod(dimension.head_degree(self) for dimension in self.dimensions)

    @property
    def data_degree(self) -> int:
        """Number of ranks with different samples or tokens, over which gradients are summed."""
        return degree_of(data_levels(self.levels))

    @property
    def expert_state_shards(self) -> int:
        """Number of shards of the states of a rank's routed experts, over the ranks outside expert parallelism."""
        return max(1, self.state_shards // self.expert_degree)

    @property
    def expert_replicas(self) -> int:
        """Number of data ranks that hold the same shard of routed experts."""
        return self.data_degree // (self.expert_degree * self.expert_state_shards)

    def _divided(self, what: Divides) -> int:
        return math.prod(level.degree for level in self.levels if level.dimension.divides is what)

    def axes_of(self, *dimensions: Dimension) -> tuple[int, ...]:
        """Return the indices into `mesh_axes` of the axes that these dimensions use, outermost first.

        Raise `InvalidPlanError` if a level boundary falls inside an axis of the stage mesh.
        """
        sizes = mesh_axes(self.num_devices)
        found: list[int] = []
        position = 0
        for level in self.levels:
            start, product = position, 1
            while product < level.degree and position < len(sizes):
                product *= sizes[position]
                position += 1
            if product != level.degree:
                raise InvalidPlanError(
                    field="parallel",
                    found=self.parallel,
                    expected=f"levels that are consecutive axes of the stage mesh {'×'.join(map(str, sizes))}, "
                    "outermost first",
                    hint="swap the levels or move a factor from one to the other",
                )
            if level.dimension in dimensions:
                found.extend(range(start, position))
        return tuple(found)

    def _axes(self, levels: Iterable[Level]) -> tuple[int, ...]:
        return self.axes_of(*(level.dimension for level in levels))

    @property
    def sample_axes(self) -> tuple[int, ...]:
        """Axes of the stage mesh that divide samples."""
        return self._axes([level for level in self.levels if level.dimension.divides is Divides.SAMPLES])

    @property
    def data_axes(self) -> tuple[int, ...]:
        """Axes of the stage mesh over which gradients are summed."""
        return self._axes(data_levels(self.levels))

    @property
    def shard_axes(self) -> tuple[int, ...]:
        """Axes over which states are sharded."""
        return self._axes(shard_levels(self.levels))

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """Axes over which a layer's shards are replicated."""
        return self._axes(replica_levels(self.levels))

    @property
    def expert_axes(self) -> tuple[int, ...]:
        """Axes that divide routed experts: the innermost of `data_axes`, none if experts are not divided.

        Raises `InvalidPlanError` if the degree does not cover whole axes.
        """
        sizes, degree, axes = mesh_axes(self.num_devices), self.expert_degree, self.data_axes
        place = len(axes)
        while place and math.prod(sizes[axis] for axis in axes[place:]) < degree:
            place -= 1
        if math.prod(sizes[axis] for axis in axes[place:]) != degree:
            raise InvalidPlanError(
                field="parallel",
                found=str(self),
                expected="experts divided over whole axes of the stage mesh, the innermost data axes",
                hint="choose another degree of ep",
            )
        return axes[place:]

    @property
    def expert_state_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes that replicate and axes that shard the states of experts, without the axes of expert parallelism."""
        taken = set(self.expert_axes)
        replicas = tuple(axis for axis in self.replica_axes if axis not in taken)
        return replicas, tuple(axis for axis in self.shard_axes if axis not in taken)

    @property
    def is_aligned(self) -> bool:
        """Whether every level is a run of whole axes of the stage mesh, as the runtime requires."""
        return _is_aligned(self)


_KEPT = 1 << 18
"""Number of strategies kept for reuse: twice those of one model with experts on 2,048 and on 256 devices."""


@lru_cache(maxsize=_KEPT)
def _strategy(levels: Levels, remat: Remat, chosen: tuple[tuple[str, Value], ...]) -> Strategy:
    if remat is Remat.NONE:
        return Strategy(levels=levels, modes=chosen)
    found, without = object.__new__(Strategy), _strategy(levels, Remat.NONE, chosen)
    own = {"remat": remat, "_hash": hash((levels, remat, chosen))}  # nothing else depends on remat
    for name in Strategy.__slots__:
        object.__setattr__(found, name, own[name] if name in own else getattr(without, name))
    return found


@lru_cache(maxsize=_KEPT)
def _is_aligned(strategy: Strategy) -> bool:
    try:
        _ = strategy.expert_axes  # raises if a level, or the degree of experts, does not cover whole axes
    except InvalidPlanError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenPlacement:
    """Placement of the hidden state over a stage, outermost first: kind of placement and number of ranks."""

    axes: tuple[tuple[Placed, int], ...]

    @classmethod
    def of(cls, axes: Iterable[tuple[Placed, int]]) -> "HiddenPlacement":
        """Build a placement, merging neighbouring axes of one kind."""
        merged: list[tuple[Placed, int]] = []
        for placed, degree in (each for each in axes if each[1] > 1):
            outside = merged.pop()[1] if merged and merged[-1][0] is placed else 1
            merged.append((placed, outside * degree))
        return cls(axes=tuple(merged))

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that divide the sequence of a sample."""
        return math.prod(degree for placed, degree in self.axes if placed in (Placed.SEQUENCE, Placed.HEAD_TAIL))

    @property
    def head_tail_degree(self) -> int:
        """Number of ranks that divide tokens in head-tail order."""
        return math.prod(degree for placed, degree in self.axes if placed is Placed.HEAD_TAIL)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same part of the hidden state."""
        return math.prod(degree for placed, degree in self.axes if placed is Placed.WHOLE)

    def placements(self, sizes: tuple[int, ...]) -> str:
        """Return the placement on each axis of a stage mesh of these sizes, outermost first, one letter per axis."""
        letters: list[str] = []
        for placed, degree in self.axes:
            product = 1
            while product < degree:
                product *= sizes[len(letters)]
                letters.append(placed.value)
        return "".join(letters)


def shape_strategies(degree: int) -> Iterator[Strategy]:
    """Yield the one-level strategies of this degree that change the shape of a layer, with all modes of the dimension.

    There is one for each shape that a layer can have on a rank; layers are traced and measured under them.
    """
    if degree == 1:
        yield Strategy()
        return
    for dimension in level_dimensions():
        level = (Level(dimension=dimension, degree=degree),)
        choices = [[(mode.key, value) for value in mode.choices(level)] for mode in dimension.modes]
        for pairs in itertools.product(*choices):
            strategy = Strategy.of(level, Remat.NONE, **dict(pairs))
            if strategy.shape:
                yield strategy


@lru_cache(maxsize=4096)
def mesh_axes(num_devices: int) -> tuple[int, ...]:
    """Return the axis sizes of a stage mesh: the prime factors of ``num_devices``, largest first; () for one device."""
    factors: list[int] = []
    rest, candidate = num_devices, 2
    while candidate * candidate <= rest:
        while rest % candidate == 0:
            factors.append(candidate)
            rest //= candidate
        candidate += 1
    if rest > 1:
        factors.append(rest)
    return tuple(reversed(factors))


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` in rising order."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(low + [number // each for each in reversed(low) if each * each < number])


_LEVEL = re.compile(r"([a-z]+)([0-9]{1,9})")


@lru_cache(maxsize=4096)
def parse_parallel(text: str) -> Levels:
    """Parse levels written as in `Strategy.parallel`. Raise `InvalidPlanError` for an unknown dimension or form."""
    if text == "single":
        return ()
    by_name = {dimension.name: dimension for dimension in level_dimensions()}
    levels = []
    for part in text.split("-"):
        match = _LEVEL.fullmatch(part)
        if match is None or match.group(1) not in by_name:
            near = nearest(part.rstrip("0123456789"), by_name)
            raise InvalidPlanError(
                field="parallel",
                found=repr(text),
                expected="levels such as fsdp4-tp2 with dimensions " + ", ".join(by_name) + ", or single",
                hint=f"write its degree, as in {part}2" if part in by_name else f"correct the level {part!r}: {near}",
            )
        levels.append(Level(dimension=by_name[match.group(1)], degree=int(match.group(2))))
    return tuple(levels)


def parse_strategy(text: str) -> Strategy:
    """Parse the text of a strategy, such as ``fsdp4-tp2+sp remat=full``. Raise `InvalidPlanError` if it is invalid."""
    head, *flags = text.split() or [""]
    parallel, *suffixes = head.split("+")
    chosen: dict[str, Value] = {}
    remat = Remat.NONE
    for flag in (*(f"+{suffix}" for suffix in suffixes), *flags):
        if flag.startswith("remat=") and flag.removeprefix("remat=") in set(Remat):
            remat = Remat(flag.removeprefix("remat="))
            continue
        key, value = _parse_flag(flag)
        if key in chosen:
            raise InvalidPlanError(
                field="strategy", found=repr(text), expected=f"one choice of {key}", hint=f"write {flag} once"
            )
        chosen[key] = value
    return Strategy.of(levels=parse_parallel(parallel), remat=remat, **chosen)


def _parse_flag(flag: str) -> tuple[str, Value]:
    known = {text: (key, value) for key, (_, each) in modes().items() for value, text in each.texts.items() if text}
    if flag not in known:
        texts = [next(text for text in each.texts.values() if text) for _, each in modes().values()]
        raise InvalidPlanError(
            field="strategy",
            found=repr(flag),
            expected=", ".join(texts) + " or remat=none|selective|full after the levels",
            hint="write for example 'fsdp4-tp2+sp remat=full'",
        )
    return known[flag]
