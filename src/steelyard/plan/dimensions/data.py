"""What dimensions that divide data have in common: samples must divide, and gradients are summed over the ranks."""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from steelyard.model.chain import LayerType
from steelyard.plan.dimensions.dimension import Batch, Divides, Levels, Load, Over, States, StrategyView, Traffic


def indivisible_samples(_layer_type: LayerType, strategy: StrategyView, batch: Batch) -> str | None:
    """Why the samples of a microbatch cannot be divided over the ranks; nothing is ever rounded."""
    if batch.microbatch_samples % strategy.sample_degree == 0:
        return None
    return (
        f"data degree {strategy.sample_degree} ({strategy.parallel}) does not divide "
        f"the {batch.microbatch_samples} samples of a microbatch"
    )


def summed_once(load: Load) -> Iterator[Traffic]:
    """The sum of the gradients over all ranks that hold the same states, once a step, of each rank's shard."""
    shards, expert_shards = load.strategy.state_shards, load.strategy.expert_state_shards
    ranks: tuple[tuple[Over, float], ...] = (
        ("replicas", load.gradient_bytes / shards),
        ("expert replicas", load.expert_gradient_bytes / expert_shards),
    )
    for over, num_bytes in ranks:
        if num_bytes:
            yield Traffic(phase="step", collective="all_reduce", tensor_bytes=num_bytes, over=over, beside_compute=True)


@lru_cache(maxsize=4096)
def replica_levels(levels: Levels) -> Levels:
    """The levels over which a layer's states are the same, outermost first."""
    sharded = any(level.dimension.states is States.SHARDED for level in levels)
    return tuple(
        level
        for level in levels
        if level.dimension.states is States.REPLICATED or (level.dimension.states is States.FOLLOWING and not sharded)
    )


@lru_cache(maxsize=4096)
def shard_levels(levels: Levels) -> Levels:
    """The levels over which a layer's states are sharded, outermost first."""
    sharded = any(level.dimension.states is States.SHARDED for level in levels)
    return tuple(
        level
        for level in levels
        if level.dimension.states is States.SHARDED or (level.dimension.states is States.FOLLOWING and sharded)
    )


@lru_cache(maxsize=4096)
def degree_of(levels: Levels) -> int:
    """The product of the degrees."""
    return prod(level.degree for level in levels)


@lru_cache(maxsize=4096)
def data_levels(levels: Levels) -> Levels:
    """The levels whose ranks work on different samples or tokens, outermost first."""
    return tuple(level for level in levels if level.dimension.divides_data)


def are_neighbours(levels: Levels, some: Levels) -> bool:
    """Whether ``some`` of the levels stand next to each other."""
    places = [levels.index(level) for level in some]
    return not places or places[-1] - places[0] == len(places) - 1


__all__ = [
    "Divides",
    "are_neighbours",
    "data_levels",
    "degree_of",
    "indivisible_samples",
    "replica_levels",
    "shard_levels",
    "summed_once",
]
