"""Applies a strategy to one layer: what divides the layer itself, then sharded or replicated states around it."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.modules.data_parallel import replicate_over, shard_over
from steelyard.modules.kinds import TWINS, Division
from steelyard.modules.layers import ChainLayer
from steelyard.modules.replicated import Replica
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
    used = {kind.name: kind for kind in strategy.kinds}
    for name, twin in TWINS.items():
        if name in used:
            ranks = mesh.kind(strategy, used[name])
            twin.divide(layer, Division(model=model, chain=chain, strategy=strategy, mesh=ranks))
    if strategy.state_shards > 1:
        return shard_over(
            layer, state_mesh(mesh, strategy), precision, reshard_after_forward=not strategy.keeps_gathered
        )
    return replicate_over(layer, mesh.states(strategy)[0], precision)


def state_mesh(mesh: PlanMesh, strategy: Strategy) -> DeviceMesh:
    """The ranks that shard a layer's states; where shards are replicated, an axis of replicas before that of shards."""
    replicas, shards = mesh.states(strategy)
    return DeviceMesh._concatenate([replicas, shards]) if strategy.replicas > 1 else shards
