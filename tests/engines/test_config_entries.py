"""Tests that frameworks build the same model from a config, or that the refusal names the entry."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steelyard.engines import engine_of
from steelyard.engines.config_entries import DEFAULTS, NO_EFFECT, completed
from steelyard.engines.megatron_models import model_flags
from steelyard.engines.torchtitan import changes_of, flavor_of
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.model.read import load_model
from steelyard.model.split import ModelSplit
from tests.engines.examples import divided_experts, text_of, uneven_pipeline, uniform
from tests.engines.known import known_names

MODELS = {
    "gpt2": "gpt2",
    "llama": "llama3.1-8b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-14b",
    "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "deepseek_v3": "deepseek-v3",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def chain_of(model: str, *, without: tuple[str, ...] = (), **entries: Any) -> ModelChain:
    """A packaged model with some entries of its config changed or left out, and all else as it is."""
    chain = load_model(model)
    return replace(chain, config={key: value for key, value in chain.config.items() if key not in without} | entries)


def flags_of(model: str, *, seq_len: int = 4096, **changes: Any) -> list[str]:
    return model_flags(chain_of(model, **changes), seq_len)


def written(target: str, chain: ModelChain) -> object:
    """Part of an export that says which model is trained."""
    return model_flags(chain, 4096) if target == "megatron" else changes_of(*flavor_of(chain, 4096))


def refusal(model: str, target: str, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        written(target, chain_of(model, **changes))
    return str(caught.value)


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_what_a_config_does_not_say_is_what_transformers_takes(model_type: str) -> None:
    known = AutoConfig.for_model(model_type)
    entries = known.to_dict()
    entries |= entries.pop("rope_parameters", {})
    for key, value in DEFAULTS[model_type].items():
        if key in ("num_experts", "num_nextn_predict_layers", "qk_head_dim", "rope_interleave", "mlp_only_layers"):
            continue  # under another name there, or of no class that has a default
        if key in ("head_dim", "num_key_value_heads") and value is None:
            continue  # follows from other entries
        assert entries[key] == value, key


OTHER_VALUES: Mapping[str, Any] = {
    "activation_function": "relu",
    "add_cross_attention": True,
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attn_pdrop": 0.2,
    "decoder_sparse_step": 2,
    "embd_pdrop": 0.2,
    "first_k_dense_replace": 2,
    "head_dim": 64,
    "hidden_act": "gelu",
    "intermediate_size": 1024,
    "kv_lora_rank": 256,
    "layer_norm_epsilon": 1e-3,
    "layer_types": ["sliding_attention"],
    "mlp_bias": True,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 256,
    "n_group": 4,
    "n_head": 16,
    "n_inner": 1024,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 16,
    "q_lora_rank": 768,
    "reorder_and_upcast_attn": True,
    "resid_pdrop": 0.2,
    "qk_head_dim": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-3,
    "rope_interleave": False,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 12345.0, "factor": 2.0},
    "routed_scaling_factor": 1.0,
    "router_jitter_noise": 0.1,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "topk_group": 2,
    "v_head_dim": 64,
    "vocab_size": 1024,
}
NEVER_TRAINED = {"max_window_layers", "num_nextn_predict_layers", "output_router_logits", "router_aux_loss_coef"}
"""Entries that no plan trains, or that have an effect only with a window or a switch."""
SAID_ELSEWHERE = {
    *("hidden_size", "n_ctx", "n_embd", "n_layer", "n_positions", "num_hidden_layers", "use_sliding_window")
}
"""Entries given by the chain of layers, or that only say whether there is a window."""
TARGETS_OF = {
    "megatron": ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"),
    "torchtitan": ("llama", "qwen3", "qwen3_moe", "deepseek_v3"),
}


@pytest.mark.parametrize(
    ("target", "model_type"), [(target, each) for target, types in TARGETS_OF.items() for each in types]
)
def test_every_entry_of_a_config_changes_the_export_or_is_refused(target: str, model_type: str) -> None:
    chain = load_model(MODELS[model_type])
    without_effect = set().union(*NO_EFFECT.values()) | NEVER_TRAINED | SAID_ELSEWHERE
    entries = set(AutoConfig.for_model(model_type).to_dict()) - without_effect
    assert entries <= set(OTHER_VALUES), "entries that this test knows no other value of"
    if target == "megatron":
        entries.remove("vocab_size")  # which is the tokenizer's there, as the script says
    before = written(target, chain)
    for entry in sorted(entries):
        value = OTHER_VALUES[entry]
        changes = {entry: value}
        if entry in ("sliding_window", "layer_types"):
            changes |= {"use_sliding_window": True, "sliding_window": 1024}
        if completed(chain, 4096).get(entry) == value:
            changes = {entry: not value}
        try:
            after = written(target, chain_of(chain.name, **changes))
        except UserError:
            continue
        assert after != before, f"{entry} is lost"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_every_entry_is_read_by_the_bridge_set_by_the_recipe_or_refused(model_type: str) -> None:
    """Entries that follow from others are left out: keys of DeepSeek-V3, and what only a switch makes effective."""
    known = known_names("megatron-bridge-0.3.1-entries.txt")
    without_effect = set().union(*NO_EFFECT.values()) | NEVER_TRAINED | {"use_sliding_window", "qk_head_dim"}
    chain = load_model(MODELS[model_type]) if model_type in MODELS else bridged_chain(model_type)
    refuse = engine_of("megatron-bridge").refuse
    refuse(chain, 4096)
    is_set, refused = {"gpt_oss": {"sliding_window"}}.get(model_type, set()), 0
    for entry in sorted(set(AutoConfig.for_model(model_type).to_dict()) - without_effect):
        value = OTHER_VALUES.get(entry, 1024)
        value = not value if completed(chain, 4096).get(entry) == value else value
        try:
            refuse(replace(chain, config={**chain.config, entry: value}), 4096)
        except UserError:
            refused += 1
        else:
            assert entry in known | is_set or f"{model_type}.{entry}" in known, f"{entry} is lost"
    assert refused >= 4


def bridged_chain(model_type: str) -> ModelChain:
    """A chain whose config is of a type that only Megatron-Bridge builds; its layers are of another."""
    chain = load_model("gpt-oss-20b")
    if model_type == "gpt_oss":
        return chain
    config = {key: value for key, value in AutoConfig.for_model(model_type).to_dict().items() if value is not None}
    return replace(chain, config=config, family=replace(chain.family, model_type=model_type))


def test_gpt2_is_megatrons_own_model() -> None:
    """Its blocks have Megatron's default norm, biases and activation."""
    flags = flags_of("gpt2", seq_len=1024)
    assert {"--position-embedding-type learned_absolute", "--normalization LayerNorm", "--hidden-dropout 0.1"} <= {
        *flags
    }
    assert {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"}.isdisjoint(flags)


def test_megatron_gets_the_scaling_of_llama_3_1() -> None:
    flags = flags_of("llama3.1-8b")
    assert "--use-rope-scaling" in flags
    assert "--rope-scaling-factor '8'" in flags or "--rope-scaling-factor 8" in flags
    assert "--use-rope-scaling" not in flags_of("llama3-8b")


@pytest.mark.parametrize("given", [YARN, LLAMA3_ROPE | {"low_freq_factor": 2.0}, {"type": "linear", "factor": 1.5}])
def test_megatron_refuses_other_scalings(given: dict[str, Any]) -> None:
    assert "rope_scaling" in refusal("llama3.1-8b", rope_scaling=given, target="megatron")


def test_scaling_is_read_as_transformers_5_writes_it() -> None:
    parameters = LLAMA3_ROPE | {"rope_theta": 500000.0}
    new = flags_of("llama3.1-8b", without=("rope_scaling", "rope_theta"), rope_parameters=parameters)
    assert new == flags_of("llama3.1-8b")


def test_megatron_gets_a_window_where_sequences_are_longer() -> None:
    assert not any("window" in flag for flag in flags_of("mistral-7b", sliding_window=4096))
    flags = flags_of("mistral-7b", sliding_window=1024)
    assert any(flag.replace("'", "") == "--window-size 1023,0" for flag in flags)
    assert any("window" in flag for flag in flags_of("mistral-7b", without=("sliding_window",), seq_len=8192))


def test_megatron_has_biases_in_attention_and_mlp_or_in_neither() -> None:
    assert "--disable-bias-linear" not in flags_of("llama3.1-8b", attention_bias=True, mlp_bias=True)
    assert "attention_bias = true" in refusal("llama3.1-8b", attention_bias=True, target="megatron")
    assert "attention_bias = true" in refusal("qwen3-14b", attention_bias=True, target="megatron")


def test_megatron_does_not_renormalise_what_the_model_does_not() -> None:
    assert "--moe-router-pre-softmax" in flags_of("qwen3-30b-a3b", norm_topk_prob=False)
    assert "--moe-router-pre-softmax" not in flags_of("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("model", "entries", "named"),
    [
        ("llama3.1-8b", {"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ("llama3.1-8b", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama3.1-8b", {"rope_theta": 500000.5}, "rope_theta"),
        ("pythia-6.9b", {}, "gpt_neox"),
    ],
)
def test_megatron_refuses_what_it_would_lose(model: str, entries: dict[str, Any], named: str) -> None:
    assert named in refusal(model, "megatron", **entries)


@pytest.mark.parametrize(("typed", "hint"), [(False, "--to pytorch"), (True, "--to torchrun")])
def test_a_refusal_points_to_what_writes_the_model(typed: bool, hint: str) -> None:
    chain = load_model("pythia-6.9b")
    assert isinstance(chain.split, ModelSplit)
    other = replace(chain, split=chain.split.model_copy(update={"typed_buffers": typed}))
    for target in ("megatron", "torchtitan"):
        with pytest.raises(UserError, match=hint):
            written(target, other)


@pytest.mark.parametrize("entries", [{"intermediate_size": 11008}, {"vocab_size": 32000}, {"rope_scaling": YARN}])
def test_torchtitan_refuses_a_model_that_its_flavor_is_not(entries: dict[str, Any]) -> None:
    assert next(iter(entries)) in refusal("llama3.1-8b", **entries, target="torchtitan")


TITAN = """
import json, logging, sys
from unittest.mock import MagicMock

import torch

for name in ("", ".api"):  # which needs triton
    sys.modules["torchtitan.distributed.minimal_async_ep" + name] = MagicMock(__spec__=None)
logging.disable(logging.CRITICAL)
from torchtitan.components.quantization import float8
float8.has_cuda_capability = lambda *_: True  # which the configuration of 405B asks for
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims

found = {}
for name, world_size, is_built in json.loads(sys.argv[1]):
    config = ConfigManager().parse_args(["--module", name, "--config", name])
    model, degrees = config.model_spec.model, config.parallelism
    found[name] = {}
    if is_built:
        with torch.device("meta"):
            layers = model.build()
        block = model.layers[-1]
        found[name] = {
            "parameters": sum(each.numel() for each in layers.parameters()),
            "first": sum(each.numel() for each in layers.layers["0"].parameters()),
            "eps": [model.norm.eps, block.attention_norm.eps, block.ffn_norm.eps],
            "rope": block.attention.rope.scaling,
            "factor": block.attention.rope.scaling_factor,
            "theta": block.attention.rope.theta,
            "compile": config.compile.enable,
            "float8": "Float8" in str(model),
        }
    model.update_from_config(config=config)
    ParallelDims(
        dp_replicate=degrees.data_parallel_replicate_degree,
        dp_shard=degrees.data_parallel_shard_degree,
        cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree,
        pp=degrees.pipeline_parallel_degree,
        ep=degrees.expert_parallel_degree,
        world_size=world_size,
    )
print(json.dumps(found))
"""
"""Reads configurations as torchtitan's trainer does, with its checks, and builds their models on the meta device."""
FLAVORS = (
    "llama3-8b",
    "llama3.1-8b",
    "llama3-70b",
    "llama3-405b",
    "llama3.2-1b",
    "llama3.2-3b",
    "qwen3-0.6b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek-v3",
)
DIVIDED = (
    uniform("tp4", devices=4, model="llama3-8b"),
    *(uniform(each, devices=8, model="llama3-8b", zero=3) for each in ("dp2-fsdp4", "fsdp4-cp2")),
    uneven_pipeline(),
    uneven_pipeline(schedule="interleaved-1f1b"),
    divided_experts("qwen3-30b-a3b", ep=8, num_layers=48),
    divided_experts("qwen3-30b-a3b", ep=4, num_layers=48),
    divided_experts("qwen3-30b-a3b", ep=8, num_layers=48, parallel="fsdp4-cp2"),
)
"""Plans whose degrees torchtitan checks: of tensors, states, sequences, stages and experts."""


@pytest.mark.slow
def test_torchtitan_reads_the_files_and_builds_the_model_of_the_config(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    flavors = [uniform("dp8", devices=8, model=model) for model in FLAVORS]
    flavors.append(flavors[0].model_copy(update={"engine": "torchtitan+compile+whole-loss"}))
    jobs = []
    for number, plan in enumerate((*flavors, *DIVIDED)):
        text = re.sub(r"steelyard_\w+", f"plan_{number}", text_of(plan, "torchtitan", ".py"))
        (tmp_path / f"plan_{number}.py").write_text(text)
        jobs.append((f"plan_{number}", plan.num_devices, number < len(flavors)))
    command = [sys.executable, "-c", TITAN, json.dumps(jobs)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    built = json.loads(ran.stdout.splitlines()[-1])
    found = dict(zip(FLAVORS, built.values(), strict=False))
    assert built[f"plan_{len(FLAVORS)}"] == found[FLAVORS[0]] | {"compile": True}
    for model in FLAVORS:
        config = AutoConfig.for_model(**load_model(model).config)
        with torch.device("meta"):
            ours = AutoModelForCausalLM.from_config(config)
        own = found[model]
        assert own["parameters"] == sum(each.numel() for each in ours.parameters()), model
        assert own["first"] == sum(each.numel() for each in ours.model.layers[0].parameters()), model
        assert set(own["eps"]) == {config.rms_norm_eps}, model
        kinds = {"none": "default", "llama": "llama3", "yarn": "yarn"}
        assert kinds[own["rope"]] == config.rope_parameters["rope_type"], model
        if own["rope"] == "llama":
            assert own["factor"] == config.rope_parameters["factor"], model
        assert own["theta"] == config.rope_parameters["rope_theta"], model
        assert (own["compile"], own["float8"]) == (False, False), model


def test_what_no_plan_of_the_model_reads_is_left_away() -> None:
    config = dict(load_model("qwen2.5-7b").config) | {"max_window_layers": 28, "sliding_window": 131072}
    assert completed(replace(load_model("qwen2.5-7b"), config=config), 4096)["sliding_window"] is None
