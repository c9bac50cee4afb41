"""Applies a strategy to one layer: tensor parallelism, then sharded or replicated data parallelism around it.

Both kinds of data parallelism run through FSDP2's machinery (`fully_shard`, `replicate`), so precision, accumulation
and optimizer see the same kind of parameter whichever the plan chose. A rank's loss is already divided by the global
number of tokens, so gradients are summed over ranks, not averaged.
"""

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from steelyard.model.chain import LayerRole, ModelChain
from steelyard.modules.layers import ChainLayer
from steelyard.modules.tensor_parallel import apply_tensor_parallel
from steelyard.plan.plan import Precision
from steelyard.plan.strategy import Strategy
from steelyard.runtime.mesh import PlanMesh


def shard_layer(
    layer: ChainLayer,
    model: PreTrainedModel,
    chain: ModelChain,
    role: LayerRole,
    strategy: Strategy,
    mesh: PlanMesh,
    precision: Precision,
) -> FSDPModule:
    """The layer with its parameters sharded as ``strategy`` says, in place."""
    if strategy.tp > 1:
        apply_tensor_parallel(layer, model, chain, role, mesh.tensor(strategy), sp=strategy.sp)
    policy = mixed_precision(precision)
    if strategy.fsdp > 1:
        sharded = fully_shard(
            layer, mesh=mesh.data(strategy), mp_policy=policy, reshard_after_forward=strategy.zero == 3
        )
    else:
        sharded = replicate(layer, mesh=mesh.data(strategy), mp_policy=policy)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    return sharded


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """The policy of a precision: bf16 computes in bf16 and keeps and reduces in fp32."""
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def activation_dtype(precision: Precision) -> torch.dtype:
    """Type of the hidden state between layers."""
    return torch.bfloat16 if precision == "bf16" else torch.float32
