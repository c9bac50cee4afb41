"""What the ranks of two neighbouring stages send each other of a microbatch's activation, and of its gradient back.

Between stages of as many ranks each rank sends what it has to the rank at its own place, in the layout of the layer
before, and the receiving stage brings it into the one that it wants. Stages of unlike sizes have no such place. There
each side divides by samples what its ranks would hold copies of, where the samples allow it, and every rank gets the
pieces of its own part from those that have them: each entry crosses the border once, whatever the degrees are, and the
copies are gathered inside the stage. Gradients go the same way back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from steelyard.modules.head_tail import rank_order
from steelyard.plan.dimensions.dimension import Placed
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import mesh_axes

_SAMPLES, _TOKENS = (Placed.BATCH.value,), (Placed.SEQUENCE.value, Placed.HEAD_TAIL.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Samples and tokens of this rank's part of an activation, and the rank that they go to or come from."""

    peer: int
    where: tuple[slice, slice]


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """How an activation lies on the ranks of a stage while it crosses a border."""

    first_rank: int
    sizes: tuple[int, ...]
    """Of the axes of the stage mesh."""
    letters: str
    """How it lies over each axis, as `steelyard.plan.dimensions.dimension.Placed` writes it."""
    head_tail_degree: int
    """Ranks over which tokens are divided in head-tail order; 1 for the order in which they read."""

    @property
    def ranks(self) -> range:
        """The ranks of the stage."""
        return range(self.first_rank, self.first_rank + prod(self.sizes))

    def local_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What a rank has of an activation [B, S, …]."""
        degrees = (self._degree(_SAMPLES), self._degree(_TOKENS))
        return (*(size // degree for size, degree in zip(whole, degrees, strict=False)), *whole[2:])

    @property
    def of_copies(self) -> "ActivationLayout":
        """How what every rank of the stage has whole lies on it."""
        letters = Placed.WHOLE.value * len(self.sizes)
        return ActivationLayout(first_rank=self.first_rank, sizes=self.sizes, letters=letters, head_tail_degree=1)

    @cached_property
    def blocks(self) -> dict[tuple[int, int], list[int]]:
        """The ranks that hold each block, by its place among the divisions of the samples and of the tokens."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank in self.ranks:
            found.setdefault(self.block_of(rank), []).append(rank)
        return found

    def block_of(self, rank: int) -> tuple[int, int]:
        """The block that a rank holds."""
        return self._index(rank, _SAMPLES), self._index(rank, _TOKENS)

    def holder(self, block: tuple[int, int], target: int) -> int:
        """The rank that sends its part of a block to the rank at place ``target``: its own place if that has it."""
        ranks = self.blocks[block]
        own = self.first_rank + target
        return own if own in ranks else ranks[target % len(ranks)]

    def samples_of(self, block: tuple[int, int], count: int) -> list[tuple[int, int, int]]:
        """The samples of a block out of ``count``: first, end, and where the first lies in the block."""
        size = count // self._degree(_SAMPLES)
        return [(block[0] * size, block[0] * size + size, 0)]

    def tokens_of(self, block: tuple[int, int], count: int) -> list[tuple[int, int, int]]:
        """The tokens of a block out of ``count`` as they read: runs, each as `samples_of` has it."""
        size = count // self._degree(_TOKENS)
        first, end = block[1] * size, block[1] * size + size
        pieces = rank_order(self.head_tail_degree) if self.head_tail_degree > 1 else [0]
        length, runs = count // len(pieces), []
        for place, piece in enumerate(pieces):
            low, high = max(first, place * length), min(end, place * length + length)
            if low < high:
                moved = (piece - place) * length
                runs.append((low + moved, high + moved, low - first))
        return runs

    def _degree(self, letters: tuple[str, ...]) -> int:
        return prod(size for size, letter in zip(self.sizes, self.letters, strict=True) if letter in letters)

    def _index(self, rank: int, letters: tuple[str, ...]) -> int:
        place = np.unravel_index(rank - self.first_rank, self.sizes) if self.sizes else ()
        axes = [axis for axis, letter in enumerate(self.letters) if letter in letters]
        if not axes:
            return 0
        return int(np.ravel_multi_index([place[axis] for axis in axes], [self.sizes[axis] for axis in axes]))


def border(plan: Plan, index: int) -> tuple[ActivationLayout, ActivationLayout]:
    """How the activation lies as part ``index`` - 1 of a pipeline sends it, and as part ``index`` receives it."""
    before, after = plan.parts[index - 1], plan.parts[index]
    layer = after.first_layer
    sending = _layout(plan, layer - 1, before.ranks[0])
    if before.num_devices == after.num_devices:
        return sending, _layout(plan, layer - 1, after.ranks[0])
    return _even(sending, plan), _even(_layout(plan, layer, after.ranks[0]), plan)


def sent_pieces(rank: int, source: ActivationLayout, target: ActivationLayout, shape: tuple[int, ...]) -> list[Piece]:
    """What ``rank`` of the stage ``source`` sends of an activation [B, S, …] to the stage ``target``."""
    block = source.block_of(rank)
    return [
        Piece(peer=peer, where=mine)
        for place, peer in enumerate(target.ranks)
        if source.holder(block, place) == rank
        for mine, _ in _common(source, block, target, target.block_of(peer), shape)
    ]


def received_pieces(
    rank: int, source: ActivationLayout, target: ActivationLayout, shape: tuple[int, ...]
) -> list[Piece]:
    """What ``rank`` of the stage ``target`` receives, where `sent_pieces` says what others send."""
    place, own = rank - target.first_rank, target.block_of(rank)
    return [
        Piece(peer=source.holder(block, place), where=mine)
        for block in source.blocks
        for _, mine in _common(source, block, target, own, shape)
    ]


def _layout(plan: Plan, layer: int, first_rank: int) -> ActivationLayout:
    strategy = plan.strategies[layer]
    sizes = mesh_axes(strategy.num_devices)
    return ActivationLayout(
        first_rank=first_rank,
        sizes=sizes,
        letters=strategy.hidden.placements(sizes),
        head_tail_degree=strategy.hidden.head_tail_degree,
    )


def _even(layout: ActivationLayout, plan: Plan) -> ActivationLayout:
    """The layout without copies, if a microbatch has enough samples."""
    letters = layout.letters.replace(Placed.WHOLE.value, Placed.BATCH.value)
    degree = prod(size for size, letter in zip(layout.sizes, letters, strict=True) if letter in _SAMPLES)
    if plan.microbatch_samples % degree:
        return layout
    return ActivationLayout(
        first_rank=layout.first_rank,
        sizes=layout.sizes,
        letters=letters,
        head_tail_degree=layout.head_tail_degree,
    )


_Where = tuple[slice, slice]


def _common(
    source: ActivationLayout,
    sent: tuple[int, int],
    target: ActivationLayout,
    received: tuple[int, int],
    shape: tuple[int, ...],
) -> Iterator[tuple[_Where, _Where]]:
    """What two blocks of an activation [B, S, …] have in common: where it lies in the one, and where in the other."""
    num_samples, num_tokens = shape[0], shape[1] if len(shape) > 1 else 1
    samples = _runs(source.samples_of(sent, num_samples), target.samples_of(received, num_samples))
    tokens = list(_runs(source.tokens_of(sent, num_tokens), target.tokens_of(received, num_tokens)))
    for from_samples, to_samples in samples:
        for from_tokens, to_tokens in tokens:
            yield (from_samples, from_tokens), (to_samples, to_tokens)


def _runs(source: list[tuple[int, int, int]], target: list[tuple[int, int, int]]) -> Iterator[tuple[slice, slice]]:
    for first, end, at in source:
        for other_first, other_end, other_at in target:
            low, high = max(first, other_first), min(end, other_end)
            if low < high:
                yield (
                    slice(at + low - first, at + high - first),
                    slice(other_at + low - other_first, other_at + high - other_first),
                )
