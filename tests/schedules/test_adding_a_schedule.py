"""Test that a schedule added in one place is simulated, its memory computed, and planned with."""

from pathlib import Path

import numpy as np
import pytest

from steelyard.cost.build import build_tables
from steelyard.cost.predict import predict, predict_memory
from steelyard.cost.simulator import StageTimes
from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.explain import explain_plan
from steelyard.planning.price import describe
from steelyard.planning.problem import make_tables, pipeline_configs, problem_of
from steelyard.planning.variants import Study
from steelyard.planning.why_not import configs_not_searched
from steelyard.schedules import SCHEDULES, PassOrder, Phase, PipelineConfig, Schedule, find_schedule
from steelyard.search.problem import load_problem, save_problem
from tests.cost.examples import config, job, plan, simulated
from tests.jobs import request_of

STAGES = ("fsdp4, dp4, fsdp4", "fsdp4, fsdp4, fsdp4")


class LastInFirstOut(Schedule):
    """GPipe whose backward passes begin with the last microbatch."""

    name = "last-in-first-out"
    title = "last in, first out"
    torch_name = "ScheduleGPipe"

    def passes(self, pipeline: PipelineConfig, stage: int) -> PassOrder:
        count = pipeline.num_microbatches
        microbatch = np.concatenate([np.arange(count), np.arange(count)[::-1]])
        return PassOrder(
            phase=np.repeat([Phase.FORWARD, Phase.BACKWARD], count),
            chunk=np.zeros_like(microbatch),
            microbatch=microbatch,
        )


NAME = LastInFirstOut.name


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, NAME, LastInFirstOut())


def test_it_is_simulated_in_its_own_order() -> None:
    timeline = simulated([StageTimes(forward_s=1, backward_s=2)] * 3, 4, NAME)
    backwards = [event.microbatch for event in timeline.stages[2] if event.work == "backward"]
    assert backwards == [3, 2, 1, 0]


def test_it_takes_the_time_of_gpipe_on_equal_stages() -> None:
    parts = [StageTimes(forward_s=1, backward_s=2, once_s=1)] * 3
    assert simulated(parts, 4, NAME).step_time_s == simulated(parts, 4, "gpipe").step_time_s


def test_the_search_holds_as_many_microbatches_as_its_passes_do() -> None:
    tables = build_tables(config(num_stages=2, num_microbatches=8, schedule=NAME), (parse_strategy("fsdp4"),))
    assert [tables.pipeline.in_flight(stage) for stage in range(2)] == [8, 8]


def test_its_memory_is_walked() -> None:
    of = job(global_batch=32)
    lifo, gpipe, usual = (
        predict_memory(plan(of, *STAGES, num_microbatches=8, schedule=name), of) for name in (NAME, "gpipe", "1f1b")
    )
    for stage in range(2):
        assert lifo[stage]["activations"] == gpipe[stage]["activations"] > usual[stage]["activations"]


def planned() -> Plan:
    found = plan_job(job(), Decisions(schedules=(NAME,), num_stages=2)).plan
    assert found is not None
    return found


def test_it_is_planned_with() -> None:
    found = planned()
    assert found.schedule == NAME
    assert found.prediction is not None
    assert found.prediction.step_time_s == predict(found, job()).step_time_s


def test_it_is_said_of_a_config() -> None:
    assert describe(planned().pipeline).endswith(f", {NAME}")


def test_a_plan_under_it_is_explained() -> None:
    options = Decisions(num_stages=2, num_microbatches=4, max_degrees={"tp": 1})
    found = explain_plan(planned(), Study(request_of(job(), options), job()), everything=True)
    assert found.verdicts
    assert "1f1b" in {baseline.name for baseline in found.rivals}


def test_it_is_a_baseline_of_a_plan_under_another() -> None:
    request = request_of(job(), Decisions(num_stages=2, num_microbatches=4))
    study = Study(request, job())
    found = explain_plan(plan(job(), *STAGES, num_microbatches=4), study)
    assert NAME in {baseline.name for baseline in found.rivals}


def test_a_plan_under_it_is_written_and_read(tmp_path: Path) -> None:
    found = planned()
    write_plan(found, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == found


def test_a_problem_under_it_is_written_and_read(tmp_path: Path) -> None:
    problem = problem_of(job(), make_tables(job(), Decisions(schedules=(NAME,), num_stages=2, num_microbatches=8)))
    save_problem(tmp_path / "problem.json", problem)
    (tables,) = load_problem(tmp_path / "problem.json").configs
    assert tables.pipeline == problem.configs[0].pipeline


def test_it_is_searched_where_nothing_is_said() -> None:
    assert NAME in {each.pipeline.schedule.name for each in pipeline_configs(job(), Decisions())}


def test_that_it_was_left_out_is_said() -> None:
    found = configs_not_searched(job(), Decisions(schedules=("1f1b",)))
    assert (NAME, "left out by --schedule") in {(each.values, each.reason) for each in found}


def test_an_unknown_name_has_the_nearest_known_one_as_its_hint() -> None:
    with pytest.raises(UserError, match=f"did you mean {NAME}"):
        find_schedule("last-in-last-out")
