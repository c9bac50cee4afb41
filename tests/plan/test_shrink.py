"""Tests that a plan at small width keeps stages, schedule, strategies and layer types, and no model size."""

from itertools import groupby
from typing import Any

import pytest

from steelyard.model.read import chain_from_config, load_model
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import shrunk_plan
from tests.modules.split_configs import split_config
from tests.runtime.family_cases import CASES, SAMPLE
from tests.runtime.models import FAMILY_CONFIGS, make_plan
from tests.sample import sampled


def shape(plan: Plan) -> list[list[tuple[str, str]]]:
    """Layer types and strategies of the layers of each stage, each run of equal ones once."""
    chain = plan.chain()
    return [
        [key for key, _ in groupby((chain.type_of(layer).name, str(plan.strategies[layer])) for layer in part.layers)]
        for part in plan.parts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_stages_keep_their_types_and_strategies(name: str) -> None:
    plan = CASES[name].plan
    small = shrunk_plan(plan)
    assert shape(small) == shape(plan)
    has_experts = any(layer_type.num_experts for layer_type in plan.chain().layer_types)
    assert (small.schedule, small.precision) == (plan.schedule, "fp32" if has_experts else plan.precision)
    assert [part.ranks for part in small.parts] == [part.ranks for part in plan.parts]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_a_plan_that_is_small_stays_so_when_shrunk_again(name: str) -> None:
    once = shrunk_plan(CASES[name].plan)
    assert shrunk_plan(once) == once


def big_plan(name: str = "llama3-70b", schedule: str = "1f1b", num_chunks: int = 1) -> Plan:
    chain = load_model(name)
    half = chain.num_layers // 2
    first = ", ".join(["fsdp2-tp4+sp"] * half)
    second = ", ".join(["tp8+sp remat=full"] * (chain.num_layers - half))
    return make_plan(
        dict(chain.config),
        first,
        second,
        num_microbatches=64,
        global_batch=512,
        seq_len=8192,
        precision="bf16",
        num_devices=16,
    )


def test_of_equal_neighbours_two_are_kept() -> None:
    small = shrunk_plan(big_plan())
    assert [str(strategy) for strategy in small.strategies] == ["fsdp2-tp4+sp"] * 3 + ["tp8+sp remat=full"] * 3


def test_a_big_model_becomes_a_small_one_that_keeps_grouped_heads() -> None:
    chain = shrunk_plan(big_plan()).chain()
    assert chain.hidden_size <= 256
    assert chain.vocab_size <= 256
    assert (
        dict(chain.layer_types[1].tp_divides)["attention heads"]
        == 2 * dict(chain.layer_types[1].tp_divides)["key-value heads"]
    )


def test_a_batch_is_as_small_as_the_degrees_allow() -> None:
    small = shrunk_plan(big_plan())
    assert (small.num_microbatches, small.microbatch_samples) == (4, 2)


def test_an_interleaved_plan_keeps_its_chunks() -> None:
    config = dict(load_model("llama3-8b").config)
    stages = ["fsdp2, " * 8 + "fsdp2", *["tp2, " * 7 + "tp2"] * 2, "dp2, " * 8 + "dp2"]
    plan = make_plan(
        config,
        *stages,
        num_microbatches=16,
        global_batch=64,
        num_devices=4,
        num_chunks=2,
        schedule="interleaved-1f1b",
    )
    small = shrunk_plan(plan)
    assert (small.num_chunks, small.num_stages, small.num_microbatches) == (2, 2, 4)
    assert shape(small) == shape(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("llama", "cp16-tp2+sp"),
        ("llama", "dp2-cp8-tp2+ulysses"),
        ("mixtral", "fsdp16-tp2 ep8"),
        ("deepseek_v3", "fsdp32 ep8"),
    ],
)
def test_sizes_are_those_that_cp_and_ep_divide(model: str, strategy: str) -> None:
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 64)
    sizes |= dict.fromkeys(("num_local_experts", "n_routed_experts"), 64) | {"hidden_size": 512}
    config = {key: sizes.get(key, value) for key, value in FAMILY_CONFIGS[model].items()}
    ends = strategy.split(" ", maxsplit=1)[0].replace("+ulysses", "")
    blocks = [strategy] * config["num_hidden_layers"]
    if config.get("first_k_dense_replace"):
        blocks[0] = ends
    plan = make_plan(config, ", ".join([ends, *blocks, ends]), global_batch=128, seq_len=512, num_devices=32)
    small = shrunk_plan(plan)
    assert shape(small) == shape(plan)
    assert small.seq_len <= 64


@pytest.mark.parametrize(
    ("name", "key", "kept"),
    [
        ("phi-3-mini", "num_hidden_layers", 4),
        ("command-r7b", "layer_types", [*["sliding_attention"] * 2, "full_attention"] * 8),
        ("deepseek-v3", "first_k_dense_replace", 2),
        ("t5-base", "num_layers", 4),
        ("t5-base", "num_decoder_layers", 2),
    ],
)
def test_of_equal_layers_of_a_model_that_splits_by_its_structure_two_are_kept(name: str, key: str, kept: Any) -> None:
    chain = load_model(name)
    strategies = ["fsdp2"] * 9 + ["tp2"] * (chain.num_layers - 9)
    plan = make_plan(dict(chain.config), ", ".join(strategies), num_devices=2, seq_len=128)
    small = shrunk_plan(plan)
    assert shape(small) == shape(plan)
    assert small.chain().config[key] == kept


def test_of_equal_blocks_of_a_classifier_two_are_kept() -> None:
    chain = load_model("vit-base")
    strategies = ["fsdp2"] * 9 + ["tp2"] * (chain.num_layers - 9)
    plan = make_plan(dict(chain.config), ", ".join(strategies), num_devices=2, seq_len=chain.max_seq_len)
    small = shrunk_plan(plan)
    assert shape(small) == shape(plan)
    assert small.chain().config["num_hidden_layers"] == 4


@pytest.mark.slow
def test_a_model_of_stages_has_small_images_of_as_many_windows() -> None:
    sizes = {"image_size": 224, "patch_size": 4, "window_size": 28, "embed_dim": 96, "num_heads": [3, 6]}
    config = FAMILY_CONFIGS["swin"] | sizes | {"depths": [2, 4]}
    chain = chain_from_config(config, name="swin")
    plan = make_plan(config, ", ".join(["fsdp2"] * chain.num_layers), num_devices=2, seq_len=chain.max_seq_len)
    small = shrunk_plan(plan)
    assert shape(small) == shape(plan)
    assert small.seq_len == (64 // 8) ** 2
    assert small.chain().config["depths"] == [2, 2]


def test_blocks_that_are_kept_share_their_table() -> None:
    chain = load_model("t5-base")
    plan = make_plan(dict(chain.config), ", ".join(["tp2"] * chain.num_layers), num_devices=2, seq_len=128)
    small = shrunk_plan(plan).chain()
    table = "block.layer.0.SelfAttention.relative_attention_bias.weight"
    assert [each.copies for each in small.shared[1:]] == [((1, table), (2, table)), ((4, table), (5, table))]
    scaled = [
        each.split.model_dump()["head_calls"] for each in (small, chain_from_config(dict(small.config), name="t5"))
    ]
    assert scaled[0] == scaled[1]
    assert scaled[0] != chain.split.model_dump()["head_calls"]


@pytest.mark.slow
def test_dropout_of_a_model_that_splits_by_its_structure_is_off_where_its_config_does_not_give_it() -> None:
    config = {key: value for key, value in FAMILY_CONFIGS["t5"].items() if key != "dropout_rate"}
    plan = make_plan(config, ", ".join(["single"] * 7), num_devices=1, seq_len=16)
    assert dict(shrunk_plan(plan).chain().config)["dropout_rate"] == 0.0


def test_the_noise_of_routers_is_off() -> None:
    plan = make_plan(FAMILY_CONFIGS["mixtral"] | {"router_jitter_noise": 0.1}, "dp8, dp8, dp8, dp8")
    assert dict(shrunk_plan(plan).chain().config)["router_jitter_noise"] == 0.0


def test_dropout_is_off() -> None:
    config = {key: value for key, value in CASES["gpt2, one stage"].plan.chain().config.items() if "pdrop" not in key}
    plan = make_plan(config, "single, single, single, single", num_devices=1, seq_len=16)
    small = shrunk_plan(plan).model.config
    assert small is not None
    assert (small["resid_pdrop"], small["embd_pdrop"], small["attn_pdrop"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("strategy", ["cp8", "fsdp2-cp4-tp2+sp", "cp4-tp2+ulysses", "cp8+ulysses"])
def test_a_small_plan_has_sequences_and_heads_that_context_parallelism_divides(strategy: str) -> None:
    chain = load_model("llama3-8b")
    num = 16 if strategy.startswith("fsdp") else 8
    plan = make_plan(
        dict(chain.config),
        ", ".join([strategy] * chain.num_layers),
        num_microbatches=2,
        global_batch=4,
        seq_len=8192,
        num_devices=num,
    )
    small = shrunk_plan(plan)
    assert {str(each) for each in small.strategies} == {strategy}
    assert small.chain().hidden_size <= 256


@pytest.mark.slow
def test_a_model_of_text_alone_may_have_its_sizes_in_a_part_of_its_config() -> None:
    small = shrunk_plan(make_plan(split_config("mllama"), ", ".join(["fsdp4"] * 4), num_devices=4, seq_len=32))
    assert small.chain().vocab_size == small.model.config["text_config"]["vocab_size"] == 256
    assert small.chain().hidden_size == small.model.config["text_config"]["hidden_size"]


@pytest.mark.slow
def test_of_a_tower_and_the_text_behind_it_two_equal_blocks_are_kept_and_what_nothing_reads() -> None:
    config = split_config("llava")
    config["vision_config"] = {**config["vision_config"], "num_hidden_layers": 5}
    text = {key: value for key, value in config["text_config"].items() if key != "num_hidden_layers"}
    config["text_config"] = {**text, "layer_types": None}
    layers = ["dp2", *["fsdp2"] * 4, "dp2", *["tp2"] * 32, "dp2"]
    small = shrunk_plan(make_plan(config, ", ".join(layers), num_devices=2, seq_len=32, precision="bf16"))
    assert [str(each) for each in small.strategies] == ["dp2", "fsdp2", "fsdp2", "dp2", "tp2", "tp2", "dp2"]
    assert small.model.config["vision_config"]["num_hidden_layers"] == 3
    assert small.model.config["text_config"]["num_hidden_layers"] == 2
    assert (small.seq_len, small.precision) == (20, "fp32")


@pytest.mark.slow
def test_blocks_of_a_tower_that_attend_in_windows_are_kept_as_such() -> None:
    config = split_config("qwen2_5_vl")
    config["vision_config"] = {
        **{**config["vision_config"], "depth": 6, "fullatt_block_indexes": [3, 5], "out_hidden_size": 128}
    }
    config["text_config"] = {**config["text_config"], "hidden_size": 128, "num_attention_heads": 8}
    layers = ["fsdp2"] * 7 + ["dp2"] + ["tp2"] * 2 + ["dp2"]
    small = shrunk_plan(make_plan(config, ", ".join(layers), num_devices=2, seq_len=32))
    chain = small.chain()
    assert [chain.layers[layer] for layer in range(1, 6)] == [1, 1, 2, 1, 2]
    assert small.model.config["vision_config"]["fullatt_block_indexes"] == [2, 4]
