"""Tests that a peft model is planned and trained unchanged: its base plus the lever of its adapters."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import steelyard
from steelyard.errors import UserError
from steelyard.modules.build import read_hub_config
from steelyard.plan.plan import Plan
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan
from tests.runtime.processes import one_process

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

SOME = ["q_proj", "v_proj"]
CONFIG = {key: value for key, value in CONFIGS["llama"].items() if key != "model_type"}
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "lora": (  # names that this model lacks are left out, as by peft
        lambda: peft.LoraConfig(r=4, target_modules=[*SOME, "c_attn"]),
        "lora:r=4,alpha=8,targets=q_proj+v_proj",
    ),
    "dora": (
        lambda: peft.LoraConfig(r=4, lora_alpha=16, target_modules=SOME, use_dora=True, use_rslora=True),
        "lora:r=4,alpha=16,targets=q_proj+v_proj,rslora,use_dora=true",
    ),
    "ia3": (peft.IA3Config, "ia3:targets=down_proj+k_proj+v_proj,feedforward_modules=down_proj"),
    "hra": (lambda: peft.HRAConfig(r=4, target_modules=SOME), "hra:targets=q_proj+v_proj,r=4"),
}


def _model(config: Any, device: str = "cpu") -> Any:
    torch.manual_seed(3)
    with torch.device(device):
        return peft.get_peft_model(LlamaForCausalLM(read_hub_config("llama", CONFIG)), config)


def _plan(model: Any, **options: Any) -> Plan:
    return steelyard.find_plan(model, "1x1xa100-40gb", global_batch=2, seq_len=16, precision="fp32", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_its_adapters_are_the_lever_and_train_as_in_peft(kind: str) -> None:
    make, text = KINDS[kind]
    model = _model(make())
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.requires_grad:
                each.add_(0.01 * torch.randn(each.shape, generator=torch.Generator().manual_seed(len(name))))
    plan = _plan(model)
    assert plan.levers == {"train": text}
    tokens = torch.arange(34).view(2, 17)
    expected = _loss(model, tokens)
    with one_process():
        trainer = steelyard.parallelize(model, plan)
        optimizer = torch.optim.SGD([each for each in trainer.parameters() if each.requires_grad], lr=0.1)
        losses = []
        for _ in range(2):
            losses.append(trainer.train_step(lambda samples: tokens[samples]).item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("levers", "tolerance"), [({}, 1e-5), ({"base": "nf4"}, 1e-3)])
def test_a_model_without_adapters_keeps_its_weights_and_gets_those_of_the_plan(
    levers: dict[str, str], tolerance: float
) -> None:
    torch.manual_seed(3)
    model = LlamaForCausalLM(read_hub_config("llama", CONFIG))
    tokens = torch.arange(34).view(2, 17)
    expected = _loss(model, tokens)
    plan = make_plan(
        "llama",
        ", ".join(["single"] * 8),
        num_devices=1,
        global_batch=2,
        num_microbatches=1,
        seq_len=16,
        levers={"train": "lora:r=4"} | levers,
    )
    with one_process():
        trainer = steelyard.parallelize(model, plan)
        assert trainer.train_step(lambda samples: tokens[samples]).item() == pytest.approx(expected, rel=tolerance)
        assert {name.split(".")[-2] for name, each in trainer.named_parameters() if each.requires_grad} == {"default"}


@pytest.mark.parametrize(("base", "tolerance"), [(None, 1e-5), ("nf4+experts", 4e-2)])
def test_its_adapters_of_experts_compute_what_they_do_in_peft(base: str | None, tolerance: float) -> None:
    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(read_hub_config("mixtral", FAMILY_CONFIGS["mixtral"]))
    model = peft.get_peft_model(whole, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=stacked))
    without = model.get_base_model()
    with torch.no_grad():
        whole.lm_head.weight.mul_(30.0)  # so that logits differ
        for name, each in model.named_parameters():
            if each.requires_grad:
                each.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    plan = _plan(model, levers={"base": base} if base else None)
    tokens = torch.arange(34).view(2, 17)
    expected = _loss(model, tokens)
    with model.disable_adapter():
        assert _loss(without, tokens) != pytest.approx(expected, rel=1e-1)
    with one_process():
        trainer = steelyard.parallelize(model, plan)
        assert trainer.train_step(lambda samples: tokens[samples]).item() == pytest.approx(expected, rel=tolerance)


def _loss(model: Any, tokens: Tensor) -> float:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "tokens or prefixes"),
        (peft.LoraConfig(target_modules=SOME, init_lora_weights="pissa"), "pissa"),
        (peft.VeraConfig(target_modules=SOME), "save_projection"),
        (peft.LoraConfig(target_modules=SOME, rank_pattern={"q_proj": 2}), "rank_pattern"),
        (peft.LoraConfig(target_modules=SOME, inference_mode=True), "without gradients"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(config: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        _plan(_model(config))


def test_several_adapters_are_refused() -> None:
    model = _model(peft.LoraConfig(target_modules=SOME))
    model.add_adapter("second", peft.LoraConfig(target_modules=SOME))
    with pytest.raises(UserError, match="default, second"):
        _plan(model)


def test_a_lever_beside_them_and_another_plan_are_refused() -> None:
    model = _model(peft.LoraConfig(r=4, target_modules=SOME))
    with pytest.raises(UserError, match="for a model with lora"):
        _plan(model, levers={"train": "lora:r=8"})
    plan = _plan(_model(peft.LoraConfig(r=8, target_modules=SOME)))
    with one_process(), pytest.raises(UserError, match="r=4"):
        steelyard.parallelize(model, plan)
