"""Part of a pipeline as torch's schedules run it, and its exchange of tensors with its neighbours.

A stage of `torch.distributed.pipelining` has a receive buffer for every microbatch of a step, made before the first
step and kept to the end of training, and some schedules wait for sends only when the step ends. Here a buffer is made
when a receive begins. An activation is freed after the backward pass of its microbatch, and a gradient after the
backward pass that reads it. A sent tensor is kept until it must have arrived: an activation until its gradient is
there, a gradient until the next is sent. The memory therefore does not grow with the microbatches of a step.

torch knows one peer before and one after a stage. Here each tensor is exchanged in pieces. Between stages of the same
size each rank sends its part to the rank at the same place, in the layout of the layer before, and the receiving stage
redistributes. Between stages of different sizes, each side divides by samples the tensors that its ranks would hold
copies of, if the number of samples allows it, and every rank receives the pieces of its part from the ranks that have
them: each entry crosses the border once, whatever the degrees are, and copies are gathered inside the stage. Gradients
take the same way back. If chunks lie in a V, a stage has two neighbouring parts and hands their tensors over itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode

from steelyard.modules.context_attention import rank_order
from steelyard.plan.dimensions.dimension import Placed
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import mesh_axes

_SAMPLES, _TOKENS = (Placed.BATCH.value,), (Placed.SEQUENCE.value, Placed.HEAD_TAIL.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Samples and tokens of this rank's part of an activation, and the rank that sends or receives them."""

    peer: int
    where: tuple[slice, slice]


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """Layout of an activation on the ranks of a stage while it crosses a border."""

    first_rank: int
    sizes: tuple[int, ...]
    """Sizes of the axes of the stage mesh."""
    letters: str
    """Placement over each axis, as letters of `steelyard.plan.dimensions.dimension.Placed`."""
    head_tail_degree: int
    """Number of ranks over which tokens are divided in head-tail order; 1 for natural order."""

    @property
    def ranks(self) -> range:
        """Ranks of the stage."""
        return range(self.first_rank, self.first_rank + prod(self.sizes))

    def local_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a rank's part of an activation [B, S, …]."""
        degrees = (self._degree(_SAMPLES), self._degree(_TOKENS))
        return (*(size // degree for size, degree in zip(whole, degrees, strict=False)), *whole[2:])

    @property
    def of_copies(self) -> "ActivationLayout":
        """Layout of a tensor that every rank of the stage holds whole."""
        return replace(self, letters=Placed.WHOLE.value * len(self.sizes), head_tail_degree=1)

    @cached_property
    def blocks(self) -> dict[tuple[int, int], list[int]]:
        """Ranks that hold each block, by the block's indices among the divisions of samples and of tokens."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank in self.ranks:
            found.setdefault(self.block_of(rank), []).append(rank)
        return found

    def block_of(self, rank: int) -> tuple[int, int]:
        """Return the block that a rank holds."""
        return self._index(rank, _SAMPLES), self._index(rank, _TOKENS)

    def holder(self, block: tuple[int, int], target: int) -> int:
        """Return the rank that sends a block to the rank at place ``target``: the one at that place if it holds it."""
        ranks = self.blocks[block]
        own = self.first_rank + target
        return own if own in ranks else ranks[target % len(ranks)]

    def samples_of(self, block: tuple[int, int], count: int) -> list[tuple[int, int, int]]:
        """Return the samples of a block out of ``count``: first, end, and the offset of the first in the block."""
        size = count // self._degree(_SAMPLES)
        return [(block[0] * size, block[0] * size + size, 0)]

    def tokens_of(self, block: tuple[int, int], count: int) -> list[tuple[int, int, int]]:
        """Return the tokens of a block out of ``count`` in natural order: runs, each a triple as in `samples_of`."""
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
    """Return the layouts in which part ``index`` - 1 sends the activation and part ``index`` receives it."""
    before, after = plan.parts[index - 1], plan.parts[index]
    layer = after.first_layer
    sending = _layout(plan, layer - 1, before.ranks[0])
    if before.num_devices == after.num_devices:
        return sending, _layout(plan, layer - 1, after.ranks[0])
    return _even(sending, plan), _even(_layout(plan, layer, after.ranks[0]), plan)


def sent_pieces(rank: int, source: ActivationLayout, target: ActivationLayout, shape: tuple[int, ...]) -> list[Piece]:
    """Return the pieces of an activation [B, S, …] that ``rank`` of the stage ``source`` sends to ``target``."""
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
    """Return the pieces that ``rank`` of the stage ``target`` receives, the counterpart of `sent_pieces`."""
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
    """Return the layout with samples divided instead of copied, if the samples of a microbatch can be divided so."""
    letters = layout.letters.replace(Placed.WHOLE.value, Placed.BATCH.value)
    degree = prod(size for size, letter in zip(layout.sizes, letters, strict=True) if letter in _SAMPLES)
    return layout if plan.microbatch_samples % degree else replace(layout, letters=letters)


_Where = tuple[slice, slice]


def _common(
    source: ActivationLayout,
    sent: tuple[int, int],
    target: ActivationLayout,
    received: tuple[int, int],
    shape: tuple[int, ...],
) -> Iterator[tuple[_Where, _Where]]:
    """Yield the intersections of two blocks of an activation [B, S, …] as slices of the one and of the other."""
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


Pieces = Sequence[Sequence[Piece]]
"""Pieces of each exchanged tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Pieces in which a part exchanges a microbatch with its neighbours; empty if it has none on another stage.

    Gradients have pieces only for the tensors that need one.
    """

    arriving: Pieces = ()
    """Pieces of the activation from the part before."""
    returning: Pieces = ()
    """Pieces of the gradient to the part before."""
    leaving: Pieces = ()
    """Pieces of the activation to the next part."""
    coming_back: Pieces = ()
    """Pieces of the gradient from the next part."""


class PipelinePart(PipelineStage):
    """Part ``index`` of a pipeline, a stage in torch's terms; ``examples`` are like its input and its output.

    ``group`` has one rank of each stage. It is None if stages have different numbers of ranks; ``alone``, a group of
    this rank only, is then used. With ``sends_itself`` the part begins and ends its sends itself, for a schedule that
    waits for them only when the step ends. ``weight_pass`` returns the weight pass that a backward pass leaves, if the
    schedule has weight passes.
    """

    device: torch.device

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_parts: int,
        device: torch.device,
        *,
        examples: tuple[Any, Any],
        group: dist.ProcessGroup | None,
        alone: dist.ProcessGroup,
        exchange: Exchange,
        sends_itself: bool,
        weight_pass: Callable[[], Callable[[], None]] | None,
    ) -> None:
        super().__init__(module, index, num_parts, device, *examples, group=group or alone, dw_builder=weight_pass)
        self._exchange, self._hands_over = exchange, index < num_parts - 1 and not exchange.leaving
        self._between = group or dist.group.WORLD
        """Group whose ranks exchange tensors."""
        self._has_column = group is not None
        self._sends_itself = sends_itself
        self._arrived: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
        """Destinations of pieces that are received into separate buffers, with these buffers."""
        self._receives: dict[tuple[Any, ...], list[dist.P2POp]] = {}
        """Receive operations that a schedule was given and may still hold, by their receive infos."""
        self._sent_activations: dict[int, list[_Send]] = {}
        self._sent_gradients: list[_Send] = []

    def end_step(self) -> None:
        """Wait for the last sends of a step."""
        for sends in (*self._sent_activations.values(), self._sent_gradients):
            _wait(sends)
        self._sent_activations.clear()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of an activation that the schedule has to begin."""
        operations = self._sends(super().get_fwd_send_ops(fwd_chunk_id), self._exchange.leaving)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        if not _any_needs_gradient(outputs):
            self.fwd_cache[fwd_chunk_id] = (), inputs
        if not self._sends_itself:
            return operations
        if not self.has_backward:
            self.end_step()
        self._sent_activations[fwd_chunk_id] = _begin(operations)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a gradient that the schedule has to begin."""
        if not self.has_backward:
            return []
        operations = self._sends(super().get_bwd_send_ops(bwd_chunk_id), self._exchange.returning)
        if not self._sends_itself:
            return operations
        _wait(self._sent_gradients)
        self._sent_gradients = _begin(operations)
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of an activation that the schedule has to begin."""
        return self._receive(self.args_recv_info[fwd_chunk_id], self._exchange.arriving)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a gradient that the schedule has to begin."""
        if not self.has_backward:
            return []
        return self._receive(self.grad_recv_info[bwd_chunk_id], self._exchange.coming_back)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        """Compute the output for a microbatch; afterwards only autograd and torch's cache hold the received tensors."""
        self._put_together(self.args_recv_info[fwd_chunk_id])
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **keywords)
        self._let_go(self.args_recv_info[fwd_chunk_id])
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        if self._hands_over and not _any_needs_gradient(outputs):
            outputs = ()
        self.fwd_cache[fwd_chunk_id] = outputs, inputs if _any_needs_gradient(inputs) else ()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> None:
        """Run the backward pass of a microbatch; the activation that was sent has arrived, as its gradient is here."""
        if not self.has_backward:
            return
        _wait(self._sent_activations.pop(bwd_chunk_id, []))
        self._put_together(self.grad_recv_info[bwd_chunk_id])
        outputs, inputs = self.fwd_cache[bwd_chunk_id]
        if outputs:
            super().backward_one_chunk(bwd_chunk_id, *arguments, **keywords)
        else:
            del self.fwd_cache[bwd_chunk_id]
        if not inputs:
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self.args_recv_info[bwd_chunk_id])
        self._let_go(self.grad_recv_info[bwd_chunk_id])

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients for the part before on this stage; none without backward passes."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the next part on this stage for the tensors that need one, zeros if there is none."""
        infos = self.grad_recv_info[mb_index] if self.has_backward else ()
        for info, gradient in zip(infos, next_stage_bwd_outputs, strict=True):
            if info.buffer is not None:
                info.buffer = torch.zeros_like(info.buffer, device=self.device) if gradient is None else gradient

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> None:
        """Run the weight pass of a microbatch, if it had a backward pass."""
        if bwd_chunk_id in self.dw_runner:
            super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **keywords)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[Any, ...]:
        with self._without_memory():
            return super()._create_grad_recv_info(act_send_info)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Make buffers on the meta device in this context."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _sends(self, whole: list[dist.P2POp], pieces: Pieces) -> list[dist.P2POp]:
        """Return sends of the pieces, which replace torch's sends of whole tensors to one peer."""
        return [
            dist.P2POp(dist.isend, _part(operation.tensor, piece).contiguous(), piece.peer, self._between)
            for operation, of_tensor in zip(whole, pieces, strict=True)
            for piece in of_tensor
        ]

    def _receive(self, recv_infos: tuple[Any, ...], pieces: Pieces) -> list[dist.P2POp]:
        operations, apart = [], []
        wanted_infos = [info for info in recv_infos if info.buffer is not None]  # no buffer without a gradient
        for info, of_tensor in zip(wanted_infos if pieces else (), pieces, strict=True):
            info.buffer = torch.empty_like(info.buffer, device=self.device)
            for piece in of_tensor:
                wanted = _part(info.buffer, piece)
                into = wanted if wanted.is_contiguous() else torch.empty_like(wanted, memory_format=_CONTIGUOUS)
                if into is not wanted:
                    apart.append((wanted, into))
                operations.append(dist.P2POp(dist.irecv, into, piece.peer, self._between))
        self._arrived[recv_infos], self._receives[recv_infos] = apart, operations
        return operations

    @torch.no_grad()
    def _put_together(self, recv_infos: tuple[Any, ...]) -> None:
        for wanted, arrived in self._arrived.pop(recv_infos, []):
            wanted.copy_(arrived)

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        """Return the vote on whether shapes are known: stage by stage, or by all ranks if no group joins the stages."""
        if self._has_column:
            return super()._warmup_forward_vote(has_backward, received_acc)
        is_static = not InferenceMode.needs_dynamic(self._user_meta, has_backward)
        vote = torch.tensor([int(is_static)], dtype=torch.int32, device=self.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        return vote

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if self._has_column or received_result is None:
            return super()._warmup_backward_result(received_result)
        return received_result

    def _let_go(self, recv_infos: tuple[Any, ...]) -> None:
        """Release the received tensors, including those in the schedule's variables."""
        self._receives.pop(recv_infos, []).clear()
        for info in recv_infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device="meta")


_CONTIGUOUS = torch.contiguous_format


def _any_needs_gradient(tensors: Iterable[Any]) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in tensors)


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor[piece.where[: tensor.ndim]]


_Send = tuple[dist.Work, Tensor]
"""A send and its tensor."""


def _begin(operations: list[dist.P2POp]) -> list[_Send]:
    return [
        (dist.isend(each.tensor, group=each.group, tag=each.tag, group_dst=each.group_peer), each.tensor)
        for each in operations
    ]


def _wait(sends: list[_Send]) -> None:
    for work, _ in sends:
        work.wait()
    sends.clear()
