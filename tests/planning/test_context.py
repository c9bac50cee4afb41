"""Tests of context parallelism in the planner: chosen for long sequences, pinned for any, refused with a reason."""

from dataclasses import replace
from typing import Any

import pytest

from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import CP
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import find_plan
from steelyard.planning.problem import stage_strategies
from steelyard.planning.why_not import pin_error
from tests.jobs import make_job, request_of
from tests.runtime.models import FAMILY_CONFIGS

LLAMA: dict[str, Any] = FAMILY_CONFIGS["llama"] | {"num_key_value_heads": 2}


def job(config: dict[str, Any] = LLAMA, *, seq_len: int = 64, global_batch: int = 8, devices: int = 4) -> Job:
    return make_job(
        config,
        f"1x{devices}xa100-80gb",
        global_batch=global_batch,
        seq_len=seq_len,
        precision="bf16",
        memory=None,
        profile=None,
    )


def why_not(of: Job, text: str) -> UserError:
    decisions = Decisions(pins=(text,))
    assert plan_job(of, decisions).plan is None
    return pin_error(request_of(of, decisions), of)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [64, 16384])
def test_it_is_searched_whatever_the_length(seq_len: int) -> None:
    strategies = stage_strategies(replace(job(), seq_len=seq_len), 4, Decisions())
    assert {strategy.token_degree for strategy in strategies} == {1, 2, 4}


@pytest.mark.slow
def test_ulysses_that_divides_no_blocks_heads_is_not_searched() -> None:
    offered = stage_strategies(replace(job(), seq_len=16384), 4, Decisions())
    found = {strategy.parallel for strategy in offered if strategy.mode("cp_method") == "ulysses"}
    assert found == {"dp2-cp2", "fsdp2-cp2"}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["cp=2", "blocks: cp2-tp2+sp", "cp=2, cp_method=ulysses"])
def test_a_pin_gets_it_for_short_sequences(text: str) -> None:
    of = job()
    found = plan_job(of, Decisions(pins=(text,))).plan
    assert found is not None
    assert all(CP in strategy.dimensions for strategy in found.strategies[1:-1])


@pytest.mark.slow
def test_one_long_sequence_is_divided_over_all_devices() -> None:
    """With fewer samples than devices only tokens and matrices can be divided; the model has too few heads for four."""
    plan = find_plan(
        LLAMA | {"hidden_size": 512, "head_dim": 128, "intermediate_size": 2048},
        "1x4xh100-80gb",
        global_batch=1,
        seq_len=131072,
    )
    assert {strategy.token_degree for strategy in plan.strategies[1:-1]} == {4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text", "reason"),
    [
        (FAMILY_CONFIGS["bert"], "cp=2", "only causal attention"),
        (FAMILY_CONFIGS["gpt2"] | {"attn_pdrop": 0.1}, "cp=2", "drops entries"),
        (LLAMA, "cp=4, cp_method=ulysses", "ulysses over cp 4 does not divide the 2 key-value heads"),
    ],
)
def test_what_it_cannot_divide_is_refused_with_the_reason(config: dict[str, Any], text: str, reason: str) -> None:
    sizes = {} if config is LLAMA else {"seq_len": 32, "devices": 2}  # as in other tests, or as many as it takes
    assert reason in why_not(job(config, **sizes), text).expected.split("; ")[0]


@pytest.mark.slow
def test_a_sequence_must_come_in_two_equal_pieces_for_each_rank() -> None:
    assert "a multiple of 4, not 62" in why_not(replace(job(), seq_len=62), "cp=2").expected.split("; ")[0]


@pytest.mark.slow
def test_tp_outside_it_is_refused_with_the_right_order() -> None:
    with pytest.raises(UserError) as raised:
        request_of(job(), Decisions(pins=("tp2-cp2",)))
    assert raised.value.hint == "write the tp level last, as in cp2-tp4"
