"""Implementation of the optimizers of levers; each updates this rank's part of parameters.

| name                    | made of                                                                              |
|-------------------------|--------------------------------------------------------------------------------------|
| adamw                   | `torch.optim.AdamW`, fused                                                           |
| adamw-8bit, adamw-4bit  | the states and the update of torchao's ``AdamW8bit`` and ``AdamW4bit``               |
| sgd                     | `torch.optim.SGD` without momentum, fused                                            |
| adafactor               | `torch.optim.Adafactor`                                                              |
| muon                    | `torch.optim.Muon` for hidden matrices, `torch.optim.AdamW`, fused, for all else;    |
|                         | for sharded matrices its update is gathered in bf16, its compute type                |

On GPUs torchao's update is compiled. On the CPU it runs uncompiled, because a compiler may be missing, on `_CHUNK`
entries at a time: its temporaries take 53 bytes per entry, its operations about 110 ns per entry in 8 bits.

A checkpoint holds moments in fp32, because another plan divides the blocks that share a scale differently: `stored`
returns them, `take` quantizes them.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, Adafactor, Muon
from torch.optim import Optimizer as TorchOptimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from steelyard.levers.offload import Offload
from steelyard.levers.optimizer import BLOCK, Optimizer
from steelyard.modules.levers.offload import HostAdamW, OffloadedAdamW
from steelyard.modules.updates import LocalAdamW, LocalUpdates, local_part

_EPS = 1e-8
_LEAST_QUANTIZED = 4096
"""Entries of a moment, as in torchao."""
_LEAST_BLOCK = 64
_CHUNK = 2**16
"""Entries, a multiple of all blocks."""


def make_optimizer(
    lever: Optimizer,
    groups: list[dict[str, Any]],
    *,
    offload: Offload,
    matrices: Collection[int],
    lr: float,
    betas: tuple[float, float],
) -> TorchOptimizer:
    """Make the optimizer of a lever for groups of parameters, all on one mesh; ``betas`` are those of AdamW.

    ``matrices`` are the ids of the parameters that are hidden matrices.
    """
    if offload.moves_parameters:
        return HostAdamW(groups, lr=lr, betas=betas)
    if offload.moves_optimizer:
        return OffloadedAdamW(groups, lr=lr, betas=betas)
    if lever.word in BLOCK:
        return QuantizedAdamW(groups, word=lever.word, lr=lr, betas=betas)
    make: dict[str, Callable[..., TorchOptimizer]] = {
        "adamw": partial(LocalAdamW, betas=betas),
        "sgd": _LocalSGD,
        "adafactor": _LocalAdafactor,
        "muon": partial(_MuonBesideAdamW, matrices=matrices, betas=betas),
    }
    return make[lever.word](groups, lr=lr)


class _LocalSGD(LocalUpdates, SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)


class _LocalAdafactor(LocalUpdates, Adafactor):
    """Adafactor on parameters that are whole on every rank."""


class _LocalMuon(LocalUpdates, Muon):
    """Muon on matrices that are whole on every rank; a matrix with more than two dims is flattened to its first dim and
    the rest.

    Groups get its defaults.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__([{"params": []}], **options)  # which refuses matrices that are stored in parts
        for group in groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self.param_groups = groups

    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        result = super()._init_group(group, *found)
        for tensors in found:
            tensors[:] = [each.flatten(1) for each in tensors]
        return result


class _SharedMuon(_LocalMuon):
    """Muon on matrices that are sharded over the ranks of a mesh dim, like their momenta, or replicated over them.

    Updates are gathered one after another, if they are sharded. Of as many updates as there are ranks, each rank
    orthogonalizes one and broadcasts it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            found = [each for each in group["params"] if each.grad is not None]
            (dim,) = {place for each in found for place, how in enumerate(each.placements) if how.is_shard()} or {0}
            count = found[0].device_mesh.size(dim) if found else 1
            for first in range(0, len(found), count):
                self._update(found[first : first + count], group, dim)

    def _update(self, parameters: list[DTensor], group: dict[str, Any], dim: int) -> None:
        mesh = parameters[0].device_mesh
        rank, own = mesh.get_local_rank(dim), torch.empty(0)
        for owner, parameter in enumerate(parameters):
            gradient, state = local_part(parameter.grad), self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum = local_part(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
            update = _like(parameter, gradient.lerp(momentum, group["momentum"]).bfloat16()).full_tensor()
            own = update if owner == rank else own
        if rank < len(parameters):
            how = group["ns_coefficients"], group["ns_steps"], group["eps"]
            own = _zeropower_via_newtonschulz(own.flatten(1), *how).reshape(own.shape).contiguous()
        for owner, parameter in enumerate(parameters):
            whole = own if owner == rank else torch.empty(parameter.shape, dtype=torch.bfloat16, device=update.device)
            dist.broadcast(whole, group=mesh.get_group(dim), group_src=owner)
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], whole.flatten(1).shape)
            every = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            part = local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(local_part(every.redistribute(placements=parameter.placements)), alpha=-rate)


class _MuonBesideAdamW(TorchOptimizer):
    """Muon for hidden matrices and AdamW for all other parameters; both share groups and states with this optimizer."""

    def __init__(
        self, groups: list[dict[str, Any]], *, matrices: Collection[int], lr: float, betas: tuple[float, float]
    ) -> None:
        split: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            for is_matrix, found in split.items():
                params = [each for each in group["params"] if (id(each) in matrices) == is_matrix]
                found.extend([{**group, "params": params}] if params else [])
        super().__init__([*split[True], *split[False]], {"lr": lr})
        self._parts: list[TorchOptimizer] = []
        if split[True]:
            is_sharded = isinstance(split[True][0]["params"][0], DTensor)
            muon = _SharedMuon if is_sharded else _LocalMuon
            self._parts.append(muon(split[True], lr=lr, adjust_lr_fn="match_rms_adamw"))
        if split[False]:
            self._parts.append(LocalAdamW(split[False], lr=lr, betas=betas))
        for part in self._parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        for part in self._parts:
            part.step()


class QuantizedAdamW(TorchOptimizer):
    """AdamW with moments in 8 or 4 bits, with torchao's moments and update."""

    def __init__(
        self, params: Any, *, word: str, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._word = word

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            lr = torch.as_tensor(group["lr"], dtype=torch.float32)  # as a number it would be compiled in
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = _moment(self._word, parameter, is_signed=True)
                    state["exp_avg_sq"] = _moment(self._word, parameter, is_signed=False)
                state["step"] += 1
                of_entries = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                parts = [local_part(each).detach() for each in of_entries]
                for value, gradient, mean, square in _chunks(parts) if parts[0].device.type == "cpu" else [parts]:
                    _update(parts[0].device.type)(
                        *(value, gradient, state["step"], mean, square, None, lr, *group["betas"]),
                        *(group["weight_decay"], _EPS, True, False),
                    )


def stored(state: Tensor) -> Tensor:
    """Return a state as stored in checkpoints: a quantized one as a copy in fp32 on the CPU, any other unchanged."""
    if not _is_quantized(state):
        return state
    part = local_part(state).detach()
    values = torch.empty(part.shape, device=part.device)
    for quantized, chunk in _chunks([part, values]):
        chunk.copy_(quantized.dequantize())
    return _like(state, values).cpu()


def take(state: Tensor, values: Tensor) -> None:
    """Quantize values of `stored` into a state; do nothing if the state is not quantized."""
    if _is_quantized(state):
        part = local_part(state).detach()
        for quantized, chunk in _chunks([part, local_part(values).contiguous()]):
            quantized.copy_(_scaled_again(chunk.to(part.device), quantized))


def _scaled_again(values: Tensor, quantized: Tensor) -> Tensor:
    """Return values that quantize to the original scales, if they are dequantized values.

    The scale is the largest magnitude of a block, and the lowest code stands for less than the negative scale: 0.993 of
    it in 8 bits, 0.8875 in 4. Values with the lowest code are therefore replaced by the negative scale.
    """
    if not quantized.signed:
        return values
    blocks = values.view(-1, quantized.block_size)
    least = blocks.amin(-1, keepdim=True)
    scale = least / quantized.qmap[0]
    has_lowest = (blocks == least) & (scale > blocks.amax(-1, keepdim=True))
    return torch.where(has_lowest, -scale, blocks).view(-1)


def _is_quantized(state: Tensor) -> bool:
    return is_traceable_wrapper_subclass(local_part(state))


def _moment(word: str, parameter: nn.Parameter, *, is_signed: bool) -> Tensor:
    """Return a moment of zeros, quantized if this rank's part of the parameter is large enough and divides into
    blocks."""
    part = local_part(parameter).detach()
    block = math.gcd(part.numel(), BLOCK[word])
    if part.numel() < _LEAST_QUANTIZED or block < _LEAST_BLOCK:
        return _like(parameter, torch.zeros_like(part))
    return _like(parameter, _state_type(word).zeros(part.shape, is_signed, block, part.device, dtype=part.dtype))


def _like(whole: Tensor, part: Tensor) -> Tensor:
    """Return the tensor whose part on this rank is ``part``, placed like ``whole``."""
    if not isinstance(whole, DTensor):
        return part
    place = {"device_mesh": whole.device_mesh, "placements": whole.placements}
    return DTensor.from_local(part, **place, run_check=False, shape=whole.shape, stride=whole.stride())


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield chunks of the same entries of each tensor, as views; for a non-contiguous gradient, copies.

    For fake tensors only the first chunk is yielded, because the others would have the same operations and memory.
    """
    flat = [each.view(-1) if _is_quantized(each) else each.reshape(-1) for each in tensors]
    num_entries = tensors[0].numel()
    for first in range(0, min(num_entries, _CHUNK) if isinstance(tensors[0], FakeTensor) else num_entries, _CHUNK):
        yield [each[first : first + _CHUNK] for each in flat]


@cache
def _state_type(word: str) -> Any:
    with quietly_imported():
        from torchao.optim import subclass_4bit, subclass_8bit

        for module in (subclass_4bit, subclass_8bit):  # tables that fake tensors cannot make
            module.get_qmap_signed()
            module.get_qmap_unsigned()
    return {"adamw-8bit": subclass_8bit.OptimState8bit, "adamw-4bit": subclass_4bit.OptimState4bit}[word]


@cache
def _update(device_type: str) -> Callable[..., None]:
    """Return the update function of one tensor for a type of device."""
    with quietly_imported():
        from torchao.optim.adam import single_param_adam
    if device_type == "cpu":
        return single_param_adam
    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    def update(*arguments: Any) -> None:
        with torch._dynamo.utils.disable_cache_limit():  # one for each shape, as many as there are
            compiled(*arguments)

    return update


@contextlib.contextmanager
def quietly_imported() -> Iterator[None]:
    """Suppress torchao's warnings about kernels that it cannot load and that are not used."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with _disable_current_modes():
            yield
    finally:
        logging.disable(disabled)
