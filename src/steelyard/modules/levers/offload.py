"""The twin of offload: AdamW whose moments lie in the memory of the host and come to the device a part at a time.

Everything is queued in one stream of the device, in the order copy, update, copy back, and the host waits for nothing.
So who reads moments elsewhere waits for the device first, as the end of a step of `steelyard.runtime.train` does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer as TorchOptimizer

from steelyard.levers.offload import CHUNK
from steelyard.modules.host_memory import zeros_on_host
from steelyard.modules.updates import local_part

_EPS = 1e-8
_SLOTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(TorchOptimizer):
    """The updates of `torch.optim.AdamW`, fused, bit by bit."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        buffers: dict[torch.device, Tensor] = {}
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state |= {slot: _on_host(parameter) for slot in _SLOTS}
                state["step"] += 1
                if parameter.device not in buffers:
                    buffers[parameter.device] = torch.empty((2, self._chunk), device=parameter.device)
                self._update(parameter, state, buffers[parameter.device], group)

    @property
    def _chunk(self) -> int:
        """Entries of a moment that are on the device at a time."""
        parts = (local_part(each).numel() for group in self.param_groups for each in group["params"])
        return min(CHUNK, max(parts, default=0))

    def _update(self, parameter: nn.Parameter, state: dict[str, Tensor], buffer: Tensor, group: dict[str, Any]) -> None:
        of_entries = parameter, parameter.grad, *(state[slot] for slot in _SLOTS)
        values, gradients, *moments = (local_part(each).detach().view(-1) for each in of_entries)
        beta1, beta2 = group["betas"]
        # the first chunk of fake tensors stands for all
        count = min(values.numel(), buffer.shape[1]) if isinstance(values, FakeTensor) else values.numel()
        for first in range(0, count, buffer.shape[1]):
            chunk = slice(first, first + buffer.shape[1])
            on_host = [each[chunk] for each in moments]
            there = [
                line[: each.numel()].copy_(each, non_blocking=True) for line, each in zip(buffer, on_host, strict=True)
            ]
            torch._fused_adamw_(
                *([values[chunk]], [gradients[chunk]], [there[0]], [there[1]], [], [state["step"]]),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=_EPS,
                amsgrad=False,
                maximize=False,
            )
            for each, moment in zip(on_host, there, strict=True):
                each.copy_(moment, non_blocking=True)


def _on_host(parameter: nn.Parameter) -> Tensor:
    """A moment of zeros, of which this rank's part lies in host memory, placed as the parameter."""
    part = zeros_on_host(local_part(parameter).detach())
    return DTensor(part, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else part
