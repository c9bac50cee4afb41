"""Layers whose experts ranks divide: what is sent and held, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from steelyard.cost.layer import held_params, layer_cost, layer_load, layer_profile, sharded_params
from steelyard.cost.setting import Job, Setting
from steelyard.hardware import parse_cluster
from steelyard.model.read import chain_from_config
from steelyard.plan.strategy import Remat, Strategy, parse_strategy
from steelyard.schedules import USUAL, PipelineConfig
from steelyard.tracer.trace import trace
from tests.runtime.models import FAMILY_CONFIGS

CONFIG = FAMILY_CONFIGS["mixtral"] | {"num_local_experts": 8}
CHAIN = chain_from_config(CONFIG, name="test")
BLOCK = next(kind for kind in CHAIN.kinds if kind.num_experts)
SEQ_LEN, SAMPLES, NUM_DEVICES = 64, 2, 8
PAIR_BYTES = 2 * CHAIN.hidden_size
"""In bf16."""
EXPERTS = 8 * 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"]


@pytest.fixture(scope="module")
def setting() -> Setting:
    """Two samples on each of 8 ranks, routed evenly."""
    job = Job(
        chain=CHAIN,
        profile=trace(CHAIN, seq_len=SEQ_LEN, precision="bf16", degrees=(1, 2)),
        cluster=parse_cluster("2x4xh100-80gb"),
        seq_len=SEQ_LEN,
        global_batch=NUM_DEVICES * SAMPLES,
        precision="bf16",
        budget_bytes=2**30,
        imbalance=1.0,
    )
    return Setting(job=job, pipeline=PipelineConfig(num_stages=1, num_microbatches=1, schedule=USUAL))


def uneven(setting: Setting, imbalance: float) -> Setting:
    return replace(setting, job=replace(setting.job, imbalance=imbalance))


def sent(text: str, setting: Setting) -> dict[tuple[str, str], float]:
    """Bytes by phase and ranks of all that ep and the levels ask for."""
    strategy = parse_strategy(text)
    load = layer_load(layer_profile(BLOCK, strategy, setting, imbalance=1.0), strategy, setting)
    found: dict[tuple[str, str], float] = {}
    for kind in strategy.kinds:
        for each in kind.traffic(load):
            key = each.phase, each.over
            found[key] = found.get(key, 0.0) + each.tensor_bytes
    return found


PAIRS_BYTES = SAMPLES * SEQ_LEN * CONFIG["num_experts_per_tok"] * PAIR_BYTES
COUNT_BYTES = 4 * 8


def test_pairs_go_to_their_experts_and_back_and_their_gradients_too(setting: Setting) -> None:
    found = sent("fsdp8 ep4", setting)
    assert found["forward", "experts"] == 2 * PAIRS_BYTES + COUNT_BYTES
    assert found["backward", "experts"] == 2 * PAIRS_BYTES
    assert ("recomputation", "experts") not in found


def test_full_remat_exchanges_again_and_selective_remat_does_not(setting: Setting) -> None:
    full, selective = sent("fsdp8 ep4 remat=full", setting), sent("fsdp8 ep4 remat=selective", setting)
    assert full["recomputation", "experts"] == full["forward", "experts"]
    assert ("recomputation", "experts") not in selective


def test_an_imbalance_sends_as_many_times_more(setting: Setting) -> None:
    even, more = sent("fsdp8 ep4", setting), sent("fsdp8 ep4", uneven(setting, 1.5))
    assert more["backward", "experts"] == 1.5 * even["backward", "experts"]


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
    setting: Setting, text: str, held: int, shard: int
) -> None:
    strategy = parse_strategy(text)
    layer = layer_profile(BLOCK, strategy, setting)
    assert layer.expert_params == EXPERTS
    dense = layer.num_params - EXPERTS
    assert held_params(layer, strategy) == dense + held
    assert sharded_params(layer, strategy) == -(-dense // strategy.state_shards) + shard


def test_experts_are_gathered_over_the_ranks_that_ep_leaves(setting: Setting) -> None:
    found = sent("fsdp8 ep4", setting)
    assert found["forward", "expert shards"] == 2 * EXPERTS // 4
    assert found["forward", "shards"] < found["forward", "expert shards"]


def test_replicas_sum_the_gradients_of_experts_over_the_ranks_that_ep_leaves(setting: Setting) -> None:
    found = sent("dp8 ep4", setting)
    assert found["step", "expert replicas"] == 4 * EXPERTS // 4


@pytest.mark.parametrize("remat", Remat)
def test_an_imbalance_costs_time_and_never_saves_bytes(setting: Setting, remat: Remat) -> None:
    strategy = Strategy.of(parse_strategy("fsdp8").levels, remat, ep=4)
    even, more = (layer_cost(BLOCK, strategy, each) for each in (setting, uneven(setting, 1.5)))
    assert even.forward_s["imbalance"] == pytest.approx(0.0, abs=1e-12)
    assert more.forward_s["imbalance"] > 0
    assert more.microbatch_s >= even.microbatch_s
    assert more.activation_bytes >= even.activation_bytes
    assert more.transient_bytes >= even.transient_bytes
