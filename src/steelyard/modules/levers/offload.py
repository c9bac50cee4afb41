"""The twin of offload: AdamW whose moments lie in the memory of the host, blocks that save there, and layers whose
parameters lie there.

Moments come to the device a part at a time; what a block saved comes back as its backward pass needs the first of it.
Parameters are FSDP's to copy, and AdamW's to update where they lie.
Everything is queued in one stream of the device, copies in their order with updates and layers; a step of the optimizer
ends when its copies have, since others read moments in host memory without a stream.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer as TorchOptimizer

from steelyard.levers.offload import CHUNK
from steelyard.modules.host_memory import empty_on_host
from steelyard.modules.updates import LocalAdamW, local_part

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
        parts = (local_part(each).numel() for group in self.param_groups for each in group["params"])
        chunk = min(CHUNK, max(parts, default=0))  # entries of a moment that are on the device at a time
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state |= {slot: _on_host(parameter) for slot in _SLOTS}
                state["step"] += 1
                if parameter.device not in buffers:
                    buffers[parameter.device] = torch.empty((2, chunk), device=parameter.device)
                self._update(parameter, state, buffers[parameter.device], group)
        for device in (each for each in buffers if each.type == "cuda"):
            torch.cuda.current_stream(device).synchronize()

    def _update(self, parameter: nn.Parameter, state: dict[str, Tensor], buffer: Tensor, group: dict[str, Any]) -> None:
        of_entries = parameter, *(state[slot] for slot in _SLOTS)
        values, *moments = (local_part(each).detach().view(-1) for each in of_entries)
        gradients = local_part(parameter.grad).reshape(-1)
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


class HostAdamW(LocalAdamW):
    """AdamW of parameters that lie in host memory, with moments beside them."""

    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        for parameter in (each for each in group["params"] if each.grad is not None and not self.state[each]):
            self.state[parameter] = {"step": torch.zeros(()), **{slot: _on_host(parameter) for slot in _SLOTS}}
        return super()._init_group(group, *found)


def _on_host(parameter: nn.Parameter) -> Tensor:
    """A moment of zeros, of which this rank's part lies in host memory, placed as the parameter."""
    part = empty_on_host(local_part(parameter).detach()).zero_()
    return DTensor(part, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else part


@contextmanager
def saving_on_host(layer: nn.Module, shared: Iterable[Tensor]) -> Iterator[None]:
    """A forward pass of a layer, of which what autograd saves lies in host memory; not parameters and what is
    ``shared`` with other layers.
    """
    group = _Group(layer, shared)
    with saved_tensors_hooks(group.pack, _Saved.unpack):
        yield
    group.kept.clear()


class _Group:
    """What one pass through a layer saves."""

    def __init__(self, layer: nn.Module, shared: Iterable[Tensor]) -> None:
        self._layer, self._shared = layer, {_key(each) for each in shared}
        self.kept: dict[tuple[int, torch.dtype], tuple[Tensor, _Storage]] = {}
        """By the storage on the device, which stays until the pass has ended, so that no other takes its place."""
        self.storages: weakref.WeakSet[_Storage] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> "_Saved | Tensor":
        """What is saved in the place of a tensor."""
        local = _local(tensor)
        key = _key(local)
        if key not in self.kept:
            own = (*self._layer.parameters(), *self._layer.buffers())
            if key in self._shared or not local.untyped_storage().nbytes() or any(_key(each) == key for each in own):
                return tensor
            self.kept[key] = local, _Storage(local, self)
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        return _Saved(self.kept[key][1], local.shape, local.stride(), local.storage_offset(), spec)


class _Storage:
    """A storage that tensors share, on the host until the first tensor of its group is needed."""

    def __init__(self, local: Tensor, group: _Group) -> None:
        whole = local.detach().as_strided((local.untyped_storage().nbytes() // local.itemsize,), (1,), 0)
        self._there, self._device, self._group = empty_on_host(whole), whole.device, group
        self._there.copy_(whole, non_blocking=True)
        self._is_back = False
        group.storages.add(self)

    def back(self) -> Tensor:
        """All of it on the device; with it come the others of its group."""
        if not self._is_back:
            for each in self._group.storages:
                each._there = torch.empty_like(each._there, device=each._device).copy_(each._there, non_blocking=True)
                each._is_back = True
        return self._there


class _Saved(NamedTuple):
    """A tensor in a storage."""

    storage: _Storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any
    """As whose part a DTensor has it."""

    @staticmethod
    def unpack(saved: "_Saved | Tensor") -> Tensor:
        """The tensor that was packed."""
        if isinstance(saved, Tensor):
            return saved
        local = saved.storage.back().as_strided(saved.shape, saved.stride, saved.offset)
        return local if saved.spec is None else DTensor(local, saved.spec, requires_grad=False)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, when it has arrived; of a fake one what is waited for is another storage."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(part, AsyncCollectiveTensor):
        part.trigger_wait()
        part = part.elem
    return part


def _key(tensor: Tensor) -> tuple[int, torch.dtype]:
    """The storage of a tensor, and as what it is read."""
    local = _local(tensor)
    return local.untyped_storage()._cdata, local.dtype
