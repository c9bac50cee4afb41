r"""A strategy: how the devices of one pipeline stage share the work of one layer.

A strategy is one leaf of the papers' decision tree: an ordered product of degrees, each with its kind, over the
$G$ devices of a stage, together with sequence parallelism, the ZeRO stage and activation checkpointing (remat).

Written ``fsdp4-tp2``: the outermost level first, so the last level acts on neighbouring ranks (here ranks 0 and 1
share a tensor-parallel pair and ranks 0, 2, 4, 6 share parameters). No levels at all (``single``) means one device.

The devices of a stage form a mesh of small axes, one per prime factor of $G$, largest factor first (8 devices:
2×2×2; 12: 3×2×2). A level takes a run of consecutive axes, so that any two strategies of one stage live on the same
mesh and a layout change between them is a redistribution on it. Rank $r$ has coordinates in row-major order.

Source: Miao et al. 2022 (arXiv 2211.13878), section 3.2 (decision tree); Korthikanti et al. 2022 for sp and
selective remat; Rajbhandari et al. 2020 for the ZeRO stages.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from steelyard.errors import InvalidPlanError


class Parallelism(StrEnum):
    """A kind of parallelism that divides the devices of a stage."""

    DP = "dp"
    FSDP = "fsdp"
    TP = "tp"


class Remat(StrEnum):
    """Which activations of a layer are recomputed in the backward pass instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


DATA_KINDS = frozenset({Parallelism.DP, Parallelism.FSDP})
"""The kinds that divide the samples of a microbatch."""

ZeroStage = Literal[2, 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the decision tree: ``degree`` groups of ranks that share one ``kind`` of parallelism."""

    kind: Parallelism
    degree: int

    def __str__(self) -> str:
        return f"{self.kind}{self.degree}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How one layer is parallelised inside its stage; valid from birth.

    ``levels`` outermost first; ``sp`` shards the sequence outside the tensor-parallel blocks and needs tp; ``zero``
    is the ZeRO stage of an fsdp level (2 keeps parameters gathered between forward and backward), 3 without one.
    Raises `InvalidPlanError` naming the field when the parts contradict each other.
    """

    levels: tuple[Level, ...] = ()
    sp: bool = False
    remat: Remat = Remat.NONE
    zero: ZeroStage = 3

    def __post_init__(self) -> None:
        kinds = [level.kind for level in self.levels]
        if len(set(kinds)) < len(kinds):
            raise InvalidPlanError(
                field="parallel",
                found=self.parallel,
                expected="each kind of parallelism on one level only",
                hint="merge the two levels into one with the product of their degrees",
            )
        if len(DATA_KINDS & set(kinds)) > 1:
            raise InvalidPlanError(
                field="parallel",
                found=self.parallel,
                expected="dp or fsdp in one layer, not both",
                hint="keep one of the two; another layer may use the other",
            )
        for level in self.levels:
            if level.degree < 2:
                raise InvalidPlanError(
                    field="parallel", found=str(level), expected="a degree of 2 or more", hint="leave the level out"
                )
        if self.sp and Parallelism.TP not in kinds:
            raise InvalidPlanError(
                field="sp",
                found=f"sp with {self.parallel}",
                expected="sp only together with tp",
                hint="add a tp level or set sp to false",
            )
        if self.zero != 3 and Parallelism.FSDP not in kinds:
            raise InvalidPlanError(
                field="zero",
                found=f"zero {self.zero} with {self.parallel}",
                expected="zero 2 only together with fsdp",
                hint="add an fsdp level or leave zero out",
            )

    @property
    def parallel(self) -> str:
        """The levels as text, ``fsdp4-tp2``, or ``single``."""
        return "-".join(str(level) for level in self.levels) or "single"

    def __str__(self) -> str:
        text = self.parallel + ("+sp" if self.sp else "")
        if self.zero == 2:
            text += " zero2"
        return text if self.remat is Remat.NONE else f"{text} remat={self.remat}"

    def degree(self, *kinds: Parallelism) -> int:
        """The product of the degrees of these kinds; 1 where none of them is used."""
        return math.prod(level.degree for level in self.levels if level.kind in kinds)

    @property
    def num_devices(self) -> int:
        """Devices of a stage that this strategy spans."""
        return math.prod(level.degree for level in self.levels)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.degree(Parallelism.TP)

    @property
    def data_degree(self) -> int:
        """Ways in which the samples of a microbatch are divided (dp or fsdp)."""
        return self.degree(*DATA_KINDS)

    @property
    def fsdp(self) -> int:
        """Ways in which parameters, gradients and optimizer states are sharded beyond tp."""
        return self.degree(Parallelism.FSDP)

    @property
    def dp(self) -> int:
        """Ways in which the layer is replicated over samples."""
        return self.degree(Parallelism.DP)

    @property
    def layout(self) -> "Layout":
        """How the layer's input and output activations lie on the stage mesh; equal layouts switch at no cost."""
        return Layout(
            axes=tuple((level.kind is Parallelism.TP, level.degree) for level in self.levels),
            sp=self.sp,
        )

    def axes_of(self, *kinds: Parallelism) -> tuple[int, ...]:
        """Indices into `mesh_axes` of the axes that these kinds use, outermost first.

        Raises `InvalidPlanError` if a level boundary falls inside an axis of the stage mesh.
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
                    expected=f"levels that are runs of the stage mesh {'×'.join(map(str, sizes))}, outermost first",
                    hint="swap the levels or move a factor from one to the other",
                )
            if level.kind in kinds:
                found.extend(range(start, position))
        return tuple(found)

    @property
    def is_aligned(self) -> bool:
        """Whether every level is a run of whole axes of the stage mesh, which the runtime needs."""
        try:
            self.axes_of()
        except InvalidPlanError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Placement of an activation over a stage: per level (is it tp, degree); ``sp`` if tp shards the sequence."""

    axes: tuple[tuple[bool, int], ...]
    sp: bool

    @property
    def batch_degree(self) -> int:
        """Ways in which samples are divided."""
        return math.prod(degree for is_tp, degree in self.axes if not is_tp)

    @property
    def sequence_degree(self) -> int:
        """Ways in which the sequence of a sample is divided."""
        return math.prod(degree for is_tp, degree in self.axes if is_tp) if self.sp else 1


def mesh_axes(num_devices: int) -> tuple[int, ...]:
    """Sizes of the axes of a stage mesh: the prime factors of ``num_devices``, largest first; () for one device."""
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


_LEVEL = re.compile(r"([a-z]+)([0-9]{1,9})")


def parse_parallel(text: str) -> tuple[Level, ...]:
    """The levels written as in `Strategy.parallel`; raises `InvalidPlanError` for an unknown kind or form."""
    if text == "single":
        return ()
    levels = []
    for part in text.split("-"):
        match = _LEVEL.fullmatch(part)
        if match is None or match.group(1) not in set(Parallelism):
            raise InvalidPlanError(
                field="parallel",
                found=repr(text),
                expected="levels such as fsdp4-tp2 with kinds " + ", ".join(Parallelism) + ", or single",
                hint=f"correct the level {part!r}",
            )
        levels.append(Level(kind=Parallelism(match.group(1)), degree=int(match.group(2))))
    return tuple(levels)


def parse_strategy(text: str) -> Strategy:
    """The strategy that prints as ``text``, for example ``fsdp4-tp2+sp remat=full``; raises `InvalidPlanError`."""
    head, *flags = text.split() or [""]
    parallel, plus, suffix = head.partition("+")
    remat, zero = Remat.NONE, 3
    for flag in flags:
        if flag == "zero2":
            zero = 2
        elif flag.startswith("remat=") and flag.removeprefix("remat=") in set(Remat):
            remat = Remat(flag.removeprefix("remat="))
        else:
            raise InvalidPlanError(
                field="strategy",
                found=repr(flag),
                expected="zero2 or remat=none|selective|full after the levels",
                hint="write for example 'fsdp4-tp2+sp remat=full'",
            )
    if plus and suffix != "sp":
        raise InvalidPlanError(
            field="strategy", found=repr(head), expected="nothing but +sp after the levels", hint="write tp2+sp"
        )
    return Strategy(levels=parse_parallel(parallel), sp=bool(plus), remat=remat, zero=2 if zero == 2 else 3)
