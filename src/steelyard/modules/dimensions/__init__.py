"""The twins of the parallelism dimensions: each makes a layer so on a mesh axis. One for each of
`steelyard.plan.dimensions`.

What becomes of states over ranks that divide samples is said in `steelyard.modules.replicated`, for all alike.
"""

from torch.distributed.device_mesh import DeviceMesh

from steelyard.model.chain import ModelChain
from steelyard.modules.dimensions import cp, dp, ep, fsdp, tp
from steelyard.modules.dimensions.ep import divided_parameters, exchange_alone, shard_placement, take_imbalance
from steelyard.modules.dimensions.twin import Division, Twin
from steelyard.modules.layers import ChainLayer
from steelyard.plan.strategy import Strategy

TWINS: dict[str, Twin] = {"tp": tp.TWIN, "cp": cp.TWIN, "ep": ep.TWIN, "dp": dp.TWIN, "fsdp": fsdp.TWIN}
"""By the name of the dimension, in the order in which they divide a layer."""

__all__ = [
    "TWINS",
    "Division",
    "Twin",
    "divide_layer",
    "divided_parameters",
    "exchange_alone",
    "shard_placement",
    "take_imbalance",
]


def divide_layer(layer: ChainLayer, chain: ModelChain, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Divides a layer in place as the one level of ``strategy`` says, over the ranks of ``mesh``."""
    for dimension in strategy.dimensions:
        TWINS[dimension.name].divide(layer, Division(chain=chain, strategy=strategy, mesh=mesh))
