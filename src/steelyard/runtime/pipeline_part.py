"""A part of the pipeline as torch's schedules run it, which holds what parts exchange only while it is used.

A stage of `torch.distributed.pipelining` has a buffer for what arrives of every microbatch of a step, made before the
first and kept to the end of training, and some schedules wait for what was sent only when the step ends. Here a buffer
is made as a receive begins. An activation goes with the last that uses it, the backward pass of its microbatch, and a
gradient with the backward pass that it is for. What was sent stays until it must have arrived: an activation until its
gradient is there, a gradient until the next is sent. So what is held does not grow with the microbatches of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage


class PipelinePart(PipelineStage):
    """Part ``index`` of a pipeline, which torch calls a stage; ``examples`` are like its input and its output.

    With ``sends_itself`` it begins and ends its sends, for a schedule that waits for them only when the step ends.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_parts: int,
        device: torch.device,
        *,
        examples: tuple[Any, Any],
        group: dist.ProcessGroup,
        sends_itself: bool,
    ) -> None:
        super().__init__(module, index, num_parts, device, *examples, group=group)
        self._sends_itself = sends_itself
        self._receives: dict[tuple[Any, ...], list[dist.P2POp]] = {}
        """What schedules were given to receive and may still hold, by what it is received into."""
        self._sent_activations: dict[int, list[_Send]] = {}
        self._sent_gradients: list[_Send] = []

    def end_step(self) -> None:
        """Waits for the last sends of a step."""
        for sends in (*self._sent_activations.values(), self._sent_gradients):
            _wait(sends)
        self._sent_activations.clear()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of an activation that the schedule has to begin."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self._sends_itself:
            return operations
        self._sent_activations[fwd_chunk_id] = _begin(operations)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a gradient that the schedule has to begin."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        if not self._sends_itself:
            return operations
        _wait(self._sent_gradients)
        self._sent_gradients = _begin(operations)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        """The output for a microbatch; autograd and torch's own cache alone hold what arrived from then on."""
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **keywords)
        self._let_go(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> None:
        """The backward pass of a microbatch, whose activation has arrived: its gradient has come back."""
        _wait(self._sent_activations.pop(bwd_chunk_id, []))
        super().backward_one_chunk(bwd_chunk_id, *arguments, **keywords)
        self._let_go(self.grad_recv_info[bwd_chunk_id])

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[Any, ...]:
        with self._without_memory():
            return super()._create_grad_recv_info(act_send_info)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Buffers that are made in this context have a shape alone."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device)
        self._receives[recv_infos] = super()._get_recv_ops(recv_infos)
        return self._receives[recv_infos]

    def _let_go(self, recv_infos: tuple[Any, ...]) -> None:
        """Forgets what was received, and lets the schedule's variables forget it."""
        self._receives.pop(recv_infos, []).clear()
        for info in recv_infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device="meta")


_Send = tuple[dist.Work, Tensor]
"""A send and what it sends."""


def _begin(operations: list[dist.P2POp]) -> list[_Send]:
    return [
        (dist.isend(each.tensor, group=each.group, tag=each.tag, group_dst=each.group_peer), each.tensor)
        for each in operations
    ]


def _wait(sends: list[_Send]) -> None:
    for work, _ in sends:
        work.wait()
    sends.clear()
