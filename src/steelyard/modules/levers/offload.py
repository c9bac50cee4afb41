"""Implementation of offload: AdamW with moments in host memory, blocks that save activations there, and layers whose
parameters are stored there.

Moments are copied to the device a part at a time; all tensors that a block saved return when its backward pass needs
the first of them. FSDP copies the parameters, and AdamW updates them in host memory.
Everything is queued in one stream of the device, copies in order with updates and layers. An optimizer step ends after
its copies, because others read moments in host memory without a stream.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator
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
    """AdamW with moments in host memory, whose updates are bitwise those of fused `torch.optim.AdamW`."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient."""
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
    """AdamW for parameters in host memory, with the moments there too."""

    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        for parameter in (each for each in group["params"] if each.grad is not None and not self.state[each]):
            self.state[parameter] = {"step": torch.zeros(()), **{slot: _on_host(parameter) for slot in _SLOTS}}
        return super()._init_group(group, *found)


def _on_host(parameter: nn.Parameter) -> Tensor:
    """Return a moment of zeros, placed like the parameter, with this rank's part in host memory."""
    part = empty_on_host(local_part(parameter).detach()).zero_()
    return DTensor(part, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else part


@contextmanager
def saving_on_host(layer: nn.Module, shared: Iterable[Tensor]) -> Iterator[None]:
    """Save in host memory all that autograd saves of a layer's forward pass, except parameters, buffers and tensors
    ``shared`` with other layers.
    """
    group = _Group(layer, shared)
    with saved_tensors_hooks(group.pack, _Saved.unpack):
        yield
    group.kept.clear()


class _Group:
    """Tensors saved by one pass through a layer."""

    def __init__(self, layer: nn.Module, shared: Iterable[Tensor]) -> None:
        self._layer, self._shared = layer, {_key(each) for each in shared}
        self.kept: dict[Hashable, tuple[Tensor, _Storage]] = {}
        """Saved tensors by device storage, which is kept until the pass ends so that no other takes its place."""
        self.storages: weakref.WeakSet[_Storage] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> "_Saved | Tensor":
        """Return the object to save instead of a tensor."""
        local = _local(tensor)
        there = _key(local)
        key: Hashable = there
        if local._version:  # changed in place, maybe after another part of its storage was saved
            key = *there, local._version, local.shape, local.stride(), local.storage_offset()
        if key not in self.kept:
            own = (*self._layer.parameters(), *self._layer.buffers())
            is_resting = there in self._shared or any(_key(each) == there for each in own)
            if is_resting or not local.untyped_storage().nbytes():
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
        """Return the whole storage on the device, after copying back all storages of its group."""
        if not self._is_back:
            for each in self._group.storages:
                each._there = torch.empty_like(each._there, device=each._device).copy_(each._there, non_blocking=True)
                each._is_back = True
        return self._there


class _Saved(NamedTuple):
    storage: _Storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any
    """Spec of the DTensor of which this is the local part; None for a plain tensor."""

    @staticmethod
    def unpack(saved: "_Saved | Tensor") -> Tensor:
        """Return the tensor that was packed."""
        if isinstance(saved, Tensor):
            return saved
        local = saved.storage.back().as_strided(saved.shape, saved.stride, saved.offset)
        return local if saved.spec is None else DTensor(local, saved.spec, requires_grad=False)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, after waiting for it; a fake tensor has another storage after the wait."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(part, AsyncCollectiveTensor):
        part.trigger_wait()
        part = part.elem
    return part


def _key(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Return the storage of a tensor and the dtype in which it is read."""
    local = _local(tensor)
    return local.untyped_storage()._cdata, local.dtype
