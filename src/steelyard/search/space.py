r"""The strategy space: every way in which the $G$ devices of one stage may share the work of one layer.

A layer takes one leaf of the papers' decision tree: an ordered factorisation $G = d_1 d_2 \cdots d_j$ in which every
factor is at least 2 and carries a kind of parallelism of its own, the outermost level first. The rules are

1. groups are equal, so the degrees divide $G$ (any $G$: primes of the count, not only powers of two);
2. a kind of parallelism appears on one level only;
3. `dp` and `fsdp` are never mixed in one layer (this prunes the tree);
4. order matters: tensor parallelism may lie on neighbouring or on strided ranks.

Each leaf is then multiplied by the variants that its kinds allow (ZeRO stage, sequence parallelism) and by the remat
choices. This module is the only one of the package that knows the kinds: a new one is added to `Parallelism` and, if
it has variants, to `_variants`.

Source: Miao et al. 2022 (arXiv 2211.13878), section 3.2; Wang et al. 2023 (arXiv 2307.02031) for remat as a leaf.
Not modelled here: divisibility by heads, width, vocabulary and batch, which `cost` marks as illegal per layer kind.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.plan.strategy import DATA_KINDS, Level, Parallelism, Remat, Strategy, ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceOptions:
    """Which leaves of the decision tree are offered.

    ``max_tp`` bounds the tensor-parallel degree. ``devices_per_node`` bounds the span of a tensor-parallel group (its
    degree times the degrees of the levels inside it), which keeps strided tp inside a node as well.
    ``aligned_only`` keeps the leaves whose levels are whole axes of the stage mesh, which the runtime needs.
    """

    kinds: tuple[Parallelism, ...] = (Parallelism.DP, Parallelism.FSDP, Parallelism.TP)
    zero_stages: tuple[ZeroStage, ...] = (3,)
    sp: tuple[bool, ...] = (False, True)
    remats: tuple[Remat, ...] = (Remat.NONE, Remat.SELECTIVE, Remat.FULL)
    max_tp: int | None = None
    devices_per_node: int | None = None
    aligned_only: bool = True


def enumerate_strategies(num_devices: int, options: SpaceOptions | None = None) -> tuple[Strategy, ...]:
    """All strategies for a stage of ``num_devices`` devices, fewest levels first, in an order that never changes."""
    options = options or SpaceOptions()
    return tuple(
        strategy
        for levels in enumerate_levels(num_devices, options.kinds)
        if len(DATA_KINDS & {level.kind for level in levels}) <= 1
        for strategy in _variants(levels, options)
        if refusal(strategy, options) is None
    )


def enumerate_levels(num_devices: int, kinds: tuple[Parallelism, ...]) -> tuple[tuple[Level, ...], ...]:
    """The unpruned tree: every ordered product of degrees, each with a kind of its own, that spans the devices."""
    return tuple(
        tuple(Level(kind=kind, degree=degree) for kind, degree in zip(order, degrees, strict=True))
        for depth in range(len(kinds) + 1)
        for order in itertools.permutations(kinds, depth)
        for degrees in _ordered_factorisations(num_devices, depth)
    )


def _ordered_factorisations(number: int, depth: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``number`` as a product of ``depth`` factors of 2 or more, largest first factor first."""
    if depth == 0:
        if number == 1:
            yield ()
        return
    for first in range(number, 1, -1):
        if number % first == 0:
            for rest in _ordered_factorisations(number // first, depth - 1):
                yield (first, *rest)


def _variants(levels: tuple[Level, ...], options: SpaceOptions) -> Iterator[Strategy]:
    """The leaves that share these levels: ZeRO stages where there is fsdp, sp where there is tp, remat everywhere."""
    kinds = {level.kind for level in levels}
    zero_stages: tuple[ZeroStage, ...] = options.zero_stages if Parallelism.FSDP in kinds else (3,)
    sp_choices = options.sp if Parallelism.TP in kinds else (False,)
    for zero, sp, remat in itertools.product(zero_stages, sp_choices, options.remats):
        yield Strategy(levels=levels, sp=sp, remat=remat, zero=zero)


def refusal(strategy: Strategy, options: SpaceOptions) -> str | None:
    """Why a strategy is not offered under these options, or None where it is."""
    kinds = {level.kind for level in strategy.levels}
    left_out = ", ".join(sorted(kinds - set(options.kinds)))
    span, node = _tp_span(strategy.levels), options.devices_per_node
    reasons = (
        (bool(left_out), f"{left_out} is left out of the search"),
        (
            Parallelism.FSDP in kinds and strategy.zero not in options.zero_stages,
            f"zero {strategy.zero} is left out of the search",
        ),
        (
            Parallelism.TP in kinds and strategy.sp not in options.sp,
            f"tp {'with' if strategy.sp else 'without'} sp is left out of the search",
        ),
        (strategy.remat not in options.remats, f"remat={strategy.remat} is left out of the search"),
        (
            options.max_tp is not None and strategy.tp > options.max_tp,
            f"tp {strategy.tp} is above the largest allowed, {options.max_tp}",
        ),
        (node is not None and span > node, f"a tp group would reach across {span} ranks, a node has {node}"),
        (
            options.aligned_only and not strategy.is_aligned,
            f"the levels of {strategy.parallel} are not runs of the stage mesh",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _tp_span(levels: tuple[Level, ...]) -> int:
    """How many consecutive ranks a tensor-parallel group reaches across; 1 without tp."""
    for position, level in enumerate(levels):
        if level.kind is Parallelism.TP:
            return math.prod(inner.degree for inner in levels[position:])
    return 1
