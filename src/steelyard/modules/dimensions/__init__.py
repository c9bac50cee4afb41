"""Implementations of the parallelism dimensions of `steelyard.plan.dimensions`: each applies one to a layer on a mesh
axis.

`steelyard.modules.replicated` handles the states over ranks that divide samples, identically for all dimensions.
"""

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from steelyard.model.chain import ModelChain
from steelyard.modules.dimensions import cp, ep, tp
from steelyard.modules.dimensions.ep import divided_parameters, exchange_alone, shard_placement, take_imbalance
from steelyard.modules.layers import ChainLayer
from steelyard.plan.strategy import Strategy

__all__ = ["TWINS", "divide_layer", "divided_parameters", "exchange_alone", "shard_placement", "take_imbalance"]


def _leave_whole(_layer: ChainLayer, _chain: ModelChain, _strategy: Strategy, _ranks: DeviceMesh) -> None:
    """Leave the layer's modules unchanged, for dimensions that divide only its inputs."""


TWINS: dict[str, Callable[[ChainLayer, ModelChain, Strategy, DeviceMesh], None]] = {
    "tp": lambda layer, chain, how, mesh: tp.apply_tensor_parallel(layer, chain, mesh, sp=bool(how.mode("sp"))),
    "cp": lambda layer, _, how, mesh: cp.apply_context_parallel(layer, mesh, str(how.mode("cp_method"))),
    "ep": lambda layer, _, _strategy, mesh: ep.apply_expert_parallel(layer, mesh),
    **{"dp": _leave_whole, "fsdp": _leave_whole},
}
"""Functions that divide a layer's modules in place, by dimension, in order of application. Each gets the strategy and
the ranks that share the dimension, and runs before states are sharded or replicated."""


def divide_layer(layer: ChainLayer, chain: ModelChain, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Divide a layer in place by the one level of ``strategy``, over the ranks of ``mesh``."""
    for dimension in strategy.dimensions:
        TWINS[dimension.name](layer, chain, strategy, mesh)
