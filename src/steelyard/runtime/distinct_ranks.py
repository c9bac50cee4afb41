"""Which ranks of a plan hold different things, so that one of each kind stands for all.

The ranks of a stage run the same layers on as many samples. They differ only where FSDP cannot divide a parameter's
first dim evenly: it is cut into chunks of equal size, of which the last ones are smaller or empty.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_meta_model, layer_modules
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy, mesh_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks of one stage that hold the same; ``rank`` is the first of them."""

    rank: int
    stage: int
    ranks: tuple[int, ...]


def distinct_ranks(plan: Plan) -> tuple[RankGroup, ...]:
    """The groups of equal ranks of a plan, stage by stage."""
    chain = plan.chain()
    dims = _first_dims(chain)
    groups = []
    for stage, (first, last) in enumerate(dict.fromkeys(part.ranks for part in plan.stages)):
        layers = [
            (chain.layers[layer], strategy)
            for part in plan.stages
            if part.ranks == (first, last)
            for layer, strategy in enumerate(part.strategies, start=part.first_layer)
        ]
        alike: dict[tuple[int, ...], list[int]] = {}
        for place in range(last - first + 1):
            alike.setdefault(tuple(_uneven_shares(dict.fromkeys(layers), dims, place)), []).append(first + place)
        groups += [RankGroup(rank=ranks[0], stage=stage, ranks=tuple(ranks)) for ranks in alike.values()]
    return tuple(groups)


def _first_dims(chain: ModelChain) -> dict[int, set[int]]:
    """The sizes of the parameters' first dims, by kind of layer."""
    model = build_meta_model(chain)
    dims: dict[int, set[int]] = {}
    for layer in range(chain.num_layers):
        if chain.layers[layer] not in dims:
            modules = layer_modules(model, chain, layer).values()
            dims[chain.layers[layer]] = {p.shape[0] for module in modules for p in module.parameters()}
    return dims


def _uneven_shares(layers: dict[tuple[int, Strategy], None], dims: dict[int, set[int]], place: int) -> Iterator[int]:
    """Entries of each dim that does not divide evenly which the rank at ``place`` in its stage holds."""
    for kind, strategy in layers:
        for whole in sorted(dims[kind]):
            for size in sorted(
                {whole, whole // strategy.tensor_degree if whole % strategy.tensor_degree == 0 else whole}
            ):
                if size % strategy.state_shards:
                    chunk = -(-size // strategy.state_shards)
                    yield min(max(size - chunk * _shard_of(strategy, place), 0), chunk)


def _shard_of(strategy: Strategy, place: int) -> int:
    """Which shard of a layer's parameters the rank at ``place`` in its stage holds."""
    sizes = mesh_axes(strategy.num_devices)
    coordinates = np.unravel_index(place, sizes)
    axes = strategy.shard_axes
    return int(np.ravel_multi_index([coordinates[axis] for axis in axes], [sizes[axis] for axis in axes]))
