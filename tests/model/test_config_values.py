"""Tests that config values that no model can be built with are named before anything is built."""

import json
from importlib import resources
from typing import Any

import pytest

from steelyard.errors import InvalidModelError
from steelyard.limits import MOST_LAYERS
from steelyard.model.read import ACTIVATIONS, DTYPES, chain_from_config, check_values


def config(name: str = "llama-demo", **changes: Any) -> dict[str, Any]:
    content = json.loads((resources.files("steelyard.model") / "configs" / f"{name}.json").read_text())
    return content | changes


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention_bias", "yes", "true or false"),
        ("attention_bias", None, "true or false"),
        ("rope_theta", None, "a number above 0"),
        ("rope_theta", float("inf"), "a number above 0"),
        ("rms_norm_eps", -1, "a number above 0"),
        ("rms_norm_eps", True, "a number above 0"),
        ("attention_dropout", 2.0, "a number from 0 to 1"),
        ("hidden_act", 3, "one of gelu"),
        ("hidden_act", "silo", "did you mean silu"),
        ("dtype", "float99", "one of bfloat16"),
        ("torch_dtype", 3, "one of bfloat16"),
        ("rope_scaling", 3, "an object"),
        ("mlp_only_layers", "x", "a list"),
        ("architectures", 5, "a list of class names"),
        ("architectures", [{"a": 1}], "a list of class names"),
        ("num_hidden_layers", 10**9, f"at most {MOST_LAYERS}"),
        ("hidden_size", 10**12, "at most"),
    ],
)
def test_a_value_of_the_wrong_sort_is_named(key: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidModelError, match=rf"(?s)^{key}: found .*{expected}"):
        chain_from_config(config(**{key: value}), name="wrong")


def test_positions_that_are_a_whole_number_are_one() -> None:
    check_values(config(max_position_embeddings=1200.0))
    with pytest.raises(InvalidModelError, match=r"max_position_embeddings: found 1200\.5"):
        check_values(config(max_position_embeddings=1200.5))


@pytest.mark.parametrize(("name", "experts"), [("qwen3-30b-a3b", 128), ("mixtral-8x22b", 8), ("deepseek-v3", 256)])
@pytest.mark.parametrize("change", [1, 10**6])
def test_more_experts_of_a_token_than_there_are_is_named(name: str, experts: int, change: int) -> None:
    check_values(config(name, num_experts_per_tok=experts))
    with pytest.raises(InvalidModelError, match=f"num_experts_per_tok: .*\n.*at most the {experts} experts"):
        check_values(config(name, num_experts_per_tok=experts + change))


@pytest.mark.slow
@pytest.mark.parametrize(("value", "is_trained"), [(True, True), (False, False)])
def test_the_auxiliary_loss_of_routers_is_trained_where_the_config_asks_for_it(value: bool, is_trained: bool) -> None:
    chain = chain_from_config(config("mixtral-8x7b", output_router_logits=value), name="mixtral")
    assert chain.trains_routers is is_trained


def test_what_asks_for_the_loss_of_routers_is_true_or_false() -> None:
    with pytest.raises(InvalidModelError, match=r"(?s)^output_router_logits: found 1.*true or false, or null"):
        chain_from_config(config("mixtral-8x7b", output_router_logits=1), name="mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["dtype", "rope_scaling", "sliding_window"])
def test_a_null_where_transformers_takes_one_is_no_mistake(key: str) -> None:
    assert chain_from_config(config(**{key: None}), name="fine").num_layers == 10


def test_activations_and_types_are_those_of_transformers() -> None:
    import torch
    from transformers.activations import ACT2FN

    assert set(ACTIVATIONS) == set(ACT2FN)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"initializer_range": "x"}, "initializer_range"),
        ({"rope_scaling": {"type": "x"}}, "KeyError"),
        ({"pad_token_id": 10**9}, "AssertionError"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "not supported"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_transformers_cannot_build_is_the_configs_mistake(changes: dict[str, Any], found: str) -> None:
    from steelyard.modules.build import build_meta_model

    with pytest.raises(InvalidModelError, match=f"^config: found .*{found}"):
        build_meta_model(chain_from_config(config(**changes), name="wrong"))
