"""Tests of fewer key-value heads than tp: legal, priced as replicated on every rank, and reported.

`tests/runtime/test_family_parity.py` tests that such ranks give the losses and gradients of one process, with two heads
over four processes in its cases of shared key-value heads.
"""

import pytest

from steelyard.model.read import load_model
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.planning.complete import find_plan
from steelyard.tracer.cache import cached_trace

MODEL = "qwen2.5-1.5b"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, SEQ_LEN = 1536, 12, 2, 128, 8960, 2048
KV_PARAMS = 2 * (HIDDEN + 1) * KV_HEADS * HEAD_DIM
SAID = "tp 4 over 2 key-value heads: every rank holds the weights of all 2 and computes with one"


def pinned(degree: int) -> Plan:
    decisions = Decisions(pins=(f"tp={degree}",), num_stages=1)
    return find_plan(MODEL, "1x8xa100-80gb", global_batch=16, seq_len=SEQ_LEN, decisions=decisions)


@pytest.mark.slow
@pytest.mark.parametrize(("degree", "says"), [(2, False), (4, True)])
def test_a_plan_says_where_ranks_hold_the_same_heads(degree: int, says: bool) -> None:
    plan = pinned(degree)
    assert {strategy.tensor_degree for strategy in plan.strategies} == {degree}
    assert (SAID in str(plan)) == says


@pytest.mark.parametrize(("degree", "held"), [(1, 1), (2, 2), (4, 1)])
def test_weights_of_shared_heads_are_priced_whole(degree: int, held: int) -> None:
    """All parameters except those of the two norms and of key and value are divided by the degree."""
    divided = 2 * HIDDEN**2 + HIDDEN + 3 * HIDDEN * MLP
    (block,) = (
        each
        for each in cached_trace(load_model(MODEL), seq_len=SEQ_LEN, precision="bf16", degrees=(1, 2, 4)).layers
        if each.kind == "block" and each.degrees == ({"tp": degree} if degree > 1 else {})
    )
    assert block.num_params == divided // degree + KV_PARAMS // held + 2 * HIDDEN
    summed = [each.tensor_bytes.constant for each in block.backward_collectives]
    assert summed == ([2.0 * KV_PARAMS] if held == 1 < degree else [0.0] * (degree > 1))
