"""Tests of the YAML for LLaMA-Factory: the plan as settings of a front end of accelerate, written and read."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.engines import ENGINE_OF_TARGET, ENGINES, TARGETS
from steelyard.engines.engine import Settings
from steelyard.engines.writing import Request, export_plan
from steelyard.errors import UserError
from steelyard.hardware import parse_cluster
from steelyard.levers import Levers
from steelyard.levers.train import Train
from steelyard.plan.strategy import Remat
from steelyard.planning.request import make_request
from steelyard.planning.settings import plan_of_file, price_settings
from tests.engines.examples import text_of, uniform
from tests.engines.known import known_names
from tests.modules.split_configs import split_config

LORA = "lora:r=8,alpha=16,targets=q_proj+v_proj,dropout=0"
ONE, TWO = "1x1xrtx-4090", "1x2xh100-80gb"
EXAMPLE = """\
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
quantization_bit: 4
quantization_method: bnb
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 256
max_samples: 1000
preprocessing_num_workers: 16
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
plot_loss: true
overwrite_output_dir: true
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""


def contents(
    levers: dict[str, str], cluster: str, settings: Settings, model: str = "llama-demo", seq_len: int = 256
) -> tuple[Any, dict[str, str]]:
    """A priced plan, and the files that LLaMA-Factory gets."""
    request = make_request(model, cluster, global_batch=16, seq_len=seq_len, levers=levers, engine="accelerate")
    plan, _ = price_settings(request, ENGINES["accelerate"], "bf16", settings)
    written = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(cluster))
    return plan, dict(export_plan(TARGETS["llama-factory"], written).files)


def test_accelerate_runs_it_without_replicas_of_shards() -> None:
    engine = ENGINE_OF_TARGET["llama-factory"]
    assert engine.name == "accelerate"
    assert {"+".join(sorted(each.name for each in one)) for one in engine.capabilities.dimensions if one} == {
        "dp",
        "fsdp",
    }


def test_shards_are_accelerates_and_recomputation_is_the_trainers() -> None:
    plan = uniform("fsdp8", devices=8, remat="full")
    content, launch = (yaml.safe_load(text_of(plan, "llama-factory", name)) for name in ("factory.yaml", "rate.yaml"))
    assert (content["disable_gradient_checkpointing"], content["use_reentrant_gc"]) == (False, False)
    assert launch["fsdp_config"]["fsdp_activation_checkpointing"] is False
    assert launch["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert "parallelism_config" not in launch
    assert set(content) <= known_names("llamafactory-0.9.5.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("levers", "cluster", "settings"),
    [
        ({"train": LORA, "base": "nf4", "optimizer": "adamw-8bit"}, ONE, Settings(zero=0, remat=Remat.FULL)),
        ({"train": "lora:r=16,rslora"}, TWO, Settings(zero=0, micro_batch=2)),
        ({}, TWO, Settings(zero=0, micro_batch=2, remat=Remat.FULL)),
        ({"weights": "bf16"}, TWO, Settings(zero=0, micro_batch=2, remat=Remat.FULL)),
    ],
)
def test_what_is_written_is_read_again(
    levers: dict[str, str], cluster: str, settings: Settings, tmp_path: Path
) -> None:
    plan, files = contents(levers, cluster, settings)
    path = tmp_path / "llama_factory.yaml"
    path.write_text(files[path.name])
    assert set(files) == {path.name}
    assert set(yaml.safe_load(files[path.name])) <= known_names("llamafactory-0.9.5.txt")
    again, notes = plan_of_file(path, "llama-demo", cluster)
    assert not notes
    assert again.chosen_levers == plan.chosen_levers
    assert again.prediction == plan.prediction


@pytest.mark.slow
def test_a_tower_that_the_plan_trains_is_not_frozen_and_one_that_the_file_freezes_is_noted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(split_config("qwen2_5_vl")))
    plan, files = contents({"train": "lora:r=4"}, ONE, Settings(zero=0), str(tmp_path), 16)
    path, content = tmp_path / "llama_factory.yaml", yaml.safe_load(files["llama_factory.yaml"])
    path.write_text(files[path.name])
    again, notes = plan_of_file(path, str(tmp_path), ONE)
    assert (again.prediction, notes) == (plan.prediction, ())
    assert set(content) <= known_names("llamafactory-0.9.5.txt")
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if key != "freeze_vision_tower"}))
    assert "freeze_vision_tower, which is on (priced as trained)" in plan_of_file(path, str(tmp_path), ONE)[1][0]


@pytest.mark.slow
def test_its_own_example_is_read_as_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "llama3_lora_sft.yaml"
    path.write_text(EXAMPLE)
    plan, notes = plan_of_file(path, "llama-demo", ONE)
    assert (plan.engine, plan.precision, plan.global_batch, plan.seq_len) == ("accelerate", "bf16", 8, 256)
    assert plan.chosen_levers == Levers.of({"train": "lora:r=8,alpha=16,targets=all-linear", "base": "nf4"})
    assert {str(strategy) for strategy in plan.strategies} == {"single", "single remat=full"}
    assert notes == ("Not read of llama3_lora_sft.yaml: packing, which is off (priced with full sequences).",)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"deepspeed": "ds_z3_config.json"},
            r"deepspeed: found ds_z3_config.json[\s\S]*a file in the working directory",
        ),
        ({"use_unsloth": True}, "no price"),
        ({"stage": "dpo"}, "stage: found dpo"),
        ({"do_train": False, "do_predict": True}, "stage: found sft without do_train"),
        ({"use_galore": True}, "use_galore: found True"),
        ({"tensor_model_parallel_size": 2}, "starts Megatron"),
        ({"quantization_method": "hqq"}, r"quantization_bit: found 4 \(hqq\)"),
        ({"finetuning_type": "freeze"}, "finetuning_type: found freeze"),
        ({"quantization_bit": 8}, "quantization_bit: found 8"),
        ({"per_device_train_batch_size": "auto"}, "whole number of 1 or more"),
    ],
)
def test_what_it_cannot_price_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(EXAMPLE) | changed))
    with pytest.raises(UserError, match=message):
        plan_of_file(path, "llama3-8b", ONE)


def test_alpha_is_a_whole_number() -> None:
    refused = ENGINE_OF_TARGET["llama-factory"].lever_refusal(Train.parse("lora:r=8,alpha=1.5"))
    assert refused is not None
    assert "whole number" in refused
