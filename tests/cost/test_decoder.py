"""Tests of closed forms of decoders: against traces without fused kernels, and against counts by hand with them."""

from dataclasses import replace
from functools import cache

import pytest

from steelyard.cost.decoder import MISALIGNED_RATE, DecoderShape, decoder_layer
from steelyard.cost.job import DeviceGroup, Job
from steelyard.cost.kernels import job_under
from steelyard.engines.accelerate import ACCELERATE
from steelyard.engines.deepspeed import DEEPSPEED
from steelyard.engines.engine import Engine
from steelyard.engines.execution import EAGER, FUSED, Kernels, Module
from steelyard.engines.megatron import MEGATRON
from steelyard.engines.native import NATIVE
from steelyard.engines.torchtitan import TORCHTITAN
from steelyard.hardware import parse_cluster
from steelyard.levers import Levers
from steelyard.model.chain import LayerRole, LayerType
from steelyard.model.read import load_model
from steelyard.profiles.profile import LayerProfile, Profile
from steelyard.tracer.cache import packaged_trace
from tests.jobs import make_job

SEQ_LEN = 2048
TRACED = replace(EAGER, norm=False, full="until last needed")
"""Kernels of transformers' Llama on torch 2.13."""
OF_LLAMAS_FORM = ("llama2-7b", "llama3-70b", "mistral-7b", "qwen2.5-1.5b", "qwen3-0.6b", "qwen3-32b", "llama3-8b")
OTHERS = ("mixtral-8x22b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "gpt-neox-20b", "starcoder2-3b", "phi-4")
SHAPE = DecoderShape(
    hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=256, gated=True, vocab=512, seq_len=32, rotary=True
)
BLOCK = LayerType(name="block", role=LayerRole.BLOCK)
HEAD = LayerType(name="head", role=LayerRole.HEAD)


@cache
def traced(name: str) -> Profile:
    found = packaged_trace(load_model(name), seq_len=SEQ_LEN, precision="bf16", degrees=(1, 2))
    assert found is not None
    return found


def closed(name: str, layer: LayerProfile, kernels: Kernels = TRACED) -> LayerProfile:
    chain = load_model(name)
    layer_type = next(each for each in chain.layer_types if each.name == layer.kind)
    tp, sp = layer.degrees.get("tp", 1), "sp" in layer.degrees
    shape = DecoderShape.of(chain, SEQ_LEN)
    assert shape is not None
    return decoder_layer(shape, kernels, layer_type, tp=tp, sp=sp)


def block(kernels: Kernels, *, tp: int = 1, sp: bool = False, **changed: object) -> LayerProfile:
    return decoder_layer(replace(SHAPE, **changed), kernels, BLOCK, tp=tp, sp=sp)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OF_LLAMAS_FORM)
def test_without_fused_kernels_a_block_is_as_it_was_traced(name: str) -> None:
    blocks = [layer for layer in traced(name).layers if "block" in layer.kind]
    assert len(blocks) > 1
    for layer in blocks:
        found = closed(name, layer)
        for direction in ("forward", "backward"):
            one, other = getattr(found, direction), getattr(layer, direction)
            for quantity in ("matmul_flop", "attention_flop", "matmul_bytes", "memory_bytes"):
                assert getattr(one, quantity).at(1) == pytest.approx(getattr(other, quantity).at(1), rel=0.02), quantity
        assert found.num_params == pytest.approx(layer.num_params, rel=1e-3)
        assert found.saved_bytes.at(1) == pytest.approx(layer.saved_bytes.at(1), rel=0.01)
        again, expected = (each.recomputation("full") for each in (found, layer))
        assert again.work.matmul_flop.at(1) == pytest.approx(expected.work.matmul_flop.at(1), rel=0.02)
        assert again.saved_bytes.at(1) == pytest.approx(expected.saved_bytes.at(1), rel=0.02)
        sent = [(each.kind, each.count, each.tensor_bytes) for each in found.forward_collectives]
        assert sent == [(each.kind, each.count, each.tensor_bytes) for each in layer.forward_collectives]


@pytest.mark.parametrize("name", OTHERS)
def test_sizes_are_read_from_configs_of_every_form(name: str) -> None:
    for layer in traced(name).layers:
        found = closed(name, layer)
        assert found.num_params == pytest.approx(layer.num_params, rel=0.01)
        assert found.expert_params == pytest.approx(layer.expert_params, rel=0.01)


@pytest.mark.parametrize(
    ("part", "forward", "backward", "kept"),
    [
        ("norm", 64 * 64, (172 + 18) * 64, 10 * 64),
        ("rotary", 16 * 96, 28 * 96, 0),
        ("activation", 4 * 256, 8 * 256, 512),
    ],
)
def test_a_fused_part_moves_and_keeps_so_much_less(part: str, forward: int, backward: int, kept: int) -> None:
    """Bytes of a token, of hidden size 64, 64 + 32 entries of queries and keys, feed-forward width 256."""
    one, other = (block(replace(TRACED, **{part: fused})) for fused in (False, True))  # type: ignore[arg-type]
    tokens = SHAPE.seq_len
    assert one.forward.memory_bytes.at(1) - other.forward.memory_bytes.at(1) == tokens * forward
    assert one.backward.memory_bytes.at(1) - other.backward.memory_bytes.at(1) == tokens * backward
    assert one.saved_bytes.at(1) - other.saved_bytes.at(1) == tokens * kept


def test_a_gathered_input_that_is_kept_takes_a_whole_sequence() -> None:
    """The inputs of two matmuls of a block: a rank of two keeps all of them, not its own half."""
    kept, part = (block(replace(FUSED, keeps_gathered=keeps), tp=2, sp=True) for keeps in (True, False))
    assert kept.saved_bytes.at(1) - part.saved_bytes.at(1) == 2 * 2 * SHAPE.hidden * SHAPE.seq_len / 2


@pytest.mark.parametrize(("entries", "aligned"), [(512, True), (504, True), (508, False), (510, False), (511, False)])
def test_a_head_whose_rows_begin_between_16_bytes_takes_longer(entries: int, aligned: bool) -> None:
    head = decoder_layer(replace(SHAPE, vocab=2 * entries), FUSED, HEAD, tp=2, sp=False)
    flop = 2 * SHAPE.seq_len * SHAPE.hidden * entries
    assert head.forward.matmul_flop.at(1) == pytest.approx(flop / (1 if aligned else MISALIGNED_RATE))


def test_a_loss_in_pieces_holds_the_logits_of_one_and_keeps_gradients_of_the_hidden_state() -> None:
    whole, pieces = (decoder_layer(SHAPE, replace(EAGER, loss_pieces=each), HEAD, tp=1, sp=False) for each in (1, 8))
    logits = SHAPE.seq_len * SHAPE.vocab
    gradients = 4 * SHAPE.seq_len * SHAPE.hidden
    assert whole.saved_bytes.at(1) - pieces.saved_bytes.at(1) == 4 * logits - gradients
    assert whole.forward_transient_bytes.at(1) == 8 * logits
    assert pieces.forward_transient_bytes.at(1) == 12 * logits / 8
    assert pieces.forward.matmul_flop == whole.forward.matmul_flop
    assert pieces.forward.num_kernels == 8 * whole.forward.num_kernels


def test_a_window_is_all_that_attention_computes() -> None:
    slides = replace(BLOCK, attention="sliding_attention")
    whole, window = (
        decoder_layer(replace(SHAPE, window=each), FUSED, slides, tp=1, sp=False).forward for each in (0, 4)
    )
    assert window.attention_flop.at(1) == 4 * 32 * 4 * 64  # two products, for each query and key seen, of all heads
    assert window.attention_flop.at(1) == sum(each.flop(1) for each in window.attention)
    assert whole.attention_flop.at(1) == window.attention_flop.at(1) * (32 / 2) / 4


def test_torchtitans_selective_remat_repeats_three_of_seven_products() -> None:
    kernels = TORCHTITAN.execution.kernels
    assert kernels is not None
    again = block(kernels).recomputation("selective")
    assert again.work.matmul_flop.at(1) == block(kernels).forward.matmul_flop.at(1) / 2
    assert again.saved_bytes.at(1) < block(kernels).saved_bytes.at(1)
    keeps_all = block(replace(kernels, selective="no matmul")).recomputation("selective")
    assert keeps_all.work.matmul_flop.at(1) == 0
    assert again.saved_bytes.at(1) < keeps_all.saved_bytes.at(1) < block(kernels).saved_bytes.at(1)


SAVED = {
    "core_attn": 4 * SHAPE.heads + 2 * 64,
    "layernorm": 2 * 2 * 64,
    "mla_up_proj": 0,
    "mlp": 3 * 2 * 256,
    "moe_act": 0,
}
"""Bytes of a token that go: statistics and output of attention; inputs of linear layers; three tensors of ``f``."""


@pytest.mark.parametrize("module", SAVED)
def test_a_module_that_is_computed_again_is_not_kept(module: Module) -> None:
    kept = block(FUSED).saved_bytes.at(1)
    again = block(replace(FUSED, selective=(module,))).recomputation("selective")
    both = block(replace(FUSED, selective=("core_attn", "layernorm", "mlp"))).recomputation("selective")
    assert kept - again.saved_bytes.at(1) == 32 * SAVED[module]
    assert kept - both.saved_bytes.at(1) == 32 * sum(SAVED.values())
    assert (again.work.num_kernels > 0) == (SAVED[module] > 0)
    assert again.work.matmul_flop.at(1) == (2 * 32 * 3 * 64 * 256 if module == "mlp" else 0)
    assert (again.work.attention_flop.at(1) > 0) == (module == "core_attn")


@pytest.mark.parametrize(("word", "gathers"), [("tensorwise", True), ("rowwise", False)])
def test_hidden_states_are_cast_before_they_are_gathered_if_a_tensor_has_one_scale(word: str, gathers: bool) -> None:
    """On each rank, its own tokens; a pass gathers one byte an entry instead of two, and scatters two."""
    low = Levers.of({"float8": word}).effects.low_precision
    assert low is not None
    lows = (low, replace(low, before_gather=False))
    cast, later = (decoder_layer(SHAPE, FUSED, BLOCK, tp=2, sp=True, low=each) for each in lows)
    both = 2 * 2 * SHAPE.hidden * SHAPE.seq_len
    for found in (cast.forward_collectives, cast.backward_collectives):
        sizes = {each.kind: each.tensor_bytes.at(1) / both for each in found}
        assert sizes.pop("all_reduce", 0.0) == (8 * found[-1].count / both if gathers else 0.0)
        assert sizes == {"all_gather": 0.5 if gathers else 1.0, "reduce_scatter": 1.0}
    fewer = later.forward.memory_bytes.at(1) - cast.forward.memory_bytes.at(1)
    assert fewer == (5 * 2 * SHAPE.hidden * SHAPE.seq_len / 2 if gathers else 0)


def test_a_feed_forward_part_that_is_computed_again_is_exchanged_again() -> None:
    again = block(replace(FUSED, selective=("mlp",)), tp=2, sp=True).recomputation("selective")
    assert [(each.kind, each.count) for each in again.collectives] == [("all_gather", 1), ("reduce_scatter", 1)]


def test_the_expansion_of_a_latent_is_computed_again_for_a_third_of_what_a_block_keeps() -> None:
    chain = load_model("deepseek-v3")
    shape = DecoderShape.of(chain, 4096)
    layer_type = next(each for each in chain.layer_types if each.num_experts)
    found = decoder_layer(shape, replace(FUSED, selective=("mla_up_proj",)), layer_type, tp=1, sp=False)
    again = found.recomputation("selective")
    q, kv = 128 * (128 + 64), 128 * (128 + 128)
    assert again.work.matmul_flop.at(1) == 2 * 4096 * (1536 * q + 512 * kv)
    entries = 128 * ((128 + 64 + 128) / 2)
    assert found.saved_bytes.at(1) - again.saved_bytes.at(1) == 4096 * 6 * entries


def job(name: str) -> Job:
    cluster = parse_cluster("1x8xh100-80gb")
    return Job(
        chain=load_model(name),
        groups=(DeviceGroup(profile=traced(name), cluster=cluster, budget_bytes=2**36),),
        seq_len=SEQ_LEN,
        global_batch=8,
        precision="bf16",
    )


def test_an_engine_with_its_own_modules_keeps_the_number_of_parameters() -> None:
    before, after = job("qwen2.5-1.5b"), job_under(job("qwen2.5-1.5b"), MEGATRON)
    for one, other in zip(before.profile.layers, after.profile.layers, strict=True):
        assert (one.num_params, one.degrees) == (other.num_params, other.degrees)
        if "block" in one.kind:
            assert other.saved_bytes.at(1) < one.saved_bytes.at(1)


@pytest.mark.parametrize("engine", [NATIVE, DEEPSPEED, ACCELERATE])
def test_engines_that_run_transformers_are_priced_as_traced(engine: Engine) -> None:
    assert job_under(job("llama2-7b"), engine).profile == traced("llama2-7b")


def test_a_model_of_another_form_stays_as_traced() -> None:
    """Falcon shares keys and values between heads, which its config does not say as others do."""
    assert job_under(job("falcon-7b"), MEGATRON).profile == traced("falcon-7b")


def test_what_was_measured_stays_as_it_was() -> None:
    identity = traced("llama2-7b").identity.model_copy(update={"method": "measured", "num_devices": 8})
    measured = job("llama2-7b").on(profile=traced("llama2-7b").model_copy(update={"identity": identity}))
    assert job_under(measured, MEGATRON).profile == measured.profile


@pytest.mark.slow
@pytest.mark.parametrize("text", ["lora:r=8", "lora:r=8,targets=q_proj+k_proj+v_proj+o_proj"])
def test_a_block_with_adapters_is_as_it_was_traced(text: str) -> None:
    """The smaller work of the first block after a frozen embedding is not modelled."""
    traced = make_job("llama-demo", "1x2xh100-80gb", global_batch=8, seq_len=256, levers={"train": text})
    shape, layer_types = DecoderShape.of(traced.chain, 256), {each.name: each for each in traced.chain.layer_types}
    assert shape is not None
    layers = [
        each for each in traced.profile.layers if each.kind == "block, partly frozen" and "sp" not in each.degrees
    ]
    assert len(layers) == 2
    for layer in layers:
        tp, adapters = layer.degrees.get("tp", 1), traced.effects.adapters
        found = decoder_layer(shape, TRACED, layer_types[layer.kind], tp=tp, sp=False, adapters=adapters)
        assert (found.num_params, found.frozen_params) == (layer.num_params, layer.frozen_params)
        for direction in ("forward", "backward"):
            one, other = getattr(found, direction), getattr(layer, direction)
            for quantity, rel in (("matmul_flop", 1e-3), ("attention_flop", 1e-3), ("matmul_bytes", 0.01)):
                assert getattr(one, quantity).at(1) == pytest.approx(getattr(other, quantity).at(1), rel=rel), quantity
            assert one.memory_bytes.at(1) == pytest.approx(other.memory_bytes.at(1), rel=0.06)
        assert 1 <= found.saved_bytes.at(1) / layer.saved_bytes.at(1) < 1.2


@pytest.mark.slow
def test_an_engine_with_its_own_modules_has_adapters_in_closed_form() -> None:
    asked = {"cluster": "1x2xh100-80gb", "global_batch": 8, "seq_len": 256, "engine": "megatron-bridge"}
    adapters = {"train": "lora:r=8,targets=q_proj+k_proj+v_proj+o_proj"}
    plain, with_lora = make_job("llama-demo", **asked), make_job("llama-demo", **asked, levers=adapters)
    one, other = plain.profile.layers[1], with_lora.profile.layers[2]
    assert with_lora.execution.kernels is not None
    assert other.frozen_params == one.num_params < other.num_params
    assert other.backward.matmul_flop.at(1) < 0.6 * one.backward.matmul_flop.at(1)
    assert other.saved_bytes.at(1) < one.saved_bytes.at(1)
