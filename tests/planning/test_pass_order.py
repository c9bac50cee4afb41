"""Tests of plans in an order of passes that was found for their times."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.errors import InvalidPlanError
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import with_next_best
from steelyard.planning.pass_order import in_best_order
from steelyard.planning.price import with_price
from tests.cost.examples import plan
from tests.jobs import make_job

NAME, FIXED = "zero-bubble-auto", "interleaved-zero-bubble"
PARTS = [", ".join(["fsdp2"] * count) for count in (5, 4, 4, 4, 4, 4, 4, 5)]


@cache
def job() -> Job:
    return make_job("llama3-8b", "1x8xa100-80gb", global_batch=16, seq_len=4096)


def plan_under(schedule: str) -> Plan:
    return plan(job(), *PARTS, num_microbatches=8, num_chunks=2, schedule=schedule)


@cache
def ordered() -> Plan:
    usual = plan_under(NAME)
    return in_best_order(usual, job(), predict(usual, job()))[0]


def test_it_is_faster_than_the_schedule_it_starts_from_and_is_priced_in_its_order() -> None:
    usual, found = (predict(each, job()) for each in (plan_under(FIXED), ordered()))
    assert found.step_time_s < usual.step_time_s
    passes = ordered().pipeline.passes(1)
    events = found.timeline.stages[1][: len(passes.phase)]
    assert [(each.chunk, each.microbatch) for each in events] == list(
        zip(passes.chunk.tolist(), passes.microbatch.tolist(), strict=True)
    )


def test_its_certificate_is_said_and_no_order_is_faster_than_its_bound() -> None:
    prediction = with_price(ordered(), job()).prediction
    assert prediction is not None
    assert prediction.order_bound_s is not None
    assert prediction.order_bound_s <= prediction.step_time_s < 1.05 * prediction.order_bound_s
    assert re.search(r"at most \d\.\d% above the best order of its passes", str(with_price(ordered(), job())))


def test_it_holds_no_more_than_the_budget() -> None:
    usual = predict(plan_under(NAME), job())
    most = max(stage.total_bytes for stage in usual.stages)
    tight = job().on(budget_bytes=most)
    found, cost = in_best_order(plan_under(NAME), tight, predict(plan_under(NAME), tight))
    assert cost.fits
    assert cost.step_time_s <= usual.step_time_s
    assert max(stage.total_bytes for stage in predict(ordered(), job()).stages) > most
    assert predict(found, tight).step_time_s == cost.step_time_s


@pytest.mark.parametrize("schedule", [FIXED, "interleaved-1f1b"])
def test_a_schedule_with_an_order_of_its_own_keeps_it(schedule: str) -> None:
    cost = predict(plan_under(schedule), job())
    assert in_best_order(plan_under(schedule), job(), cost) == (plan_under(schedule), cost)
    assert cost.order_bound_s is None


def test_the_order_is_written_and_read(tmp_path: Path) -> None:
    write_plan(ordered(), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").pass_order == ordered().pass_order


def test_its_configuration_is_not_among_its_next_best_plans() -> None:
    found = plan_job(job(), Decisions(schedules=(NAME,), num_stages=4), top=1)
    assert found.plan is not None
    assert found.plan.pass_order
    best = with_next_best(found, num_plans=len(found.others) + 1).plan
    assert best is not None
    shapes = {(each.num_microbatches, len(each.stages[0].parts)) for each in best.next_best}
    assert shapes
    assert (best.num_microbatches, best.num_chunks) not in shapes


def stuck(row: str) -> str:
    """Return a row that waits for results of other stages of a microbatch that comes next."""
    return row.replace(",0F1,", ",", 1).replace(",4F1,", ",4F1,0F1,", 1)


WRONG: list[tuple[Callable[[tuple[str, ...]], tuple[str, ...]], str]] = [
    (lambda rows: rows[:3], "found 3 rows\n.*a row for each of 4 stages"),
    (lambda rows: (rows[1], rows[0], *rows[2:]), "found a part of another stage in row 0"),
    (lambda rows: (rows[0] + ",0F9", *rows[1:]), "found row 0 without some passes, or with more"),
    (lambda rows: (rows[0] + ",0F0", *rows[1:]), "found pass F of microbatch 0 twice or too early in row 0"),
    (
        lambda rows: (rows[0].replace("0F0,", "", 1), *rows[1:]),
        "found pass I of microbatch 0 twice or too early in row 0",
    ),
    (lambda rows: (rows[0].replace("0F0,", "0X0,", 1), *rows[1:]), "found '0X0'\n.*F, I or W"),
    (lambda rows: (rows[0] + ",0SEND_F0", *rows[1:]), "found SEND_F\n.*passes without transfers"),
    (
        lambda rows: (stuck(rows[0]), *rows[1:]),
        "found stage 0 at .*\n.*passes whose inputs other stages have sent by then",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=range(len(WRONG)))
def test_an_order_that_cannot_be_run_is_an_error(
    change: Callable[[tuple[str, ...]], tuple[str, ...]], message: str
) -> None:
    with pytest.raises(InvalidPlanError, match=f"pass_order: {message}"):
        Plan.model_validate(ordered().model_dump(mode="json") | {"pass_order": change(ordered().pass_order)})


def test_an_order_under_a_schedule_that_has_one_is_an_error() -> None:
    with pytest.raises(InvalidPlanError, match="pass_order: found an order of passes under interleaved-1f1b"):
        Plan.model_validate(ordered().model_dump(mode="json") | {"schedule": "interleaved-1f1b"})
