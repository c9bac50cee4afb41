"""Attention with sinks in a fused kernel: transformers' eager attention, for every model type that has it."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.engines import check_model
from steelyard.engines.deepspeed import DEEPSPEED
from steelyard.errors import UserError
from steelyard.model.family import SINKS, Task
from steelyard.model.read import chain_from_config, load_model
from steelyard.modules.build import build_from_config, read_hub_config
from steelyard.modules.context_attention import IMPLEMENTATION

SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "v_head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    "vocab_size": 128,
    "sliding_window": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOKENS = 24
"""More than a window: full and sliding layers."""


def of(model: nn.Module, attention: str, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients by parameter."""
    model.zero_grad()
    model.set_attn_implementation(attention)
    found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    return found.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "padded"), [*((each, False) for each in sorted(SINKS)), ("gpt_oss", True)])
def test_results_and_gradients_are_those_of_eager_attention(model_type: str, padded: bool) -> None:
    config = read_hub_config(model_type, SIZES)
    model = build_from_config(config, Task.CAUSAL_LM, fused_attention=True).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    sinks = [each for name, each in model.named_parameters() if name.endswith("sinks")]
    assert sinks
    for each in sinks:
        nn.init.normal_(each, std=2)
    ids = torch.randint(128, (2, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    expected, gradients = of(model, "eager", ids, mask if padded else None)
    found, own = of(model, IMPLEMENTATION, ids, mask if padded else None)
    seen = mask.bool() if padded else torch.ones_like(ids, dtype=torch.bool)
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-5)
    if not padded:  # what padding itself attends to is not defined
        for name, each in gradients.items():
            torch.testing.assert_close(own[name], each, rtol=1e-3, atol=1e-4, msg=name)


def test_a_chain_says_that_sinks_are_fused_and_not_divided() -> None:
    chain = load_model("gpt-oss-20b")
    assert chain.family.fuses_sinks
    assert {each.no_cp for each in chain.layer_types} == {"its attention has sinks"}
    eager = chain_from_config({**chain.config, "attn_implementation": "eager"}, name="eager", split=chain.split)
    assert not eager.family.fuses_sinks
    check_model(DEEPSPEED, eager, 4096)
    with pytest.raises(UserError, match=r"(?s)whose attention has sinks.*attn_implementation"):
        check_model(DEEPSPEED, chain, 4096)
