"""Data parallelism around one layer, through FSDP2's machinery for both kinds.

`fully_shard` and `replicate` share precision, accumulation and the kind of parameter that an optimizer sees, whichever
a plan chose. A rank's loss is already divided by the global number of tokens, so gradients are summed over ranks, not
averaged; gloo has no scaled sum, hence the plain one.

The gradients of a replicated layer are copied once, into the one buffer that is reduced in place and that the optimizer
reads. Left alone, FSDP2 copies them three times: it takes a replicated layer for one with a shard group of one rank,
whose gradients it puts into a buffer, divides into another and copies to a third.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from steelyard.modules.layers import ChainLayer
from steelyard.plan.plan import Precision


def shard_over(layer: ChainLayer, mesh: DeviceMesh, precision: Precision, *, reshard_after_forward: bool) -> FSDPModule:
    """The layer with its parameters sharded over the one axis of ``mesh``, in place."""
    policy = mixed_precision(precision)
    return _summing(fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward))


def replicate_over(layer: ChainLayer, mesh: DeviceMesh, precision: Precision) -> FSDPModule:
    """The layer with its parameters replicated over the one axis of ``mesh``, in place."""
    module = _summing(replicate(layer, mesh=mesh, mp_policy=mixed_precision(precision)), divisor=_Undivided(1.0))
    module.set_custom_reduce_scatter(_OneBuffer())
    return module


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """The policy of a precision: bf16 computes in bf16 and keeps and reduces in fp32."""
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def activation_dtype(precision: Precision) -> torch.dtype:
    """Type of the hidden state between layers."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _summing(module: FSDPModule, divisor: float = 1.0) -> FSDPModule:
    module.set_gradient_divide_factor(divisor)
    module.set_force_sum_reduction_for_comms(True)
    return module


class _Undivided(float):
    """The divisor 1.0 that, dividing a tensor, gives that very tensor instead of a copy."""

    @classmethod
    def __torch_function__(
        cls, _function: Any, _types: Any, arguments: tuple[Any, ...] = (), _keywords: dict[str, Any] | None = None
    ) -> Any:
        return arguments[0]


class _OneBuffer(ReduceScatter):
    """Gives the reduction of a replicated layer one buffer for what goes in and for what comes out.

    FSDP2 asks for the two one after the other, and copies from the first to the second, here to itself.
    """

    def __init__(self) -> None:
        self._goes_in: Tensor | None = None

    def allocate(self, size: Sequence[int | SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new buffer, and with the next call the same one again."""
        buffer, self._goes_in = self._goes_in, None
        if buffer is None:
            buffer = self._goes_in = torch.empty(*size, dtype=dtype, device=device)
        assert (buffer.shape, buffer.dtype) == (tuple(size), dtype), "FSDP2 asks for two buffers that are alike"
        return buffer

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Never called: FSDP2 scatters nothing over a shard group of one rank."""
        raise AssertionError("a replicated layer has nothing to scatter")
