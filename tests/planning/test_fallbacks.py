"""Tests of plans of less memory that a plan carries for the case that memory runs out."""

from pathlib import Path
from typing import Any

import pytest

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.errors import InvalidPlanError
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning import complete
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import with_fallbacks, with_next_best
from steelyard.planning.price import peak_bytes
from steelyard.planning.problem import make_tables
from steelyard.planning.variants import Study
from steelyard.search import OnDemand
from tests.cost import examples
from tests.jobs import request_of

OPTIONS = Decisions(num_stages=1)


def study_of(job: Job, tables: tuple[OnDemand, ...] | None = None) -> Study:
    """Study of a job under these options."""
    return Study(request_of(job, OPTIONS), job, tables=tables)


@pytest.fixture(scope="module")
def job() -> Job:
    return examples.job()


@pytest.fixture(scope="module")
def plan(job: Job) -> Plan:
    tables = make_tables(job, OPTIONS)
    found = plan_job(job, OPTIONS, tables=tables).plan
    assert found is not None
    return with_fallbacks(found, study_of(job, tables), num_fallbacks=2)


def test_each_fallback_takes_less_memory_than_the_one_before(plan: Plan) -> None:
    taken = [peak_bytes(plan), *(peak_bytes(plan.fallback_plan(index)) for index in range(len(plan.fallbacks)))]
    assert len(taken) > 1
    assert sorted(taken, reverse=True) == taken
    assert len(set(taken)) == len(taken)


def test_what_a_search_knows_of_its_tables_changes_no_fallback(plan: Plan, job: Job) -> None:
    result = plan_job(job, OPTIONS)
    assert result.plan is not None
    again = with_fallbacks(result.plan, study_of(job, result.bounded_tables), num_fallbacks=2)
    assert again.fallbacks == plan.fallbacks


def test_a_fallback_costs_what_it_predicts(plan: Plan, job: Job) -> None:
    fallback = plan.fallback_plan(0)
    assert fallback.prediction is not None
    assert fallback.prediction.step_time_s == predict(fallback, job).step_time_s


def test_a_fallback_keeps_the_fallbacks_after_it(plan: Plan) -> None:
    assert plan.fallback_plan(0).fallbacks == plan.fallbacks[1:]
    assert plan.fallback_plan(len(plan.fallbacks) - 1).fallbacks == ()


@pytest.mark.slow
def test_a_margin_is_not_taken_by_fallbacks(plan: Plan, job: Job) -> None:
    """The margin is so large that the plan itself would fit every share with it."""
    roomy = job.on(margin_bytes=job.budget_bytes)
    alone = plan.model_copy(update={"fallbacks": ()})
    again = with_fallbacks(alone, study_of(roomy, make_tables(job, OPTIONS)), num_fallbacks=100)
    every = with_fallbacks(alone, study_of(job), num_fallbacks=100)
    assert again.fallbacks == every.fallbacks


def test_fallbacks_survive_the_file(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_none_are_searched_where_none_are_asked_for(plan: Plan, job: Job) -> None:
    alone = plan.model_copy(update={"fallbacks": ()})
    assert with_fallbacks(alone, study_of(job), num_fallbacks=0).fallbacks == ()


def test_a_plan_whose_fallback_leaves_layers_out_is_refused(plan: Plan) -> None:
    content: dict[str, Any] = plan.model_dump(mode="json", exclude_none=True)
    run = content["fallbacks"][0]["stages"][0]["runs"][-1]
    run["layers"] = [run["layers"][0], run["layers"][1] - 1]
    with pytest.raises(InvalidPlanError, match="layers"):
        Plan.model_validate(content)


def test_as_many_next_best_plans_are_kept_as_asked_for_each_of_another_config_that_fits(job: Job) -> None:
    result = plan_job(job, Decisions(), top=1)
    kept = with_next_best(result, num_plans=12).plan
    assert kept is not None
    contenders = kept.contenders()
    assert len(contenders) == 13 > 1 + len(result.others), "more than the search priced"
    assert len({each.pipeline for each in contenders}) == 13
    seconds = [each.prediction.step_time_s for each in contenders if each.prediction]
    assert seconds == sorted(seconds)
    assert all(peak_bytes(each) <= job.budget_bytes for each in contenders)


def test_a_next_best_plan_costs_what_it_predicts_and_survives_the_file(job: Job, tmp_path: Path) -> None:
    kept = with_next_best(plan_job(job, Decisions()), num_plans=2).plan
    assert kept is not None
    write_plan(kept, tmp_path / "plan.json")
    for each in read_plan(tmp_path / "plan.json").contenders():
        assert each.prediction is not None
        assert each.prediction.step_time_s == predict(each, job).step_time_s


def test_no_next_best_plan_is_kept_where_none_is_asked_for(job: Job) -> None:
    kept = with_next_best(plan_job(job, Decisions()), num_plans=-1).plan
    assert kept is not None
    assert kept.next_best == ()


def test_a_next_best_plan_that_contradicts_the_model_is_an_error(job: Job) -> None:
    kept = with_next_best(plan_job(job, Decisions()), num_plans=1).plan
    assert kept is not None
    content = kept.model_dump(mode="json")
    content["next_best"][0]["num_microbatches"] = 7
    with pytest.raises(InvalidPlanError, match="a divisor of the global batch"):
        Plan.model_validate(content)


def test_a_faster_fallback_becomes_the_plan(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the simulator ranks plans of one strategy differently from the search."""
    slow = plan_job(job, Decisions(num_stages=1, pins=("tp=4",))).plan
    assert slow is not None
    monkeypatch.setattr(complete, "job_of", lambda _: job)
    monkeypatch.setattr(complete, "simplest", lambda *_: slow)
    chosen = complete.complete(request_of(job, OPTIONS, num_next_best=0, num_fallbacks=3)).plan
    assert chosen is not None
    assert chosen.prediction is not None
    fallbacks = [chosen.fallback_plan(index) for index in range(len(chosen.fallbacks))]
    baselines_s = [each.step_time_s for each in chosen.prediction.baselines if each.step_time_s is not None]
    assert chosen.step_s < slow.step_s
    assert all(each >= chosen.step_s for each in [*baselines_s, *(one.step_s for one in fallbacks)])
