"""Tests of each rule for strategies of a layer, with its reason in words."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.model.chain import LayerRole, LayerType
from steelyard.plan.dimensions.dimension import Batch
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.search import SpaceOptions, enumerate_strategies

BLOCK = LayerType(
    name="block",
    role=LayerRole.BLOCK,
    tp_divides=(("attention heads", 8), ("key-value heads", 4), ("feed-forward width", 12)),
)
HEAD = LayerType(name="head", role=LayerRole.HEAD, tp_divides=(("vocabulary", 99),))
STRATEGIES = [
    s for count in (1, 2, 3, 4, 6, 8, 12) for s in enumerate_strategies(count, SpaceOptions(aligned_only=False))
]


def reason(text, layer_type=BLOCK, *, samples=8, seq_len=64):
    return illegal_reason(layer_type, parse_strategy(text), Batch(microbatch_samples=samples, seq_len=seq_len))


@pytest.mark.parametrize("text", ["single", "dp8", "fsdp4-tp2", "tp4+sp", "tp2-dp4 remat=full"])
def test_a_strategy_that_divides_everything_is_legal(text):
    assert reason(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp3", "data degree 3 (dp3) does not divide the 8 samples of a microbatch"),
        ("fsdp16", "data degree 16 (fsdp16) does not divide the 8 samples of a microbatch"),
        ("tp3", "tp 3 does not divide the 8 attention heads"),
    ],
)
def test_an_illegal_degree_is_named_with_what_it_should_divide(text, expected):
    assert reason(text) == expected


def test_heads_that_ranks_may_share_divide_the_degree_or_are_divided():
    text = "key-value heads"
    shares = LayerType(name="block", role=LayerRole.BLOCK, tp_divides=((text, 4),), tp_shares=(text,))
    assert [reason(each, shares) for each in ("tp2", "tp8", "tp16")] == [None] * 3
    assert reason("tp6", shares) == "tp 6 does not divide the 4 key-value heads"
    assert reason("tp8", replace(shares, tp_shares=())) == "tp 8 does not divide the 4 key-value heads"


def test_the_feed_forward_width_must_be_divided():
    narrow = LayerType(name="block", role=LayerRole.BLOCK, tp_divides=(("feed-forward width", 13),))
    assert reason("tp2", narrow) == "tp 2 does not divide the 13 feed-forward width entries"


def test_the_vocabulary_must_be_divided():
    assert reason("tp2", HEAD) == "tp 2 does not divide the 99 vocabulary entries"


def test_sp_must_divide_the_sequence():
    assert reason("tp4+sp", seq_len=66) == "sp over 4 ranks does not divide the sequence length 66"


def test_the_sequence_is_free_without_sp():
    assert reason("tp4", seq_len=66) is None


def test_levels_must_be_runs_of_the_mesh():
    assert reason("dp2-tp3", HEAD, samples=2) == "the levels of dp2-tp3 are not consecutive axes of the stage mesh"


@given(st.sampled_from(STRATEGIES), st.integers(1, 24), st.integers(1, 24))
def test_nothing_is_ever_rounded(strategy, samples, seq_len):
    whole = (
        samples % strategy.sample_degree == 0
        and all(size % strategy.tensor_degree == 0 for _, size in BLOCK.tp_divides)
        and seq_len % strategy.sequence_degree == 0
        and strategy.is_aligned
    )
    assert (illegal_reason(BLOCK, strategy, Batch(microbatch_samples=samples, seq_len=seq_len)) is None) == whole


def test_selective_remat_is_for_blocks():
    assert reason("dp2 remat=selective") is None


@pytest.mark.parametrize(
    ("role", "why"),
    [(LayerRole.EMBEDDING, "an embedding has none"), (LayerRole.HEAD, "those of the head are the logits")],
)
def test_selective_remat_of_another_layer_is_refused_with_the_reason(role, why):
    other = LayerType(name=role, role=role, tp_divides=())
    assert why in reason("dp2 remat=selective", other)
    assert all(reason(f"dp2 remat={remat}", other) is None for remat in Remat if remat is not Remat.SELECTIVE)
