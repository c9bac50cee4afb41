"""Applies a strategy to one layer: what divides the layer itself, then sharded or replicated states around it."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from steelyard.errors import InvalidPlanError
from steelyard.model.chain import ModelChain
from steelyard.modules.dimensions import TWINS, Division
from steelyard.modules.dimensions.data_parallel import replicate_over, shard_over
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
    *,
    has_backward: bool = True,
) -> FSDPModule | Replica:
    """The layer with its parameters sharded as ``strategy`` says, in place, or its replica where it is not sharded.

    Without a backward pass nothing is kept gathered for it.
    Raises `InvalidPlanError` for a dimension that no twin carries out.
    """
    used = {dimension.name: dimension for dimension in strategy.dimensions}
    if unknown := sorted(used.keys() - TWINS.keys()):
        raise InvalidPlanError(
            field="parallel",
            found=f"{', '.join(unknown)} in {strategy}",
            expected="dimensions that the runtime carries out: " + ", ".join(TWINS),
            hint="plan without it, or add its twin in steelyard/modules/dimensions",
        )
    for name, twin in TWINS.items():
        if name in used:
            ranks = mesh.dimension(strategy, used[name])
            twin.divide(layer, Division(model=model, chain=chain, strategy=strategy, mesh=ranks))
    replicas, shards = mesh.states(strategy)
    divides_experts = strategy.expert_degree > 1
    outer_replicas, outer_shards = mesh.expert_states(strategy)
    if strategy.state_shards > 1:
        return shard_over(
            layer,
            _state_mesh(replicas, shards),
            precision,
            reshard_after_forward=not (strategy.keeps_gathered and has_backward),
            expert_mesh=_state_mesh(outer_replicas, outer_shards) if divides_experts else None,
        )
    return replicate_over(layer, replicas, precision, expert_mesh=outer_replicas if divides_experts else None)


def _state_mesh(replicas: DeviceMesh, shards: DeviceMesh) -> DeviceMesh:
    """The ranks that shard states; where shards are replicated, an axis of replicas before that of shards."""
    return DeviceMesh._concatenate([replicas, shards]) if replicas.size() > 1 else shards
