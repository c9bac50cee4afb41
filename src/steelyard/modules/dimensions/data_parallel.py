"""Data parallelism around one layer: sharded by FSDP2, or replicated by `steelyard.modules.replicated`.

Both share precision, accumulation and the kind of parameter that an optimizer sees, whichever a plan chose. A rank's
loss is already divided by the global number of tokens, so gradients are summed over ranks, not averaged; gloo has no
scaled sum, hence the plain one.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from steelyard.modules.dimensions.ep import divided_parameters, shard_placement
from steelyard.modules.experts import routed_experts
from steelyard.modules.layers import ChainLayer
from steelyard.modules.replicated import Replica
from steelyard.plan.plan import Precision


def shard_over(
    layer: ChainLayer,
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard_after_forward: bool,
    expert_mesh: DeviceMesh | None = None,
) -> FSDPModule:
    """The layer with its parameters sharded over the one axis of ``mesh``, in place.

    Of two axes, over the second one, and replicated over the first (hybrid sharding).
    Experts that ep has divided are sharded over ``expert_mesh``, which is what ep leaves of ``mesh``. Experts are cut
    where shards come out equal: there are often fewer of them than shards.
    """
    module = fully_shard(
        layer,
        mesh=mesh,
        mp_policy=mixed_precision(precision),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement(layer, mesh if expert_mesh is None else expert_mesh),
    )
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if any(isinstance(each, nn.ModuleList | nn.ModuleDict) for each in routed_experts(layer)):
        module.set_reduce_scatter_unused_params(True)  # ranks choose others, by their tokens
    return module


def replicate_over(
    layer: ChainLayer, mesh: DeviceMesh, precision: Precision, *, expert_mesh: DeviceMesh | None = None
) -> Replica:
    """This rank's replica of the layer, with its parameters replicated over the one axis of ``mesh``, in place.

    Experts that ep has divided are replicated over ``expert_mesh``, which is what ep leaves of ``mesh``.
    """
    if expert_mesh is None:
        return Replica(layer, mesh, activation_dtype(precision))
    others = dict.fromkeys(divided_parameters(layer), expert_mesh)
    return Replica(layer, mesh, activation_dtype(precision), others)


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """The policy of a precision: bf16 computes in bf16 and keeps and reduces in fp32."""
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def activation_dtype(precision: Precision) -> torch.dtype:
    """Type of the hidden state between layers."""
    return torch.bfloat16 if precision == "bf16" else torch.float32
