"""Tests of the shapes of products and attention in a trace."""

import pytest

from steelyard.errors import InvalidModelError
from steelyard.profiles.profile import LayerProfile, Work
from steelyard.profiles.shapes import AttentionCall, Product
from steelyard.tracer.counting import SeenProduct
from steelyard.tracer.trace import folded_products
from tests.shapes import tp_shape
from tests.tracer.examples import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, SEQ_LEN, VOCAB
from tests.tracer.traces import FAMILIES, traced, traced_family

KEYS = KV_HEADS * HEAD_DIM


def block(family: str = "llama", tp: int = 1, *, sp: bool = False) -> LayerProfile:
    found = traced(family, "bf16").layer("block", tp_shape(tp, sp))
    assert found is not None
    return found


def sizes(work: Work) -> dict[tuple[float, float, float], int]:
    return {(each.m, each.n, each.k): each.count for each in work.products}


def works(layer: LayerProfile) -> list[Work]:
    return [layer.forward, layer.backward, *(each.work for each in layer.recomputations)]


@pytest.mark.slow
def test_a_block_multiplies_the_tokens_of_a_sample_by_each_of_its_matrices() -> None:
    assert sizes(block().forward) == {
        (SEQ_LEN, HIDDEN, HIDDEN): 2,
        (SEQ_LEN, KEYS, HIDDEN): 2,
        (SEQ_LEN, FFN, HIDDEN): 2,
        (SEQ_LEN, HIDDEN, FFN): 1,
    }
    assert {each.grows for each in block().forward.products} == {"m"}


def test_a_gradient_of_weights_grows_by_the_dim_that_is_summed() -> None:
    gradients = [each for each in block().backward.products if each.grows == "k"]
    assert sum(each.count for each in gradients) == 7
    assert {each.k for each in gradients} == {SEQ_LEN}


def test_tensor_parallelism_halves_one_width_of_every_product() -> None:
    assert sizes(block(tp=2).forward) == {
        (SEQ_LEN, HIDDEN / 2, HIDDEN): 1,
        (SEQ_LEN, KEYS / 2, HIDDEN): 2,
        (SEQ_LEN, HIDDEN, HIDDEN / 2): 1,
        (SEQ_LEN, FFN / 2, HIDDEN): 2,
        (SEQ_LEN, HIDDEN, FFN / 2): 1,
    }


def test_attention_is_kept_by_heads_and_direction() -> None:
    forward = AttentionCall(heads=HEADS / 2, head_dim=HEAD_DIM, queries=SEQ_LEN, keys=SEQ_LEN, is_causal=True)
    layer = block(tp=2)
    assert layer.forward.attention == (forward,)
    assert layer.backward.attention == (forward.model_copy(update={"backward": True}),)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("samples", [1, 5])
def test_shapes_account_for_all_flop(family: str, samples: int) -> None:
    for layer in traced(family, "bf16").layers:
        for work in works(layer):
            assert sum(each.flop(samples) for each in work.products) == pytest.approx(work.matmul_flop.at(samples))
            assert sum(each.flop(samples) for each in work.attention) == pytest.approx(work.attention_flop.at(samples))


def test_the_head_multiplies_by_the_vocabulary() -> None:
    head = traced("llama", "bf16").layer("head", {})
    assert head is not None
    assert sizes(head.forward) == {(SEQ_LEN, VOCAB, HIDDEN): 1}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_one_product_of_groups_and_over_two_ranks_of_half_as_many_on_twice_the_rows(family: str) -> None:
    layer = next(each for each in traced_family(family).layers if each.divided_experts and not each.degrees)
    whole = [each for each in layer.forward.products if each.groups > 1]
    halved = [each for each in layer.with_divided_experts(2, 1.0).forward.products if each.groups > 1]
    assert whole
    for each, on_a_rank in zip(whole, halved, strict=True):
        assert (on_a_rank.groups, on_a_rank.m) == (each.groups / 2, each.m * 2)
        assert on_a_rank.flop(3) == pytest.approx(each.flop(3))


@pytest.mark.slow
def test_a_rank_with_more_pairs_has_more_rows_of_each_expert() -> None:
    layer = next(each for each in traced_family("mixtral").layers if each.divided_experts and not each.degrees)
    even, uneven = (layer.with_divided_experts(2, imbalance).backward.products for imbalance in (1.0, 1.5))
    for each, more in zip(even, uneven, strict=True):
        assert more.flop(1) == pytest.approx((1.5 if each.groups > 1 else 1.0) * each.flop(1))


def test_equal_products_are_one_with_a_count() -> None:
    few, many = ([SeenProduct(groups=1, m=samples * 8, n=4, k=2)] * 3 for samples in (2, 8))
    assert folded_products(few, many, samples=(2, 8)) == (Product(m=8, n=4, k=2, count=3, grows="m"),)


def test_products_of_a_loop_over_samples_are_as_many_for_each() -> None:
    whole, one = SeenProduct(groups=1, m=8, n=4, k=2), SeenProduct(groups=1, m=3, n=5, k=7)
    products = folded_products([whole] + [one] * 4, [whole] + [one] * 16, samples=(2, 8))
    assert products[0] == Product(m=3, n=5, k=7, count=2, grows="groups")
    assert len(products) == 2


def test_a_product_that_no_sample_touches_grows_by_none() -> None:
    seen = [SeenProduct(groups=1, m=8, n=4, k=2)]
    (product,) = folded_products(seen, seen, samples=(2, 8))
    assert product.grows is None
    assert product.flop(1) == product.flop(9) == 2 * 8 * 4 * 2


def test_other_products_for_more_samples_are_an_error() -> None:
    seen = [SeenProduct(groups=1, m=8, n=4, k=2)]
    with pytest.raises(InvalidModelError, match="1 products for 2 samples, 2 for 8"):
        folded_products(seen, seen * 2, samples=(2, 8))
