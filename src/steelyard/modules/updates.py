"""End of a step on one rank: the norm of its gradients, clipping, and AdamW on its part of the parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW


class LocalUpdates:
    """Mixin that makes an optimizer of `torch.optim` update each rank's part of its parameters; states stay DTensors.

    It is for updates of this part that need no other part: DTensor's dispatch has nothing to decide there and costs
    more than the update. 50 parameters of 300 × 300 took 1.25 s of CPU per step as DTensors, and 0.12 to 0.21 s in
    fused operations.
    """

    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        """Collect parameters, gradients and states as the optimizer does, and replace each by this rank's part."""
        result: bool = super()._init_group(group, *found)  # type: ignore[misc]
        for tensors in found:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return result


class LocalAdamW(LocalUpdates, AdamW):
    """AdamW in one fused operation on each rank's part of its parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; all of it if it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank's part covers."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor; a collective call of the ranks that it is distributed over."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def add_square_norms(square: Tensor, gradients: Sequence[Tensor], copies: Sequence[int]) -> None:
    """Add the squared fp32 norm of each gradient, over the number of ranks that hold it, to the scalar ``square``."""
    if gradients:
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
        square += (norms.square() / torch.tensor(copies, device=norms.device)).sum().to(square.device)


def clip_to_norm(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients so that ``norm``, which is the norm of these and others, becomes at most ``max_norm``."""
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
