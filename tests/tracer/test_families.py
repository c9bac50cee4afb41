"""Tests of traces of every family against closed forms: matrix products, parameters, and unused experts."""

from functools import cache

import pytest

from steelyard.model.chain import LayerRole
from steelyard.modules.build import build_meta_model, layer_modules, prepare_model
from steelyard.tracer.trace import trace
from tests.runtime.family_chain import chain_of, length_of
from tests.runtime.models import FAMILY_CONFIGS
from tests.sample import FAMILIES, sampled
from tests.shapes import tp_shape
from tests.tracer.traces import DIVIDED
from tests.tracer.traces import traced_family as traced

pytestmark = pytest.mark.slow

families = pytest.mark.parametrize("name", sampled(FAMILY_CONFIGS, FAMILIES))


@cache
def modules_of_types(name: str) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the parameters of the last layer of each type."""
    chain = chain_of(name)
    model = build_meta_model(chain)
    prepare_model(model, chain)
    return {
        chain.type_of(layer).name: [
            (f"{path}.{key}", tuple(parameter.shape))
            for path, module in layer_modules(model, chain, layer).items()
            for key, parameter in module.named_parameters()
        ]
        for layer in range(chain.num_layers)
    }


def entries(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@families
def test_parameters_of_each_type_are_those_of_the_real_module(name: str) -> None:
    for layer_type, parameters in modules_of_types(name).items():
        found = traced(name).layer(layer_type, tp_shape(1, False))
        assert found is not None
        assert found.num_params == sum(entries(shape) for _, shape in parameters)


def matrix_entries(name: str, parameters: list[tuple[str, tuple[int, ...]]]) -> float:
    """Entries that a token is multiplied by: of experts, those of the share that it takes."""
    total = 0.0
    config = FAMILY_CONFIGS[name]
    for path, shape in parameters:
        if "relative" in path or path.endswith(".bias") or len(shape) < 2:
            continue
        taken = 1.0
        if ".experts." in path:
            number = next(
                config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config
            )
            taken = config["num_experts_per_tok"] / number
        total += entries(shape) * taken
    return total


@families
def test_a_block_takes_two_flop_per_matrix_entry_and_token_forward_and_four_backward(name: str) -> None:
    chain = chain_of(name)
    for index, layer_type in enumerate(chain.layer_types):
        if layer_type.role is not LayerRole.BLOCK:
            continue
        layer = chain.layers.index(index)
        tokens = chain.hidden_shape(layer, length_of(chain))[0]
        found = traced(name).layer(layer_type.name, tp_shape(1, False))
        assert found is not None
        forward = 2 * matrix_entries(name, modules_of_types(name)[layer_type.name]) * tokens * 3
        steps = 3 * step_by_step_flop(name, layer_type.name)
        assert found.forward.matmul_flop.at(3) == forward + steps
        assert found.backward.matmul_flop.at(3) == 2 * (forward + steps)


def step_by_step_flop(name: str, layer_type: str) -> int:
    """Scores and values of attention without a fused kernel, 4·S²·width, in Swin by windows of 16 patches.

    Gemma 2 caps scores; T5's and Swin's learned bias has a gradient, which no fused kernel of the CPU makes. T5's
    attention of a decoder to its encoder has no bias.
    """
    square = 4 * 16**2 * 32
    if name == "swin":
        return {
            **dict.fromkeys(("block of kind 1", "block of kind 2"), 4 * 64 * 16 * 8),
            "block of kind 4": 4 * 16 * 16 * 16,
        }.get(layer_type, 0)
    return square if name in ("gemma2", "t5") else 0


def test_fused_attention_counts_what_each_family_attends_to() -> None:
    """4·S²·width of scores and values: half where a kernel is causal; of T5 the decoder's look at its encoder."""
    square = 4 * 16**2 * 32
    expected = {
        ("gpt2", "block"): square / 2,
        ("bert", "block"): square,
        ("vit", "block"): 4 * 17**2 * 32,
        ("t5", "encoder block"): 0,
        ("t5", "decoder block"): square,
        ("swin", "block of kind 1"): 0,
        ("deepseek_v3", "sparse block"): 4 * 16**2 * 4 * 16 / 2,  # values padded from 4 to the 16 entries of a key
    }
    for (name, layer_type), flop in expected.items():
        found = traced(name).layer(layer_type, tp_shape(1, False))
        assert found is not None
        assert (layer_type, found.forward.attention_flop.at(1)) == (layer_type, flop)


@pytest.mark.parametrize("name", DIVIDED)
def test_tp_divides_the_flop_of_blocks_exactly(name: str) -> None:
    chain = chain_of(name)
    for layer_type in chain.layer_types:
        whole, part = (
            traced(name).layer(layer_type.name, tp_shape(1, False)),
            traced(name).layer(layer_type.name, tp_shape(2, False)),
        )
        if part is None or whole is None or layer_type.role is not LayerRole.BLOCK:
            continue
        routed = sum(entries(shape) for path, shape in modules_of_types(name)[layer_type.name] if "gate.weight" in path)
        shared = 2 * routed * 16 * 3  # every rank routes all tokens
        assert part.forward.matmul_flop.at(3) - shared == (whole.forward.matmul_flop.at(3) - shared) / 2
        assert part.forward.attention_flop.at(3) == whole.forward.attention_flop.at(3) / 2


def test_experts_are_divided_in_memory_too() -> None:
    whole, part = (traced("mixtral").layer("block", tp_shape(tp, False)) for tp in (1, 2))
    assert whole is not None
    assert part is not None
    parameters = modules_of_types("mixtral")["block"]
    kept = sum(entries(shape) for path, shape in parameters if "norm" in path or "gate.weight" in path)
    assert part.num_params == kept + (whole.num_params - kept) // 2


def test_the_matrix_of_query_key_and_value_of_gpt2_is_divided_by_heads() -> None:
    part = traced("gpt2").layer("block", tp_shape(2, False))
    assert part is not None
    assert {each.kind for each in part.backward_collectives} == {"all_reduce"}
    whole = sum(entries(shape) for _, shape in modules_of_types("gpt2")["block"])
    divided = whole - 4 * 32 - 2 * 32  # norms, and the biases of both row-divided matrices
    assert part.num_params == whole - divided // 2


def test_ranks_that_share_a_key_value_head_store_its_matrices_whole_and_sum_their_gradients() -> None:
    profile = trace(chain_of("mistral with one key-value head"), seq_len=16, precision="bf16", degrees=(1, 2))
    alone, shared = (profile.layer("block", tp_shape(degree, False)) for degree in (1, 2))
    assert alone is not None
    assert shared is not None
    keys_and_values, norms = 2 * 32 * 8, 2 * 32
    divided = alone.num_params - keys_and_values - norms
    assert shared.num_params == alone.num_params - divided // 2
    sums = sum(each.count for each in shared.backward_collectives if each.kind == "all_reduce")
    assert sums == 2 + 2  # of the hidden state before attention and feed-forward part; of both matrices


def test_work_of_a_token_does_not_grow_with_the_number_of_experts() -> None:
    from steelyard.model.read import chain_from_config

    many = chain_from_config({**FAMILY_CONFIGS["mixtral"], "num_local_experts": 8}, name="many")
    found = trace(many, seq_len=16, precision="bf16", degrees=(1,)).layer("block", tp_shape(1, False))
    few = traced("mixtral").layer("block", tp_shape(1, False))
    assert found is not None
    assert few is not None
    router = 2 * 4 * 32 * 16  # four more outputs of the router
    assert found.forward.matmul_flop.at(1) == few.forward.matmul_flop.at(1) + router
    assert found.num_params > few.num_params
