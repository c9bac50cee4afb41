"""Tests of what remat choices keep and repeat, against closed forms and PyTorch's own checkpoints."""

from dataclasses import replace

import pytest
import torch

from steelyard.modules.build import build_meta_model, build_model
from steelyard.modules.layers import LayerContext, build_layer, shared_inputs_of
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.profiles.profile import LayerProfile, Recomputation
from steelyard.tracer.layer import TracedLayer, fake_layer, fake_world, observe, run_layer, shared_inputs
from tests.shapes import tp_shape
from tests.tracer.examples import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, SEQ_LEN
from tests.tracer.traces import FAMILIES, known, traced

CASES = [(family, tp, sp) for family in FAMILIES for tp, sp in ((1, False), (2, False), (2, True))]
cases = pytest.mark.parametrize(("family", "tp", "sp"), CASES)
SAMPLES = 3


def layer(family: str, tp: int = 1, sp: bool = False, layer_type: str = "block") -> LayerProfile:
    found = traced(family, "bf16").layer(layer_type, tp_shape(tp, sp))
    assert found is not None
    return found


def under(remat: str, family: str, tp: int = 1, sp: bool = False, layer_type: str = "block") -> Recomputation:
    return layer(family, tp, sp, layer_type).recomputation(remat)


def calls(again: Recomputation) -> dict[str, int]:
    return {each.kind: each.count for each in again.collectives}


@pytest.mark.slow
@cases
def test_selective_keeps_less_than_none_and_more_than_full(family: str, tp: int, sp: bool) -> None:
    kept = [
        under("full", family, tp, sp).saved_bytes.at(SAMPLES),
        under("selective", family, tp, sp).saved_bytes.at(SAMPLES),
        layer(family, tp, sp).saved_bytes.at(SAMPLES),
    ]
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.slow
@cases
def test_selective_repeats_no_matrix_product_and_no_attention(family: str, tp: int, sp: bool) -> None:
    work = under("selective", family, tp, sp).work
    assert work.matmul_flop.at(SAMPLES) == work.attention_flop.at(SAMPLES) == work.matmul_bytes.at(SAMPLES) == 0


@pytest.mark.slow
@cases
def test_selective_repeats_no_more_traffic_than_the_forward_pass_makes(family: str, tp: int, sp: bool) -> None:
    again, forward = under("selective", family, tp, sp).work, layer(family, tp, sp).forward
    assert 0 < again.memory_bytes.at(SAMPLES) <= forward.memory_bytes.at(SAMPLES)
    assert 0 < again.num_kernels < forward.num_kernels


@pytest.mark.slow
def test_selective_gathers_again_and_reduces_nothing_again() -> None:
    assert calls(under("selective", "llama", 2)) == {}
    assert calls(under("selective", "llama", 2, True)) == {"all_gather": 2}


@pytest.mark.slow
def test_full_repeats_all_collectives_but_the_last_reduction() -> None:
    assert calls(under("full", "llama", 2)) == {"all_reduce": 1}
    assert calls(under("full", "llama", 2, True)) == {"all_gather": 2, "reduce_scatter": 1}


@pytest.mark.slow
def test_full_repeats_all_products_but_the_last() -> None:
    again = under("full", "llama").work
    products = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 2 * HIDDEN * FFN
    assert again.matmul_flop.at(SAMPLES) == 2 * products * SAMPLES * SEQ_LEN
    assert again.attention_flop.at(SAMPLES) == layer("llama").forward.attention_flop.at(SAMPLES)


@pytest.mark.slow
@cases
def test_full_keeps_the_input_alone(family: str, tp: int, sp: bool) -> None:
    assert under("full", family, tp, sp).saved_bytes.at(SAMPLES) == layer(family, tp, sp).input_bytes.at(SAMPLES)


@pytest.mark.slow
def test_selective_keeps_the_input_and_the_results_of_products_and_attention() -> None:
    """Per token, with h hidden, f FFN width, g = KV heads × head size and a heads, in bf16:

    input 2h; query 2h, key and value 2g each; attention's result 2h and its log-sum-exp 4a; output 2h; gate and up 2f
    each; down 2h.
    """
    h, f, g, a = HIDDEN, FFN, KV_HEADS * HEAD_DIM, HEADS
    per_token = 2 * h + (2 * h + 2 * 2 * g) + (2 * h + 4 * a) + 2 * h + 2 * 2 * f + 2 * h
    assert under("selective", "llama").saved_bytes.at(SAMPLES) == SAMPLES * SEQ_LEN * per_token


@pytest.mark.parametrize("layer_type", ["embedding", "head"])
def test_selective_is_for_blocks(layer_type: str) -> None:
    assert [entry.remat for entry in layer("llama", layer_type=layer_type).recomputations] == ["full"]


@pytest.mark.slow
@pytest.mark.parametrize("layer_type", ["embedding", "block", "head"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_full_is_what_a_real_checkpoint_repeats_and_bounds_what_it_holds(layer_type: str, tp: int, sp: bool) -> None:
    """The tracer derives full remat from the run without remat; here the layer is run under it."""
    chain = known("llama")
    index = {"embedding": 0, "block": 1, "head": chain.num_layers - 1}[layer_type]
    with fake_world(tp) as mesh:
        model = build_meta_model(chain)
        strategy = parse_strategy("single" if mesh.size() == 1 else f"tp{mesh.size()}" + "+sp" * sp)
        where = TracedLayer(
            chain=chain, layer=index, seq_len=SEQ_LEN, precision="bf16", mesh=mesh, strategy=strategy, model=model
        )
        derived = observe(where, (SAMPLES,))[0].recomputed[Remat.FULL]
        with fake_layer(where) as under_test:
            side = shared_inputs(where, under_test)
            plain = run_layer(where, under_test, SAMPLES, side)
            under_test.remat = Remat.FULL
            real = run_layer(where, under_test, SAMPLES, side)
    repeated = real.backward.beyond(plain.backward)
    assert sorted(repeated.products) == sorted(derived.work.products), "in the order of a forward pass or another"
    assert replace(repeated, products=derived.work.products) == derived.work
    assert real.saved_bytes == derived.saved_bytes
    assert real.forward_peak_bytes - real.saved_bytes <= derived.forward_transient_bytes
    assert real.backward_peak_bytes - real.saved_bytes <= derived.backward_transient_bytes


def test_under_selective_a_real_block_computes_the_same_gradients() -> None:
    """Recomputed real tensors equal the original ones."""
    torch.manual_seed(0)
    chain = known("llama")
    model = build_model(chain, seed=0)
    side = shared_inputs_of([build_layer(model, chain, 1, Remat.NONE)], model, chain, torch.device("cpu"))
    context = LayerContext(side=side(SEQ_LEN, torch.float32, torch.device("cpu")))
    found = []
    inputs = torch.randn(2, SEQ_LEN, HIDDEN)
    for remat in Remat:
        block = build_layer(model, chain, 1, remat)
        block.zero_grad()
        entering = inputs.clone().requires_grad_()
        block(entering, context).square().sum().backward()
        found.append([entering.grad, *(parameter.grad.clone() for parameter in block.parameters())])
    for other in found[1:]:
        for expected, mine in zip(found[0], other, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)
