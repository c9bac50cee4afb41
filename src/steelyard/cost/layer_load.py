"""Work, parameters and collectives of a layer on a rank under a strategy: the inputs of its time and memory."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import overload

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.communication import Group, num_places
from steelyard.cost.job import AnyStrategy, JobConfig
from steelyard.errors import InvalidProfileError
from steelyard.model.chain import LayerRole, LayerType
from steelyard.model.family import Routing
from steelyard.plan.dimensions import Dimension
from steelyard.plan.dimensions.dimension import (
    Batch,
    Levels,
    Load,
    Over,
    Phase,
    data_levels,
    degree_of,
    replica_levels,
    shard_levels,
)
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import Collective, CollectiveCount, LayerProfile
from steelyard.profiles.shapes import Affine
from steelyard.units import Amount, at_each, hashable

Calls = dict[Phase, tuple[tuple[Collective, int, Amount], ...]]
"""Collectives of a layer by phase: collective, number of calls, total bytes."""


def levels_group(strategy: Strategy, levels: Levels, span: int) -> Group:
    """Return the shape of the process groups over neighbouring levels of a strategy, in a stage of ``span`` ranks.

    The size is 1 if there are no such levels.
    """
    stride = 1
    for level in reversed(strategy.levels):
        if level in levels:
            return Group(size=degree_of(levels), stride=stride, span=span)
        stride *= level.degree
    return Group(size=1, stride=1, span=span)


def group_of_experts(over: Over, strategy: Strategy, span: int) -> Group:
    """Return the shape of the groups that divide, shard or replicate routed experts, inside the data-parallel ranks.

    The ranks that divide experts are the innermost.
    """
    data = levels_group(strategy, data_levels(strategy.levels), span)
    sizes = (strategy.expert_degree, strategy.expert_state_shards, strategy.expert_replicas)
    place = ("experts", "expert shards", "expert replicas").index(over)
    return data._replace(size=sizes[place], stride=data.stride * prod(sizes[:place]))


def layer_profile(
    layer_type: LayerType, strategy: Strategy, config: JobConfig, *, imbalance: float | None = None
) -> LayerProfile:
    """Return the profile of a layer type in the shape under a strategy. Raises `InvalidProfileError` if there is none.

    Under expert parallelism it is that of the rank with ``imbalance`` times the mean load (None: the job's imbalance).
    """
    layer = config.job.layer(layer_type.name, strategy.shape, expert_degree=strategy.expert_degree, imbalance=imbalance)
    if layer is None:
        degrees = " ".join(f"{name} {degree}" for name, degree in strategy.shape.items()) or "one rank"
        raise InvalidProfileError(
            field=f"layers.{layer_type.name}",
            found=f"no entry for {degrees}",
            expected="an entry for every shape that the strategies give a layer",
            hint="profile or trace the model with these degrees",
        )
    return layer


def refusal(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> str | None:
    """Return the reason why no plan of this configuration may use the strategy for a layer type, or None if one may.

    The strategy is forbidden, outside the measured range of the profile, or equivalent to another one.
    """
    if strategy.keeps_whole and not config.has_several:
        return "keeping tensors gathered between microbatches has no effect with a single microbatch"
    refused = config.job.levers.refusal(strategy)
    return (
        refused or illegal_reason(layer_type, strategy, config.batch) or unmeasured_reason(layer_type, strategy, config)
    )


def legal_counts(layer_type: LayerType, strategies: Sequence[Strategy], config: JobConfig) -> NDArray[np.bool_]:
    """Return whether each strategy is allowed in each configuration [S, M] (`refusal`).

    The samples of a microbatch must be divisible by the strategy's sample degree, and fewer than the global batch if
    the strategy needs several microbatches. No other rule depends on them.
    """
    degrees = np.array([strategy.sample_degree for strategy in strategies], dtype=np.int64)
    one_alone = np.array([strategy.keeps_whole for strategy in strategies], dtype=np.bool_)[:, None] & (
        config.samples == config.job.global_batch
    )
    legal: NDArray[np.bool_] = (config.samples % degrees[:, None] == 0) & ~one_alone
    for s, strategy in enumerate(strategies):
        one_each = Batch(microbatch_samples=strategy.sample_degree, seq_len=config.job.seq_len)
        if config.job.levers.refusal(strategy) or illegal_reason(layer_type, strategy, one_each) is not None:
            legal[s] = False
            continue
        layer = config.job.layer(layer_type.name, strategy.shape)
        if layer is not None and layer.times:
            legal[s] &= at_each(rank_samples(strategy, config.samples), layer.reaches) > 0
    return legal


def unmeasured_reason(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> str | None:
    """Return the reason why the measured times of a layer do not apply; None if they do or if none were measured."""
    layer = config.job.layer(layer_type.name, strategy.shape)
    samples = rank_samples(strategy, config.microbatch_samples)
    if layer is None or not layer.times or layer.reaches(samples):
        return None
    sizes = [time.samples for time in layer.times]
    return (
        f"{samples:g} samples per rank: the profile measured {', '.join(map(str, sizes))} and covers "
        f"{sizes[0] / 2:g} to {2 * sizes[-1]}"
    )


@overload
def rank_samples(strategy: Strategy, microbatch_samples: float) -> float: ...
@overload
def rank_samples(strategy: AnyStrategy, microbatch_samples: Amount) -> Amount: ...
def rank_samples(strategy: AnyStrategy, microbatch_samples: Amount) -> Amount:
    """Samples of a microbatch on a rank, as a fraction if tokens are divided.

    A rank with part of the tokens does that part of a sample's work, including attention, which head-tail order divides
    equally.
    """
    return microbatch_samples // strategy.sample_degree / strategy.token_degree


def held_params(layer: LayerProfile, strategy: Strategy) -> int:
    """Number of parameters that a rank computes with after gathering."""
    return layer.num_params - layer.expert_params + layer.expert_params // strategy.expert_degree


def sharded_params(layer: LayerProfile, strategy: Strategy) -> int:
    """Number of parameters in a rank's shard.

    Experts are sharded over the remaining ranks of a shard group, or not at all if their own groups are larger.
    """
    dense, experts = layer.num_params - layer.expert_params, layer.expert_params
    shards = strategy.state_shards
    if strategy.expert_degree == 1:
        return -(-layer.num_params // shards)
    return -(-dense // shards) - (-experts // max(shards, strategy.expert_degree))


def layer_load(layer: LayerProfile, strategy: Strategy, config: JobConfig) -> Load:
    """Return the tensors of a layer's collectives."""
    job = config.job
    held, experts = _held_apart(layer, strategy)
    trained, trained_experts = _held_apart(layer.trained, strategy) if layer.frozen_params else (held, experts)
    new_alone = job.execution.keeps_parameters and strategy.keeps_gathered
    gathered, gathered_experts = (trained, trained_experts) if new_alone else (held, experts)
    reduced = job.compute_bytes if job.execution.keeps_whole_gradients(strategy) else job.reduce_bytes
    degrees = strategy.sample_degree, strategy.token_degree
    key = "carried", layer, strategy.remat, *degrees, hashable(config.samples)
    traced, exchanged, key_value_bytes, attention_bytes = job.once(key, lambda: _carried(layer, strategy, config))
    return Load(
        strategy=strategy,
        parameter_bytes=(gathered - gathered_experts) * job.compute_bytes,
        gradient_bytes=(trained - trained_experts) * reduced,
        expert_parameter_bytes=gathered_experts * job.compute_bytes,
        expert_gradient_bytes=trained_experts * reduced,
        gathers_once=new_alone or strategy.keeps_whole,
        traced=traced,
        exchanged=exchanged,
        part_sent=_part_sent(strategy, config),
        sends_to_all=job.execution.dispatcher == "all-gather",
        exchanging=("forward", "backward", *(("recomputation",) if strategy.remat is Remat.FULL else ())),
        key_value_bytes=key_value_bytes,
        attention_bytes=attention_bytes,
    )


def _part_sent(strategy: Strategy, config: JobConfig) -> float:
    """Return the fraction that is sent of the exchanged tokens, which are counted once per expert.

    An all-gather sends all ranks' tokens once each, independent of the imbalance.
    """
    dispatcher = config.job.execution.dispatcher
    if strategy.expert_degree == 1 or dispatcher == "all-to-all":
        return 1.0
    group = group_of_experts("experts", strategy, config.devices_per_stage)
    routing = Routing.of(config.job.chain.config)
    if dispatcher == "all-gather":
        return group.size / (routing.top_k * config.job.imbalance)
    return routing.places(num_places(group, config.job.cluster)) / routing.top_k


def _held_apart(layer: LayerProfile, strategy: Strategy) -> tuple[int, int]:
    """Return the number of parameters that a rank computes with, and how many of them are in divided experts."""
    held = held_params(layer, strategy)
    return held, 0 if strategy.expert_degree == 1 else held - (layer.num_params - layer.expert_params)


def _carried(layer: LayerProfile, strategy: Strategy, config: JobConfig) -> tuple[Calls, Calls, Amount, Amount]:
    """Return the traced collectives of a layer by phase, its exchanges of expert tokens by phase, and the bytes of
    keys and values and of attention."""
    remat, samples, imbalance = strategy.remat, rank_samples(strategy, config.samples), config.job.imbalance
    collectives: dict[Phase, tuple[CollectiveCount, ...]] = {
        "forward": layer.forward_collectives,
        "backward": layer.backward_collectives,
    }
    if remat is not Remat.NONE:
        collectives["recomputation"] = layer.recomputation(remat).collectives
    traced: Calls = {}
    exchanged: Calls = {}
    for phase, found in collectives.items():
        sent = [(each.kind, each.count, each.tensor_bytes.at(samples)) for each in found]
        traced[phase] = tuple(call for call in sent if call[0] != "all_to_all")
        exchanged[phase] = tuple((name, count, imbalance * size) for name, count, size in sent if name == "all_to_all")
    whole = config.samples // strategy.sample_degree
    return traced, exchanged, layer.key_value_bytes.at(whole), layer.attention_bytes.at(samples)


@lru_cache(maxsize=65536)
def traffic_group(over: Over, dimension: Dimension, strategy: Strategy, span: int) -> Group:
    """Return the process groups of a dimension's collectives in a stage of ``span`` ranks."""
    if "expert" in over:
        return group_of_experts(over, strategy, span)
    levels = strategy.levels
    own = tuple(level for level in levels if level.dimension is dimension)
    taking = {"level": own, "shards": shard_levels(levels), "replicas": replica_levels(levels)}[over]
    return levels_group(strategy, taking, span)


def hidden_matrices(layer_type: LayerType, layer: LayerProfile) -> tuple[tuple[float, float, int], ...]:
    """Return the shorter side, the longer side and the number of the trained hidden matrices of a layer.

    They are found from the products of its forward pass; routed experts are excluded. Raises `InvalidProfileError` if
    the profile has no shapes of products.
    """
    if layer.trained.num_params == 0 or layer_type.role is not LayerRole.BLOCK:
        return ()
    if layer.forward.matmul_flop != Affine() and not layer.forward.products:
        raise InvalidProfileError(
            field=f"layers.{layer_type.name}.forward.products",
            found="no matrix shapes",
            expected="the shapes of the hidden matrices, which muon updates differently",
            hint="leave --profile out to trace the model, or leave --optimizer out",
        )
    products = (each for each in layer.forward.products if each.groups == 1 and each.grows == "m")
    return tuple(
        (min(each.k, each.n), max(each.k, each.n), each.count)
        for each in products
        if layer_type.has_matrix((each.k, each.n))
    )


def matrix_params(layer_type: LayerType, layer: LayerProfile) -> int:
    """Number of trained parameters in a layer's hidden matrices, at most those outside experts, because experts that
    run in a loop also have products."""
    found = sum(m * n * count for m, n, count in hidden_matrices(layer_type, layer))
    return min(int(found), layer.trained.num_params - layer.trained.expert_params)


def mean_shard_params(layer: LayerProfile, strategy: Strategy) -> float:
    """Mean number of parameters in a rank's shard."""
    if strategy.expert_degree == 1:
        return layer.num_params / strategy.state_shards
    return sharded_params(layer, strategy)
