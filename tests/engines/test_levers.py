"""Tests of levers under engines: the supported values, the files, and the memory of execution."""

import importlib
import json
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from steelyard.engines import ENGINE_OF_TARGET, ENGINES, engine_of
from steelyard.engines.capabilities import unsupported
from steelyard.engines.execution import Execution
from steelyard.engines.writing import UniformPlan
from steelyard.errors import UserError
from steelyard.levers import LEVERS, Levers
from steelyard.levers.train import Train
from steelyard.plan.plan import Plan
from steelyard.planning.job import job_of
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import make_request
from steelyard.planning.settings import Settings, price_settings
from tests.engines.examples import exported, text_of, uniform
from tests.engines.known import known_names

LORA = {"train": "lora:r=8,alpha=12,targets=q_proj+v_proj,dropout=0.05,rslora"}
QLORA = {"train": "lora:r=16", "base": "nf4", "optimizer": "adamw-8bit"}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}


def with_levers(levers: dict[str, str], parallel: str = "dp8", **changes: Any) -> Plan:
    return uniform(parallel, devices=8, levers=levers, **changes)


def module_of(plan: Plan, to: str) -> types.ModuleType:
    module = types.ModuleType("written")
    exec(text_of(plan, to, ".py"), module.__dict__)
    return module


# who runs what


def test_our_runtime_runs_every_value_but_mxfp8() -> None:
    for lever in LEVERS.values():
        for text in {*lever.offers, *lever.values} - {"mxfp8"}:
            assert ENGINES["native"].lever_refusal(next(iter(Levers.of({lever.name: text})), lever())) is None


@pytest.mark.parametrize(
    ("engine", "levers", "field", "found"),
    [
        ("megatron", {"train": "lora"}, "--train", "the engine megatron"),
        ("megatron+deepep", {"optimizer": "sgd"}, "--optimizer", "the engine megatron+deepep"),
        ("transformers", {"train": "lora", "base": "int8"}, "--base", "LLM.int8"),
        ("transformers", {"loss": "chunked"}, "--loss", "the engine transformers"),
        ("accelerate", {"optimizer": "muon"}, "--optimizer", "no such optimizer"),
        ("torchtitan", {"offload": "optimizer"}, "--offload", "cannot offload moments"),
        *((engine, {"train": "dora"}, "--train", "only plain LoRA") for engine in ("transformers", "automodel")),
    ],
)
def test_an_engine_without_a_value_refuses_it_before_any_search(
    engine: str, levers: dict[str, str], field: str, found: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, engine=engine, levers=levers)
    assert (caught.value.field, found in caught.value.found) == (field, True)
    assert "native" in caught.value.expected
    assert engine.partition("+")[0] not in caught.value.expected.split(", ")


def test_a_price_is_refused_as_a_plan_is() -> None:
    request = make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers={"optimizer": "sgd"})
    with pytest.raises(UserError, match="the engine megatron"):
        price_settings(request, ENGINES["megatron"], "bf16", Settings())


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed", "transformers"])
def test_adapters_of_peft_go_with_data_parallelism_alone(engine: str) -> None:
    found = ENGINES[engine].running(Levers.of({"train": "lora"}), "bf16")
    assert all(len(each.name) and each.name in ("dp", "fsdp") for one in found.capabilities.dimensions for each in one)
    assert ENGINES[engine].running(Levers.of({"optimizer": "sgd"}), "bf16").capabilities == ENGINES[engine].capabilities


# transformers and accelerate, whose parts are installed wherever the tests run


@pytest.mark.parametrize("to", ["transformers", "accelerate"])
@pytest.mark.parametrize("levers", [LORA, QLORA])
def test_peft_reads_the_adapters_of_the_plan(to: str, levers: dict[str, str]) -> None:
    config, train = module_of(with_levers(levers), to).lora_config, Levers.of(levers).value(Train)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (train.r, train.alpha, train.dropout)
    assert config.use_rslora is train.rslora
    assert config.target_modules in ("all-linear", {*train.targets})


@pytest.mark.parametrize("to", ["transformers", "accelerate"])
def test_transformers_reads_the_base_of_the_plan(to: str) -> None:
    config = module_of(with_levers(QLORA), to).quantization_config
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype is torch.bfloat16
    assert not hasattr(module_of(with_levers(LORA), to), "quantization_config")


@pytest.mark.parametrize("parallel", ["dp8", "fsdp8"])
def test_transformers_makes_the_optimizer_of_the_plan(parallel: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    expected = {"adamw-8bit": "AdamW8bit", "adamw-4bit": "AdamW4bit", "sgd": "SGD", "adafactor": "Adafactor"}
    for word, name in expected.items():
        if word == "adafactor" and parallel != "dp8":
            continue
        given = module_of(with_levers({"optimizer": word}, parallel), "transformers").training_arguments
        own = {key: value for key, value in given.items() if key.startswith("optim")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **own)
            made, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
        assert made.__name__ == name
        assert options.get("block_size", 256) == 256


def test_an_export_says_its_levers_and_what_is_not_the_same() -> None:
    found = exported(with_levers({"optimizer": "adafactor"}), "transformers")
    assert "levers: optimizer adafactor" in found.carried
    assert any("Adafactor's update rule" in line for line in found.left_out)
    assert "torch.optim.Adafactor" in text_of(with_levers({"optimizer": "adafactor"}), "accelerate", ".yaml")


@pytest.mark.parametrize(
    ("to", "ending", "key"),
    [
        ("accelerate", ".yaml", "fsdp_offload_params: true"),
        ("axolotl", ".yaml", "offload_params: true"),
        ("deepspeed", ".json", '"offload_param"'),
        ("deepspeed", ".json", "the optimizer is deepspeed.ops.adam.DeepSpeedCPUAdam"),
        ("transformers", ".py", "'cpu_offload': True"),
    ],
)
def test_parameters_in_host_memory_are_said_where_fsdp_shards_them(to: str, ending: str, key: str) -> None:
    assert key in text_of(with_levers({"offload": "parameters"}, "fsdp8"), to, ending)
    assert key not in text_of(with_levers({}, "fsdp8"), to, ending)


@pytest.mark.parametrize(("parallel", "stage"), [("fsdp8", 1), ("fsdp8", 2), ("fsdp8", 3), ("single", 2)])
def test_deepspeed_offloads_the_optimizer_alone_in_every_stage(parallel: str, stage: int) -> None:
    zero = {"zero": stage} if parallel == "fsdp8" else {}
    plan = uniform(parallel, devices=8 if zero else 1, levers={"offload": "optimizer"}, **zero)
    text = text_of(plan, "deepspeed", ".json")
    content = json.loads(text)["zero_optimization"]
    assert (content["stage"], content["offload_optimizer"]) == (stage, {"device": "cpu", "pin_memory": True})
    assert "offload_param" not in content
    assert "DeepSpeedCPUAdam" in text


def test_on_one_device_only_deepspeed_keeps_parameters_in_host_memory() -> None:
    levers = {"offload": "parameters"}
    alone = uniform("single", devices=1, levers=levers)
    content = json.loads(text_of(alone, "deepspeed", ".json"))["zero_optimization"]
    assert (content["stage"], content["offload_param"]["device"]) == (3, "cpu")
    for engine in ("accelerate", "transformers", "torchtitan"):
        reasons = unsupported(alone, ENGINES[engine].running(Levers.of(levers), "bf16").capabilities)
        assert "layers that nothing divides" in reasons


def test_a_plan_without_levers_is_written_as_before() -> None:
    assert "lever" not in text_of(uniform("dp8", devices=8), "transformers", ".py")
    assert [name for name, _ in exported(uniform("dp8", devices=8), "accelerate").files] == ["accelerate.yaml"]


def test_the_written_adapters_train_as_many_parameters_as_the_plan_counts() -> None:
    model = adapted(module_of(with_levers(LORA), "transformers").lora_config)
    request = make_request(TINY, "1x1xa100-40gb", global_batch=1, seq_len=32, levers=LORA)
    layers = {each.kind: each for each in job_of(request).profile.layers}
    counted = sum(layers[request.chain.type_of(place).name].trained.num_params for place in range(4))
    assert counted == sum(each.numel() for each in model.parameters() if each.requires_grad)


# how peft's adapters execute


def adapted(config: Any, **options: bool) -> nn.Module:
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that peft still calls
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).to(torch.bfloat16)
        found: nn.Module = get_peft_model(model, config, **options)
    return found


def lora_of(targets: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=targets if targets == "all-linear" else targets.split("+"))


def saved_bytes(config: Any, adapters: str, *, of_rank: bool = True) -> int:
    """Return the bytes that a block of peft saves in a forward pass of two samples of 32 tokens, without weights.

    ``adapters`` is that of `Execution`. With ``of_rank``, tensors of the adapters' rank count.
    """
    model = adapted(config, autocast_adapter_dtype=adapters != "computed").train()
    parts: Any = model.base_model.model.model
    hidden = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    positions = parts.rotary_emb(hidden, torch.arange(32)[None])
    weights = {each.data_ptr() for each in model.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_copy_of_weight = (
            not of_rank and tensor.dim() == 2 and 4 in tensor.shape
        )  # autocast's, which count as the copies that compute
        if storage.data_ptr() not in weights and not is_copy_of_weight:
            seen[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=adapters == "autocast"), hooks:
        parts.layers[0](hidden, position_embeddings=positions, attention_mask=None)
    return sum(num_bytes for num_bytes, _ in seen.values())


@pytest.mark.parametrize("targets", ["all-linear", "q_proj+v_proj", "down_proj+o_proj+q_proj"])
def test_copies_of_inputs_under_autocast_are_those_that_are_counted(targets: str) -> None:
    levers = {"train": f"lora:r=4,targets={targets}"}
    job = job_of(make_request(TINY, "1x1xa100-40gb", global_batch=2, seq_len=32, levers=levers))
    block = max(job.profile.layers, key=lambda each: each.adapter_inputs.per_sample)
    counted = 2 * (block.adapter_inputs.at(2) - block.shared_adapter_inputs.at(2))
    config = lora_of(targets)
    under_autocast, without = (saved_bytes(config, each, of_rank=False) for each in ("autocast", "computed"))
    assert counted == under_autocast - without > 0


@pytest.mark.parametrize("levers", ["lora:r=4,alpha=8", "miss:r=4,targets=q_proj+down_proj", "ln_tuning"])
def test_adapters_in_fp32_save_what_is_traced_of_them(levers: str) -> None:
    from peft import LNTuningConfig, MissConfig

    request = make_request(TINY, "1x1xa100-40gb", global_batch=2, seq_len=32, levers={"train": levers})
    execution = Execution(adapters="fp32")
    blocks = [
        max(found, key=lambda each: each.saved_bytes.at(2))
        for asked in (request, replace(request, engine=replace(ENGINES["native"], execution=execution)))
        if (found := [each for each in job_of(asked).profile.layers if each.kind.startswith("block")])
    ]
    traced = [each.saved_bytes.at(2) for each in blocks]
    config = {
        "lora": lora_of("all-linear"),
        "miss": MissConfig(r=4, target_modules=["q_proj", "down_proj"]),
        "ln_tuning": LNTuningConfig(),
    }[levers.partition(":")[0]]
    more = saved_bytes(config, "fp32") - saved_bytes(config, "computed")
    assert traced[1] - traced[0] == more
    assert (more == 0) == (levers == "ln_tuning")  # which peft leaves in the type of the model
    computed, in_fp32 = ([each.forward.fp32_flop.at(2), each.backward.fp32_flop.at(2)] for each in blocks)
    assert computed == [0, 0]
    if levers.startswith("lora"):
        weights = blocks[1].num_params - blocks[1].frozen_params
        assert in_fp32 == [2 * 2 * 32 * weights, 2 * 2 * 2 * 32 * weights]


def priced(engine: str, levers: dict[str, str], zero: int = 0, cluster: str = "1x2xa100-40gb") -> Plan:
    request = make_request("llama-demo", cluster, global_batch=4, seq_len=256, levers=levers)
    return price_settings(request, engine_of(engine), "bf16", Settings(micro_batch=2, zero=zero))[0]


def total_bytes(engine: str, levers: dict[str, str], zero: int = 0) -> int:
    return peak_bytes(priced(engine, levers, zero))


@pytest.mark.slow
def test_such_copies_are_priced_where_adapters_are_not_sharded() -> None:
    assert total_bytes("transformers", {"train": "lora:r=8"}) > total_bytes("native", {"train": "lora:r=8"})
    assert total_bytes("transformers", {}) == total_bytes("native", {})
    assert total_bytes("transformers", {"train": "lora:r=8"}, zero=3) == total_bytes(
        "native", {"train": "lora:r=8"}, zero=3
    )
    with_dropout = {"train": "lora:r=8,dropout=0.1"}  # whose inputs are no tensor that they share
    ours, theirs = (
        peak_bytes(priced(each, with_dropout, cluster="1x1xa100-40gb")) for each in ("native", "transformers")
    )
    assert ours == theirs


@pytest.mark.slow
def test_deepspeeds_default_buckets_are_an_option() -> None:
    for cluster, more in (("1x2xa100-40gb", 2_000_000_000), ("1x1xa100-40gb", 0)):
        small, large = (priced(each, {}, 2, cluster) for each in ("deepspeed", "deepspeed+large-buckets"))
        assert small.prediction
        assert large.prediction
        held, most = (each.prediction.stages[0].memory_bytes.get("gradients", 0) for each in (small, large))
        assert most - held == more
        assert peak_bytes(large) - peak_bytes(small) >= more
    for engine, size in (("deepspeed", 5e7), ("deepspeed+large-buckets", 5e8)):
        plan = with_levers({}, "fsdp8").model_copy(update={"engine": engine})
        assert json.loads(text_of(plan, "deepspeed", ".json"))["zero_optimization"]["reduce_bucket_size"] == size


# axolotl


def axolotl(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text_of(plan, "axolotl", ".yaml"))
    return found


def test_axolotl_says_the_adapters_and_the_base_of_the_plan() -> None:
    content = axolotl(with_levers(LORA))
    assert (content["adapter"], content["load_in_4bit"], content["peft_use_rslora"]) == ("lora", False, True)
    assert (content["lora_r"], content["lora_alpha"], content["lora_dropout"]) == (8, 12, 0.05)
    assert content["lora_target_modules"] == ["q_proj", "v_proj"]
    content = axolotl(with_levers(QLORA))
    assert (content["adapter"], content["load_in_4bit"], content["lora_target_linear"]) == ("qlora", True, True)
    assert content["optimizer"] == "adamw_torch_8bit"
    assert not any(content[key] for key in content if key.endswith("_kernel"))


@pytest.mark.parametrize("levers", [LORA, QLORA, {"optimizer": "adafactor"}])
def test_names_of_levers_are_those_of_axolotls_schemas(levers: dict[str, str]) -> None:
    assert set(axolotl(with_levers(levers))) <= known_names("axolotl-0.19.0.txt")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [with_levers(LORA), with_levers(QLORA), with_levers({}, "dp2-fsdp4", remat="full")])
def test_axolotls_schema_reads_the_file(plan: Plan) -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config").AxolotlConfigWCapabilities
    content = axolotl(plan)
    machine = {"bf16": True, "fp8": False, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_90"}
    own = {"base_model": "NAME", "datasets": [{"path": "NAME", "type": "completion"}], "learning_rate": 1e-4}
    read = schema(**content, **own, num_epochs=1, capabilities=machine, env_capabilities={"torch_version": "2.13.0"})
    told = ("micro_batch_size", "gradient_accumulation_steps", "dp_shard_size", "adapter", "lora_r", "optimizer")
    assert {key: getattr(read, key) for key in told if key in content} == {
        key: content[key] for key in told if key in content
    }


def test_axolotl_says_alpha_as_a_whole_number() -> None:
    refused = ENGINE_OF_TARGET["axolotl"].lever_refusal(Train.parse("lora:r=8,alpha=1.5"))
    assert refused is not None
    assert "whole number" in refused


def test_axolotl_has_a_base_in_four_bits_where_it_does_not_shard_it() -> None:
    dimensions = ENGINE_OF_TARGET["axolotl"].running(Levers.of(QLORA), "bf16").capabilities.dimensions
    assert {each.name for one in dimensions for each in one} == {"dp"}


# DeepSpeed


def test_deepspeed_is_given_adapters_and_an_optimizer_by_the_script() -> None:
    plan = with_levers({"train": "lora:r=8", "optimizer": "adamw-8bit"}, "fsdp8", zero=2)
    content = json.loads(text_of(plan, "deepspeed", ".json"))
    assert content["zero_allow_untested_optimizer"] is True
    assert any("bitsandbytes.optim.AdamW8bit" in line for line in content["_comment"])
    assert module_of(plan, "deepspeed").lora_config.r == 8
    assert set(content) - {"_comment"} <= known_names("deepspeed-0.19.8.txt")


@pytest.mark.slow
def test_zero_2_of_deepspeed_keeps_parameters_and_gathers_once_a_step_those_that_are_trained() -> None:
    found = {}
    for zero, levers in ((2, {"train": "lora:r=8"}), (3, {"train": "lora:r=8"}), (2, {}), (3, {})):
        request = make_request("llama-demo", "2x2xa100-40gb", global_batch=32, seq_len=256, levers=levers)
        plan, _ = price_settings(request, ENGINES["deepspeed"], "bf16", Settings(zero=zero))
        assert plan.prediction is not None
        (stage,) = plan.prediction.stages
        found[zero, bool(levers)] = stage.time_s["fsdp"], stage.memory_bytes["parameters"]
    assert found[2, True][0] < found[3, True][0] / 5
    assert found[2, False][0] < found[3, False][0]
    assert found[2, True][1] > 3 * found[3, True][1]  # whole on each of 4 ranks


@pytest.mark.parametrize("word", ["adamw-4bit", "adafactor"])
def test_deepspeed_refuses_moments_in_blocks_of_tensors(word: str) -> None:
    with pytest.raises(UserError, match="flattens parameters under ZeRO"):
        make_request(TINY, "1x1xa100-40gb", global_batch=1, seq_len=64, engine="deepspeed", levers={"optimizer": word})


# NeMo Automodel


def automodel(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text_of(plan, "automodel", ".yaml"))
    return found


def test_automodel_says_the_adapters_of_the_plan() -> None:
    content = automodel(with_levers({"train": "lora:r=8,alpha=12,targets=q_proj+v_proj,dropout=0.05"}, "fsdp8"))
    adapters = content["peft"]
    assert (adapters["dim"], adapters["alpha"], adapters["dropout"]) == (8, 12, 0.05)
    assert (adapters["target_modules"], adapters["dropout_position"]) == (["*.q_proj", "*.v_proj"], "pre")
    assert content["model"]["torch_dtype"] == "bfloat16"
    assert automodel(with_levers({"train": "lora"}, "fsdp8"))["peft"]["exclude_modules"] == ["lm_head"]
    assert {f"peft.{key}" for key in adapters} <= known_names("automodel-0.7.0.txt")
    assert "peft" not in automodel(uniform("fsdp8", devices=8))


@pytest.mark.parametrize("word", ["adamw", "adamw-8bit", "adamw-4bit", "sgd"])
def test_automodel_names_an_optimizer_that_there_is(word: str) -> None:
    section = automodel(with_levers({} if word == "adamw" else {"optimizer": word}, "fsdp8"))["optimizer"]
    module, _, name = section.pop("_target_").rpartition(".")
    made = getattr(importlib.import_module(module), name)([nn.Parameter(torch.zeros(4, 4))], **section)
    assert isinstance(made, torch.optim.Optimizer)


def test_automodel_refuses_what_it_has_not() -> None:
    engine = ENGINES["automodel"]
    assert engine.lever_refusal(Train.parse("lora:rslora")) is not None
    for levers in ({"optimizer": "adafactor"}, {"base": "nf4"}):
        assert engine.lever_refusal(next(iter(Levers.of(levers)))) is not None


@pytest.mark.parametrize("engine", ["automodel", "megatron-bridge"])
def test_frozen_weights_have_no_gradients_and_states_there(engine: str) -> None:
    sizes = {"global_batch": 2, "seq_len": 256, "levers": {"train": "lora:r=8"}}
    request = make_request("llama-demo", "1x2xa100-40gb", **sizes)
    zero = 3 if engine == "automodel" else 1
    plan, _ = price_settings(request, engine_of(engine), "bf16", Settings(zero=zero))
    assert plan.prediction is not None
    terms = plan.prediction.stages[0].memory_bytes
    assert 3 * (terms.get("gradients", 0) + terms["optimizer"]) < terms["parameters"]


# ms-swift on transformers


def swift(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text_of(plan, "swift-sft", ".yaml"))
    return found


def test_swift_says_the_adapters_and_the_base_of_the_plan() -> None:
    content = swift(with_levers(LORA))
    assert (content["tuner_type"], content["lora_rank"], content["lora_alpha"]) == ("lora", 8, 12)
    assert (content["target_modules"], content["use_rslora"]) == (["q_proj", "v_proj"], True)
    content = swift(with_levers(QLORA))
    assert (content["quant_method"], content["quant_bits"], content["bnb_4bit_quant_type"]) == ("bnb", 4, "nf4")
    assert (content["target_modules"], content["optim"]) == (["all-linear"], "adamw_torch_8bit")


@pytest.mark.parametrize("plan", [uniform("dp8", devices=8, remat="full"), uniform("fsdp8", devices=8, zero=2)])
def test_swift_says_batch_sharding_and_remat_of_the_plan(plan: Plan) -> None:
    content, view = swift(plan), UniformPlan.of(plan)
    batch = content["per_device_train_batch_size"] * content["gradient_accumulation_steps"] * view.data_degree
    assert (content["tuner_type"], batch, content["max_length"]) == ("full", plan.global_batch, plan.seq_len)
    assert content["gradient_checkpointing"] is (view.fsdp == 1)
    assert ("fsdp" in content) is (view.fsdp > 1)
    if view.fsdp > 1:
        assert content["fsdp"]["fsdp_config"]["reshard_after_forward"] is False
    assert "NPROC_PER_NODE=8 swift sft swift_sft.yaml" in text_of(plan, "swift-sft", ".yaml")


def test_names_of_swift_are_those_of_its_arguments() -> None:
    plans = [with_levers(LORA), with_levers(QLORA), uniform("fsdp8", devices=8)]
    assert {name for plan in plans for name in swift(plan)} <= known_names("ms-swift-4.6.0-sft.txt")
