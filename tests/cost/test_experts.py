"""Tests of layers with experts divided over ranks: traffic and memory, against numbers worked out by hand."""

from dataclasses import replace
from functools import cache

import pytest

from steelyard.cost.build import build_tables, least_times_s
from steelyard.cost.compute import optimizer_s, work_s
from steelyard.cost.job import DeviceGroup, Job, JobConfig
from steelyard.cost.layer import layer_cost
from steelyard.cost.layer_load import held_params, layer_load, layer_profile, sharded_params
from steelyard.engines.execution import Execution, StateBytes
from steelyard.engines.native import NATIVE
from steelyard.hardware import parse_cluster
from steelyard.model.chain import LayerType, ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.dimensions.ep import EP
from steelyard.plan.strategy import Remat, Strategy, parse_strategy
from steelyard.profiles.profile import LayerProfile, Work
from steelyard.schedules import USUAL, PipelineConfig
from steelyard.tracer.cache import cached_trace
from tests.cost.examples import as_measured
from tests.cost.layer_bytes import layer_bytes
from tests.jobs import make_job
from tests.runtime.models import FAMILY_CONFIGS

CONFIG = FAMILY_CONFIGS["mixtral"] | {"num_local_experts": 8}
SEQ_LEN, SAMPLES, NUM_DEVICES = 64, 2, 8
PAIR_BYTES = 2 * CONFIG["hidden_size"]
"""Bytes of a pair in bf16."""
EXPERTS = 8 * 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"]


@cache
def chain() -> ModelChain:
    """The model, which is split when a test first asks for it."""
    return chain_from_config(CONFIG, name="test")


def block() -> LayerType:
    return next(layer_type for layer_type in chain().layer_types if layer_type.num_experts)


@pytest.fixture(scope="module")
def config() -> JobConfig:
    """Two samples on each of 8 ranks, routed evenly."""
    job = Job(
        chain=chain(),
        groups=(
            DeviceGroup(
                profile=cached_trace(chain(), seq_len=SEQ_LEN, precision="bf16", degrees=(1, 2)),
                cluster=parse_cluster("2x4xh100-80gb"),
                budget_bytes=2**30,
            ),
        ),
        seq_len=SEQ_LEN,
        global_batch=NUM_DEVICES * SAMPLES,
        precision="bf16",
        imbalance=1.0,
    )
    return JobConfig(job=job, pipeline=PipelineConfig(num_stages=1, num_microbatches=1, schedule=USUAL))


def uneven(config: JobConfig, imbalance: float) -> JobConfig:
    return replace(config, job=replace(config.job, imbalance=imbalance))


def sent(text: str, config: JobConfig) -> dict[tuple[str, str], float]:
    """Bytes by phase and ranks of all that ep and the levels ask for."""
    strategy = parse_strategy(text)
    load = layer_load(layer_profile(block(), strategy, config, imbalance=1.0), strategy, config)
    found: dict[tuple[str, str], float] = {}
    for dimension in strategy.dimensions:
        for each in dimension.traffic(load):
            key = each.phase, each.over
            found[key] = found.get(key, 0.0) + each.tensor_bytes
    return found


PAIRS_BYTES = SAMPLES * SEQ_LEN * CONFIG["num_experts_per_tok"] * PAIR_BYTES
COUNT_BYTES = 4 * 8


@pytest.mark.slow
def test_pairs_go_to_their_experts_and_back_and_their_gradients_too(config: JobConfig) -> None:
    found = sent("fsdp8 ep4", config)
    assert found["forward", "experts"] == 2 * PAIRS_BYTES + COUNT_BYTES
    assert found["backward", "experts"] == 2 * PAIRS_BYTES
    assert ("recomputation", "experts") not in found


@pytest.mark.slow
def test_full_remat_exchanges_again_and_selective_remat_does_not(config: JobConfig) -> None:
    full, selective = sent("fsdp8 ep4 remat=full", config), sent("fsdp8 ep4 remat=selective", config)
    assert full["recomputation", "experts"] == full["forward", "experts"]
    assert ("recomputation", "experts") not in selective


@pytest.mark.slow
def test_an_imbalance_sends_as_many_times_more(config: JobConfig) -> None:
    even, more = sent("fsdp8 ep4", config), sent("fsdp8 ep4", uneven(config, 1.5))
    assert more["backward", "experts"] == 1.5 * even["backward", "experts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "held", "shard"),
    [
        ("fsdp8", EXPERTS, EXPERTS // 8),
        ("fsdp8 ep4", EXPERTS // 4, EXPERTS // 8),
        ("dp8 ep4", EXPERTS // 4, EXPERTS // 4),
        ("dp4-fsdp2 ep8", EXPERTS // 8, EXPERTS // 8),
    ],
)
def test_a_rank_gathers_its_part_of_the_experts_and_trains_its_shard(
    config: JobConfig, text: str, held: int, shard: int
) -> None:
    strategy = parse_strategy(text)
    layer = layer_profile(block(), strategy, config)
    assert layer.expert_params == EXPERTS
    dense = layer.num_params - EXPERTS
    assert held_params(layer, strategy) == dense + held
    assert sharded_params(layer, strategy) == -(-dense // strategy.state_shards) + shard


@pytest.mark.slow
@pytest.mark.parametrize("remat", Remat)
def test_products_read_the_weights_of_a_ranks_own_experts_alone(config: JobConfig, remat: Remat) -> None:
    """Products of experts run once forward, once backward, and once more if they are recomputed."""
    works = [
        works_of(layer_profile(block(), Strategy.of(parse_strategy("fsdp8").levels, remat, ep=ep), config), remat)
        for ep in (2, 8)
    ]
    fewer = 2 * (EXPERTS // 2 - EXPERTS // 8)
    less = [two.matmul_bytes.at(SAMPLES) - eight.matmul_bytes.at(SAMPLES) for two, eight in zip(*works, strict=True)]
    assert less == pytest.approx([fewer, 2 * fewer, *([fewer] if remat is not Remat.NONE else [])])


def works_of(layer: LayerProfile, remat: Remat) -> list[Work]:
    again = [] if remat is Remat.NONE else [layer.recomputation(remat).work]
    return [layer.forward, layer.backward, *again]


@pytest.mark.slow
def test_experts_are_gathered_over_the_ranks_that_ep_leaves(config: JobConfig) -> None:
    found = sent("fsdp8 ep4", config)
    assert found["forward", "expert shards"] == 2 * EXPERTS // 4
    assert found["forward", "shards"] < found["forward", "expert shards"]


@pytest.mark.slow
def test_replicas_sum_the_gradients_of_experts_over_the_ranks_that_ep_leaves(config: JobConfig) -> None:
    found = sent("dp8 ep4", config)
    assert found["step", "expert replicas"] == 4 * EXPERTS // 4


def test_the_host_reads_the_counts_once_forward_and_once_where_the_exchange_is_repeated(config: JobConfig) -> None:
    strategy = parse_strategy("fsdp8 ep4 remat=full")
    load = layer_load(layer_profile(block(), strategy, config, imbalance=1.0), strategy, config)
    waits = {each.phase: each.num_waits for each in EP.traffic(load)}
    assert waits == {"forward": 1, "backward": 0, "recomputation": 1}


def test_a_read_of_the_host_costs_a_launch_where_the_host_launches(config: JobConfig) -> None:
    graphs = replace(config, job=replace(config.job, engine=replace(NATIVE, execution=Execution(eager_launch=False))))
    strategy = parse_strategy("fsdp8 ep4")
    waited, launched = (layer_cost(block(), strategy, each).forward_s["ep"] for each in (config, graphs))
    assert waited - launched == pytest.approx(config.job.efficiency.collective_launch_s)


def test_exchanges_beside_compute_take_the_part_that_is_not_hidden(config: JobConfig) -> None:
    hidden = replace(config, job=replace(config.job, engine=replace(NATIVE, execution=Execution(hidden_exchanges=0.5))))
    whole, half = (layer_cost(block(), parse_strategy("fsdp8 ep4"), each) for each in (config, hidden))
    assert half.forward_s["ep"] == pytest.approx(whole.forward_s["ep"] / 2)


def test_the_busiest_rank_takes_the_time_of_its_own_work_longer(config: JobConfig) -> None:
    strategy, more = parse_strategy("fsdp8 ep4"), uneven(config, 1.5)
    mean, most = (layer_profile(block(), strategy, more, imbalance=each) for each in (1.0, 1.5))
    expected = work_s(most.forward, SAMPLES, more.job) - work_s(mean.forward, SAMPLES, more.job)
    assert layer_cost(block(), strategy, more).forward_s["imbalance"] == pytest.approx(expected)


def test_what_the_busiest_rank_computes_again_takes_longer_too(config: JobConfig) -> None:
    graphs = replace(config, job=replace(config.job, engine=replace(NATIVE, execution=Execution(eager_launch=False))))
    strategy = parse_strategy("fsdp8 ep4 remat=selective")
    even, more = (layer_cost(block(), strategy, each).backward_s["remat"] for each in (graphs, uneven(graphs, 1.5)))
    assert more > even


@pytest.mark.slow
@pytest.mark.parametrize("text", ["fsdp2 ep2", "dp2 ep2 remat=full"])
def test_measured_layers_take_as_much_longer_on_the_busiest_rank_as_it_has_more_flop(text: str) -> None:
    """Only all-to-alls are added to the measured layer if routing is even."""
    counted = cached_trace(chain(), seq_len=SEQ_LEN, precision="fp32", degrees=(1,))
    asked = {"global_batch": 2 * SAMPLES, "seq_len": SEQ_LEN, "precision": "fp32", "memory": "1GiB"}
    strategy, costs = parse_strategy(text), []
    for imbalance in (1.0, 1.5):
        profile = as_measured(counted, num_devices=2)
        job = make_job(chain(), "1x2xcpu", profile=profile, imbalance=imbalance, **asked)
        where = JobConfig(job=job, pipeline=PipelineConfig(num_stages=1, num_microbatches=1, schedule=USUAL))
        costs.append(layer_cost(block(), strategy, where))
    even, uneven_cost = costs
    mean, most = (counted.layer(block().name, {}).forward, layer_profile(block(), strategy, where).forward)
    more = most.matmul_flop.at(SAMPLES) + most.attention_flop.at(SAMPLES)
    more = more / (mean.matmul_flop.at(SAMPLES) + mean.attention_flop.at(SAMPLES)) - 1
    forward_s = SAMPLES / 1e3
    assert (even.forward_s["compute"], even.forward_s["imbalance"]) == (forward_s, 0)
    assert even.forward_s["ep"] > 3 * 1e-4
    assert uneven_cost.forward_s["imbalance"] == pytest.approx(more * forward_s)
    if strategy.remat is Remat.FULL:
        sent_s = uneven_cost.forward_s["ep"] - even.forward_s["ep"]
        assert uneven_cost.backward_s["remat"] - even.backward_s["remat"] == pytest.approx(more * forward_s + sent_s)


OWN = Execution(states=StateBytes(parameters=2, gradients=4, optimizer=12, zero=1))


@pytest.mark.parametrize(("text", "shards"), [("dp8 ep4", 2), ("dp8 ep8", 1), ("dp4-tp2 ep4", 1)])
def test_a_framework_keeps_a_ranks_experts_and_shards_them_over_the_ranks_that_ep_leaves(
    config: JobConfig, text: str, shards: int
) -> None:
    strategy = parse_strategy(text)
    held = EXPERTS // (strategy.expert_degree * strategy.tensor_degree)
    layer = layer_profile(block(), strategy, config)
    dense = layer.num_params - layer.expert_params
    kept = layer_bytes(
        block(), strategy, replace(config, job=replace(config.job, engine=replace(NATIVE, execution=OWN)))
    ).static_bytes
    assert kept["parameters"] == 2 * (dense + held)
    assert kept["optimizer"] == -(-12 * dense // strategy.data_degree) + 12 * held // shards


def test_a_framework_steps_a_ranks_own_experts_once(config: JobConfig) -> None:
    job = replace(config.job, engine=replace(NATIVE, execution=OWN))
    found = layer_cost(block(), parse_strategy("dp8 ep4"), replace(config, job=job)).once_s["optimizer"]
    dense = layer_profile(block(), parse_strategy("dp8"), config).num_params - EXPERTS
    assert found == pytest.approx(optimizer_s(dense / 8 + EXPERTS / 8, job))


@pytest.mark.parametrize("remat", Remat)
def test_an_imbalance_costs_time_and_never_saves_bytes(config: JobConfig, remat: Remat) -> None:
    strategy = Strategy.of(parse_strategy("fsdp8").levels, remat, ep=4)
    even, more = (layer_cost(block(), strategy, each) for each in (config, uneven(config, 1.5)))
    assert even.forward_s["imbalance"] == pytest.approx(0.0, abs=1e-12)
    assert more.forward_s["imbalance"] > 0
    assert more.microbatch_s >= even.microbatch_s
    less, most = (layer_bytes(block(), strategy, each) for each in (config, uneven(config, 1.5)))
    assert most.activation_bytes >= less.activation_bytes
    assert most.transient_bytes >= less.transient_bytes


def test_no_layer_beside_experts_takes_less_than_computing_it(config: JobConfig) -> None:
    """The embedding and the head among them, of which no rank can have a part of the experts."""
    offered = tuple(map(parse_strategy, ("fsdp8", "fsdp8 ep4", "fsdp4-tp2", "fsdp4-tp2 ep4 remat=full")))
    tables = build_tables(config, offered)
    fastest = tables.time_s.min(axis=1, where=tables.legal, initial=float("inf"))
    least = least_times_s(offered, config)
    assert all(0 < one <= other for one, other in zip(least, fastest, strict=False))


@pytest.mark.parametrize(("degree", "places"), [(4, 4), (8, 2)])
def test_a_dispatcher_that_sends_once_sends_to_each_rank_of_a_node_or_each_node(
    config: JobConfig, degree: int, places: int
) -> None:
    """Two experts of a token are on 2 - 1/r of r places; four ranks are a node here."""
    job = replace(config.job, engine=replace(NATIVE, execution=Execution(dispatcher="deep")))
    strategy = f"fsdp8 ep{degree}"
    each, once = (sent(strategy, given)["backward", "experts"] for given in (config, replace(config, job=job)))
    assert once == pytest.approx(each * (2 - 1 / places) / 2)
