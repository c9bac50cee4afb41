"""Tests of weight passes in plans: searched if requested, and incompatible settings."""

from dataclasses import replace

import pytest

from steelyard.cost.predict import predict
from steelyard.errors import InvalidPlanError, UserError
from steelyard.levers import Levers
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.problem import pipeline_configs
from steelyard.planning.why_not import left_out
from tests.cost.examples import job, plan
from tests.engines.examples import exported
from tests.jobs import make_job
from tests.runtime.models import make_plan

NAME = "interleaved-zero-bubble"
NAMES = (NAME, "zero-bubble-auto", "zb-v", "dualpipe-v")
FOUR_STAGES = {"num_stages": 4, "num_microbatches": 8}
LEVERS = [{"compile": "blocks"}, {"offload": "activations"}, {"offload": "parameters"}]


def planned(schedule: str) -> Plan:
    found = plan_job(job(num_hidden_layers=8), Decisions(schedules=(schedule,), **FOUR_STAGES)).plan
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_is_planned_with_where_it_is_asked_for(name: str) -> None:
    assert planned(name).schedule == name


def test_bubbles_are_filled_by_the_part_of_backward_passes_that_weights_take() -> None:
    of = make_job("llama3-8b", "1x8xa100-80gb", global_batch=8, seq_len=1024)
    parts = [", ".join(["fsdp2"] * count) for count in (5, 4, 4, 4, 4, 4, 4, 5)]
    plans = [plan(of, *parts, num_microbatches=4, num_chunks=2, schedule=each) for each in (NAME, "interleaved-1f1b")]
    filled, interleaved = (predict(each, of).timeline for each in plans)
    assert filled.step_time_s < 0.95 * interleaved.step_time_s
    spans = {event.work: event.end_s - event.start_s for event in filled.stages[1]}
    assert 0.25 < spans["weight"] / (spans["weight"] + spans["backward"]) < 0.5
    assert [filled.worked_s(stage) for stage in range(4)] == pytest.approx(
        [interleaved.worked_s(stage) for stage in range(4)]
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_plan_is_proven_slower_than_it_takes(name: str) -> None:
    prediction = planned(name).prediction
    assert prediction is not None
    assert prediction.lower_bound_s <= prediction.step_time_s


@pytest.mark.parametrize("name", NAMES)
def test_it_is_not_searched_beside_others_and_that_is_said(name: str) -> None:
    of = job(num_hidden_layers=8)
    assert name not in {config.pipeline.schedule.name for config in pipeline_configs(of, Decisions())}
    assert f"{name}: searched only if --schedule names no other schedule" in left_out(of, Decisions())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("levers", LEVERS, ids=str)
def test_levers_whose_blocks_are_not_split_are_refused(levers: dict[str, str], name: str) -> None:
    of = replace(job(num_hidden_layers=8), levers=Levers.of(levers))
    with pytest.raises(UserError, match=f"--schedule: found {name} with --"):
        pipeline_configs(of, Decisions(schedules=(name,)))
    with pytest.raises(InvalidPlanError, match=f"schedule: found {name} with --"):
        zero_bubble(name, levers=levers)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_of_stock_calls_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"pytorch for a plan under {name}\n.*does not split backward"):
        exported(zero_bubble(name).model_copy(update={"cluster": "1x4xcpu"}), "pytorch")


def zero_bubble(name: str, **options: dict[str, str]) -> Plan:
    return make_plan("llama", *["fsdp2, fsdp2"] * 4, num_chunks=2, num_devices=4, schedule=name, **options)
