"""Tests of reading YAML of axolotl and LLaMA-Factory in the forms that public files have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.engines import READERS
from steelyard.engines.engine import Entries, FileSettings
from steelyard.engines.peft import names_in_pattern
from steelyard.errors import UserError
from steelyard.model.read import load_model
from steelyard.planning.settings import plan_of_file

AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw_torch_fused",
    "bf16": "auto",
}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "cutoff_len": 2048,
    "packing": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "bf16": True,
}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "reduce_bucket_size": 5e8,
        "stage": 3,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "sub_group_size": 1e9,
    },
}
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def read(software: str, content: dict[str, Any], path: Path, num_devices: int = 8) -> FileSettings:
    """The settings that a file of a trainer is read as."""
    reader = READERS[software].reader
    assert reader is not None
    entries = Entries(reader.values(yaml.safe_dump(content)), path)
    return reader.read(entries, load_model("llama-demo"), num_devices)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        *[({"rl": kind}, f"rl: found {kind}") for kind in ("dpo", "kto", "grpo")],
        ({"reward_model": True}, "reward_model: found True"),
        ({"diffusion": {"noise_schedule": "linear"}}, "diffusion: found noise_schedule"),
        ({"adapter": "llama-adapter"}, "adapter: found llama-adapter"),
        ({**QLORA, "lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save: found"),
        ({**QLORA, "quantize_moe_experts": True}, "quantize_moe_experts: found True"),
        ({"unfrozen_parameters": ["^lm_head.weight$"]}, "unfrozen_parameters: found"),
        ({**QLORA, "load_in_8bit": True}, "LLM.int8"),
        ({**QLORA, "fsdp_config": {"reshard_after_forward": True}}, "a base in 4 bits that is sharded"),
        ({"fsdp": ["hybrid_shard", "auto_wrap"]}, "fsdp: found hybrid_shard"),
        ({"fsdp_config": {"version": 2}, "dp_shard_size": 3}, "dp_shard_size: found 3 for 8 data ranks"),
        ({"context_parallel_size": 16, "deepspeed": "a.json"}, "context_parallel_size: found 16"),
        ({"adapter": "lora", "lora_target_modules": r".*\.(3|7)\.self_attn\.(q|v)_proj"}, "lora_target_modules: found"),
    ],
)
def test_training_without_a_price_is_refused_by_name(entries: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text(yaml.safe_dump(AXOLOTL | entries))
    with pytest.raises(UserError, match=named):
        plan_of_file(path, "llama-demo", "1x8xh100-80gb")


@pytest.mark.parametrize(
    "content",
    [
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}},
        {"model_name_or_path": "gpt2", "per_device_train_batch_size": 4, "max_length": 2048, "bf16": True},
        {"model": "gpt2", "train_dataset": "a.yaml", "micro_batch_size": 1, "cutoff_len": 2048},
    ],
)
def test_yaml_of_other_software_is_not_taken_for_a_trainers(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="no file of these, by its ending and content"):
        plan_of_file(path, "llama-demo", "1x8xh100-80gb", seq_len=256)


@pytest.mark.parametrize(
    ("entries", "zero", "replicas", "levers"),
    [
        ({"fsdp": ["full_shard", "auto_wrap"]}, 3, 1, {}),
        ({"fsdp": ["full_shard", "offload"]}, 3, 1, {"offload": "parameters"}),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, 2, 1, {}),
        ({"fsdp_config": {"reshard_after_forward": False}}, 2, 1, {}),
        ({"fsdp_config": {"offload_params": True}, "dp_shard_size": 4}, 3, 2, {"offload": "parameters"}),
        ({}, 0, 1, {"weights": "bf16"}),
        ({"bf16": None, "fp16": True}, 0, 1, {}),
    ],
)
def test_axolotls_shards_are_read_in_old_and_new_words(
    entries: dict[str, Any], zero: int, replicas: int, levers: dict[str, str], tmp_path: Path
) -> None:
    found = read("axolotl", AXOLOTL | entries, tmp_path)
    assert (found.settings.zero, found.settings.replicas, found.levers) == (zero, replicas, levers)
    assert not found.unread


def test_axolotl_gives_ranks_of_a_sequence_the_same_samples(tmp_path: Path) -> None:
    found = read("axolotl", AXOLOTL | {"context_parallel_size": 4, "fsdp_config": {"version": 2}}, tmp_path)
    assert (found.settings.cp, found.global_batch) == (4, 2 * 4 * 2)
    older = {**AXOLOTL, "batch_size": 8}
    del older["gradient_accumulation_steps"]
    assert read("axolotl", older, tmp_path).global_batch == 8 * 8


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"plugins": [CUT]}, "a loss without whole logits"),
        ({"plugins": ["axolotl.integrations.grokfast.GrokfastPlugin"]}, "plugin GrokfastPlugin"),
        ({"gradient_checkpointing": "offload"}, "activation offloading offload"),
        ({"optimizer": "paged_adamw_8bit"}, r"paged_adamw_8bit \(priced as adamw-8bit\)"),
        ({"base_model": "unsloth/llama-3-8b-bnb-4bit", "adapter": "lora"}, "by its name in few bits"),
        ({"adapter": "lora", "lora_target_modules": r"layers.[\d]+.(mlp|self_attn).(up|q)_proj"}, r"up_proj\+q_proj"),
    ],
)
def test_axolotls_entries_that_change_memory_are_named(entries: dict[str, Any], named: str, tmp_path: Path) -> None:
    (remark,) = read("axolotl", AXOLOTL | entries, tmp_path).unread
    assert re.search(named, remark)


@pytest.mark.parametrize("software", ["axolotl", "llama-factory"])
def test_deepspeeds_settings_may_stand_in_the_file_itself(software: str, tmp_path: Path) -> None:
    content = {"axolotl": AXOLOTL, "llama-factory": FACTORY}[software]
    found = read(software, content | {"deepspeed": ZERO | {"zero_optimization": {"stage": 2}}}, tmp_path / "run.yaml")
    assert found.engine is not None
    assert (found.engine.name, found.settings.zero, found.unread) == ("deepspeed", 2, ())


def test_one_device_shards_nothing(tmp_path: Path) -> None:
    found = read("axolotl", AXOLOTL | QLORA | {"fsdp_config": {"version": 2}}, tmp_path, num_devices=1)
    assert (found.settings.zero, found.levers["base"], found.unread) == (0, "nf4", ())


@pytest.mark.parametrize("software", ["axolotl", "llama-factory"])
@pytest.mark.parametrize("folder", ["", "deepspeed"])
def test_deepspeeds_file_is_read_with_the_file_that_names_it(software: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "zero3.json").write_text(json.dumps(ZERO))
    content = {"axolotl": AXOLOTL | {"gradient_checkpointing": True}, "llama-factory": FACTORY}[software]
    named = str(Path(folder) / "zero3.json")
    found = read(software, content | {"deepspeed": named}, tmp_path / "configs" / "run.yaml")
    assert found.engine is not None
    settings = found.settings
    assert (found.engine.name, settings.zero, found.precision, found.levers) == ("deepspeed", 3, "bf16", {})
    assert (found.micro_batch, str(settings.remat)) == ({"axolotl": 2, "llama-factory": 1}[software], "full")
    assert found.global_batch == {"axolotl": 64, "llama-factory": 16}[software]
    assert (found.options, found.unread) == (("large-buckets",), ())


def test_zero_shards_no_quantized_base(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    content = AXOLOTL | QLORA | {"deepspeed": path.name}
    path.write_text(json.dumps(ZERO))
    with pytest.raises(UserError, match="a base in 4 bits that is sharded"):
        read("axolotl", content, tmp_path / "run.yaml")
    path.write_text(json.dumps(ZERO | {"zero_optimization": {"stage": 2}}))
    found = read("axolotl", content, tmp_path / "run.yaml")
    assert (found.settings.zero, found.levers["base"]) == (0, "nf4")
    assert "ZeRO 2 of adapters" in found.unread[-1]


@pytest.mark.parametrize(
    ("entries", "levers", "zero"),
    [
        ({"pure_bf16": True, "bf16": False}, {"weights": "bf16"}, 0),
        ({"optim": "adamw_8bit"}, {"optimizer": "adamw-8bit"}, 0),
        ({"fsdp": ["full_shard", "auto_wrap"]}, {}, 3),
        (
            {"finetuning_type": "lora", "pissa_init": True},
            {"train": "lora:r=8,alpha=16,targets=all-linear,dropout=0"},
            0,
        ),
    ],
)
def test_llama_factorys_levers_are_read(
    entries: dict[str, Any], levers: dict[str, str], zero: int, tmp_path: Path
) -> None:
    found = read("llama-factory", FACTORY | entries, tmp_path)
    assert (found.levers, found.settings.zero, found.precision) == (levers, zero, "bf16")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("q_proj", "q_proj"),
        (r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down)_proj", "up_proj+down_proj"),
        (r".*\.layers\.\d+\.self_attn\.(?:q|v)_proj$", "q_proj+v_proj"),
        (r"^(?!.*visual).*\.(qkv|fc1)", "qkv+fc1"),
    ],
)
def test_patterns_of_paths_are_names_at_their_end(pattern: str, names: str) -> None:
    assert names_in_pattern("targets", pattern) == names


@pytest.mark.parametrize("pattern", [r".*\.(q|v)_proj|.*\.mlp\.up", r"layers\.1[0-9]\.q_proj", r".*_proj.*"])
def test_patterns_of_some_blocks_or_in_parts_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="list the names"):
        names_in_pattern("targets", pattern)


@pytest.mark.slow
def test_full_training_outside_fsdp_has_weights_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "fft.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL))
    plan, notes = plan_of_file(path, "llama-demo", "1x1xh100-80gb", seq_len=256)
    assert (plan.engine, plan.levers, notes) == ("accelerate", {"weights": "bf16"}, ())
    (tmp_path / "zero.json").write_text(json.dumps(ZERO))
    path.write_text(yaml.safe_dump(AXOLOTL | {"deepspeed": "zero.json"}))
    plan, _ = plan_of_file(path, "llama-demo", "1x8xh100-80gb", seq_len=256)
    assert (plan.engine, plan.levers, str(plan.strategies[1])) == ("deepspeed+large-buckets", {}, "fsdp8")
