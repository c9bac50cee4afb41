"""Which ranks of a plan hold different things, so that one of each type stands for all.

The ranks of a stage run the same layers on as many samples. They differ only where FSDP cannot divide a parameter's
first dim evenly: it is cut into chunks of equal size, of which the last ones are smaller or empty. Routed experts are
cut along a dim that divides evenly, if any does (`steelyard.modules.experts.even_dim`); over the ranks that divide
them they are always equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_meta_model, named_layer_modules
from steelyard.modules.experts import even_dim, routed_experts
from steelyard.modules.own_builder import build_planned
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy, mesh_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks of one stage that hold the same; ``rank`` is the first of them."""

    rank: int
    stage: int
    ranks: tuple[int, ...]


def distinct_ranks(plan: Plan, builder: str | None = None) -> tuple[RankGroup, ...]:
    """The groups of equal ranks of a plan, stage by stage; ``builder`` builds the user's own module that it is for."""
    chain = plan.chain()
    dims = _dims(chain, build_planned(builder, plan).without_values() if builder else build_meta_model(chain))
    groups = []
    for stage, of in enumerate(plan.stages):
        first, last = of.ranks
        layers = [
            (chain.layers[layer], strategy)
            for part in of.parts
            for layer, strategy in enumerate(part.strategies, start=part.first_layer)
        ]
        alike: dict[tuple[int, ...], list[int]] = {}
        for place in range(last - first + 1):
            alike.setdefault(tuple(_uneven_shares(dict.fromkeys(layers), dims, place)), []).append(first + place)
        groups += [RankGroup(rank=ranks[0], stage=stage, ranks=tuple(ranks)) for ranks in alike.values()]
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dims:
    """Sizes of a layer's parameters: the first dims, and of those of routed experts all dims."""

    first: set[int]
    experts: set[tuple[int, ...]]


def _dims(chain: ModelChain, model: Any) -> dict[int, _Dims]:
    """The sizes of the parameters, by layer type."""
    dims: dict[int, _Dims] = {}
    for layer in range(chain.num_layers):
        if chain.layers[layer] not in dims:
            modules = named_layer_modules(model, chain, layer).values()
            found = [each for module in modules for each in routed_experts(module)]
            experts = {parameter for each in found for parameter in each.parameters()}
            others = {p for module in modules for p in module.parameters()} - experts
            dims[chain.layers[layer]] = _Dims(
                first={p.shape[0] for p in others}, experts={tuple(p.shape) for p in experts}
            )
    return dims


def _cut_of_experts(shape: tuple[int, ...], strategy: Strategy) -> int | None:
    """The number of experts that shards cannot have equal parts of, None where they can."""
    own = shape[0] // (strategy.tensor_degree * strategy.expert_degree)
    return own if even_dim((own, *shape[1:]), strategy.expert_state_shards) is None else None


def _uneven_shares(layers: dict[tuple[int, Strategy], None], dims: dict[int, _Dims], place: int) -> Iterator[int]:
    """Entries of each dim that does not divide evenly which the rank at ``place`` in its stage holds."""
    for layer_type, strategy in layers:
        cuts = {_cut_of_experts(shape, strategy) for shape in dims[layer_type].experts}
        for own in sorted(each for each in cuts if each is not None):
            chunk = -(-own // strategy.expert_state_shards)
            yield min(max(own - chunk * _shard_of(strategy, strategy.expert_state_axes[1], place), 0), chunk)
        for whole in sorted(dims[layer_type].first):
            for size in sorted(
                {whole, whole // strategy.tensor_degree if whole % strategy.tensor_degree == 0 else whole}
            ):
                if size % strategy.state_shards:
                    chunk = -(-size // strategy.state_shards)
                    yield min(max(size - chunk * _shard_of(strategy, strategy.shard_axes, place), 0), chunk)


def _shard_of(strategy: Strategy, axes: tuple[int, ...], place: int) -> int:
    """Which shard of parameters that are sharded over ``axes`` the rank at ``place`` in its stage holds."""
    sizes = mesh_axes(strategy.num_devices)
    coordinates = np.unravel_index(place, sizes)
    return int(np.ravel_multi_index([coordinates[axis] for axis in axes], [sizes[axis] for axis in axes]))
