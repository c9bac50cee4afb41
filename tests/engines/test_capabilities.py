"""Tests of the reasons why a plan exceeds a framework of one strategy, each alone, and of plans without any."""

import pytest

from steelyard.engines.capabilities import Capabilities, dimensions_of, first_blocks_recomputed, unsupported
from steelyard.plan.strategy import Remat, parse_strategy
from tests.engines.examples import mixed, uneven_pipeline, uniform
from tests.runtime.models import make_plan

EVERY = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of("dp", "fsdp", "tp", "dp+tp", "fsdp+tp"),
    modes={"zero": frozenset({2, 3}), "sp": frozenset({False, True})},
    modes_beside={"tp": {"zero": frozenset({3})}},
    remats=frozenset(Remat),
    remats_first_blocks=True,
    schedules=frozenset({"1f1b"}),
)
FEW = Capabilities(mixes_layers=False, dimensions=dimensions_of("dp"), remats=frozenset({Remat.NONE}))


def test_a_framework_that_mixes_layers_runs_every_plan() -> None:
    assert unsupported(mixed(), Capabilities(mixes_layers=True)) == ()


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_plan_of_one_strategy_is_within(remat: str) -> None:
    assert unsupported(uniform("fsdp8", devices=8, remat=remat), EVERY) == ()


def test_an_uneven_pipeline_is_within() -> None:
    assert unsupported(uneven_pipeline(), EVERY) == ()


def test_stages_of_unlike_sizes_are_beyond() -> None:
    plan = make_plan("llama-tied", "fsdp2, fsdp2", "single, single", sizes=(2, 1))
    assert "stages of different numbers of devices (2, 1)" in unsupported(plan, EVERY)


def test_a_mix_is_named_with_its_counts() -> None:
    reasons = unsupported(mixed(), EVERY)
    assert reasons[0] == "strategies that differ between layers (dp2 ×2, fsdp2 ×2, tp2+sp ×2, fsdp2 zero2 ×1, …)"


def test_recomputed_ends_are_beyond() -> None:
    plan = uniform("fsdp8", devices=8)
    run = plan.parts[0].runs[0].model_copy(update={"remat": Remat.FULL})
    stage = plan.stages[0].model_copy(update={"runs": (run, *plan.parts[0].runs[1:])})
    assert unsupported(plan.model_copy(update={"stages": (stage,)}), EVERY) == ("remat of the embedding",)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("fsdp8", "fsdp in one layer"),
        ("dp4-tp2", "dp with tp in one layer"),
        ("dp8 remat=full", "full remat"),
        ("dp8 remat=selective", "selective remat"),
    ],
)
def test_each_missing_means_has_its_reason(strategy: str, reason: str) -> None:
    assert FEW.refusal(parse_strategy(strategy)) == reason


def test_strided_tensor_parallelism_is_refused() -> None:
    assert EVERY.refusal(parse_strategy("tp2-fsdp4")) == "tensor parallelism over ranks that are not neighbours"


def test_zero_2_may_be_refused_beside_tp_alone() -> None:
    assert EVERY.refusal(parse_strategy("fsdp8 zero2")) is None
    assert EVERY.refusal(parse_strategy("fsdp4-tp2 zero2")) == "zero 2 together with tp"


def test_a_single_device_is_always_within() -> None:
    assert FEW.refusal(parse_strategy("single")) is None


def test_a_pipeline_is_beyond_a_framework_without() -> None:
    assert unsupported(uneven_pipeline(), FEW)[-1] == "a pipeline (2 stages)"


def test_a_schedule_that_is_not_there_is_beyond() -> None:
    assert unsupported(uneven_pipeline(schedule="interleaved-1f1b"), EVERY) == ("the interleaved-1f1b schedule",)


def test_the_first_blocks_of_every_stage_may_be_recomputed() -> None:
    plan = uneven_pipeline(first_recomputed=3)
    assert first_blocks_recomputed(plan) == 3
    assert unsupported(plan, EVERY) == ()


def test_other_blocks_than_the_first_may_not() -> None:
    plan = uneven_pipeline(first_recomputed=3)
    stage = plan.stages[0]
    later = stage.model_copy(
        update={"runs": (stage.runs[0], stage.runs[1].model_copy(update={"remat": Remat.NONE}), *stage.runs[2:])}
    )
    changed = plan.model_copy(update={"stages": (later, plan.stages[1])})
    assert first_blocks_recomputed(changed) is None
    assert unsupported(changed, EVERY) == (
        "remat of blocks that are not the first n of every stage (none ×29, full ×3)",
    )
