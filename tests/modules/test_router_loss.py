"""Tests of the routers' auxiliary loss: values of transformers' own function, and models that have it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.model.family import Task
from steelyard.modules.build import build_from_config, read_hub_config
from steelyard.modules.router_loss import RouterLoss, check_routers, router_loss_of
from steelyard.modules.split_proof import split_model
from steelyard.plan.strategy import parse_strategy
from tests.modules.split_configs import SPLIT_CONFIGS
from tests.runtime.models import FAMILY_CONFIGS
from tests.runtime.router_cases import CONFIGS, OLMOE_SPLIT

LOSS = RouterLoss(coefficient=0.1, num_experts=8, top_k=3, recorders=())


def of_type(model_type: str, config: dict[str, Any]) -> RouterLoss:
    found = build_from_config(read_hub_config(model_type, config), Task.CAUSAL_LM, fused_attention=True)
    return router_loss_of(found)


def logits_of_layers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((40, 8), generator=generator).requires_grad_() for _ in range(3)]


def test_value_and_gradient_are_those_of_transformers() -> None:
    logits, own = logits_of_layers(), logits_of_layers()
    expected = load_balancing_loss_func(tuple(logits), 8, 3)
    expected.backward()
    statistics = torch.stack([LOSS.statistics(each) for each in own]).sum(dim=0)
    value, gradient = LOSS.value(statistics.detach())
    statistics.backward(gradient)
    torch.testing.assert_close(value, expected.detach())
    for each, other in zip(own, logits, strict=True):
        torch.testing.assert_close(each.grad, other.grad)


def test_even_routing_has_a_loss_of_as_many_as_a_token_takes_experts() -> None:
    value, _ = LOSS.value(torch.stack([torch.full((8,), 15.0), torch.full((8,), 5.0)]))
    assert value.item() == pytest.approx(3.0)


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2_moe", "qwen3_next"])
def test_models_whose_code_is_mixtrals_have_the_loss(model_type: str) -> None:
    found = of_type(model_type, SPLIT_CONFIGS[model_type])
    assert (found.num_experts, found.top_k, found.coefficient) == (4, 2, 0.001)


def test_a_model_that_transformers_trains_without_such_a_loss_is_refused() -> None:
    with pytest.raises(
        InvalidModelError, match=r"(?s)output_router_logits: found true for deepseek_v3.*no router loss"
    ):
        of_type("deepseek_v3", FAMILY_CONFIGS["deepseek_v3"])


def test_a_model_with_another_loss_of_its_routers_is_refused() -> None:
    with pytest.raises(InvalidModelError, match=r"(?s)found true for jetmoe.*a router loss that differs"):
        of_type("jetmoe", {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8})


def test_tp_that_leaves_experts_whole_is_refused() -> None:
    config = read_hub_config("mixtral", CONFIGS["mixtral"])
    block = build_from_config(config, Task.CAUSAL_LM, fused_attention=True).model.layers[0]
    check_routers(block, parse_strategy("fsdp4"))
    with pytest.raises(InvalidPlanError, match="parallel: found fsdp2-tp2 for layers with a router loss"):
        check_routers(block, parse_strategy("fsdp2-tp2"))


@pytest.mark.slow
def test_the_split_of_the_parity_cases_is_what_splitting_finds() -> None:
    assert split_model("olmoe", CONFIGS["olmoe"]) == OLMOE_SPLIT
