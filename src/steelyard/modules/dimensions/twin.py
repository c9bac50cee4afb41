"""What makes a real layer so as a parallelism dimension says: the other half of
`steelyard.plan.dimensions.dimension.Dimension`."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from steelyard.model.chain import ModelChain
from steelyard.modules.layers import ChainLayer
from steelyard.plan.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What a twin is given beside the layer."""

    chain: ModelChain
    strategy: Strategy
    mesh: DeviceMesh
    """The ranks that share the dimension, as one axis."""


def leaves_whole(_layer: ChainLayer, _division: Division) -> None:
    """For dimensions that divide what enters a layer, and leave its modules as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """How a dimension divides a layer's modules, in place, before their states are sharded or replicated."""

    divide: Callable[[ChainLayer, Division], None] = leaves_whole
