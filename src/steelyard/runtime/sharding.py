"""Applies a strategy to one layer: tensor parallelism, then sharded or replicated data parallelism around it."""

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.modules.data_parallel import replicate_over, shard_over
from steelyard.modules.layers import ChainLayer
from steelyard.modules.replicated import Replica
from steelyard.modules.tensor_parallel import apply_tensor_parallel
from steelyard.plan.plan import Precision
from steelyard.plan.strategy import Strategy
from steelyard.runtime.mesh import PlanMesh


def shard_layer(
    layer: ChainLayer,
    model: PreTrainedModel,
    chain: ModelChain,
    strategy: Strategy,
    mesh: PlanMesh,
    precision: Precision,
) -> FSDPModule | Replica:
    """The layer with its parameters sharded as ``strategy`` says, in place, or its replica where it is not sharded."""
    if strategy.tp > 1:
        apply_tensor_parallel(layer, model, chain, mesh.tensor(strategy), sp=strategy.sp)
    if strategy.fsdp > 1:
        return shard_over(layer, mesh.data(strategy), precision, reshard_after_forward=strategy.zero == 3)
    return replicate_over(layer, mesh.data(strategy), precision)
