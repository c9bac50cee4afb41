"""Tests of the report's search around a plan, within a limit of computing time."""

from dataclasses import replace

import pytest

from steelyard.cost.job import Job
from steelyard.cost.predict import PlanCost, predict
from steelyard.plan.choices import PlanStudy
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.explain import BUDGETS, search_for_report
from steelyard.planning.price import peak_bytes
from tests.cost.examples import cluster, job, job_on_shared_cores, plan
from tests.jobs import request_of

ENOUGH_S = 600.0


@pytest.fixture(scope="module")
def searched() -> tuple[Job, Plan, PlanCost]:
    """A job whose memory binds, and its best plan."""
    tight = job(cluster(1, 4), global_batch=16).on(budget_bytes=1_362_300_000)
    result = plan_job(tight, Decisions())
    assert result.plan is not None, result.miss_text
    return tight, result.plan, predict(result.plan, tight)


@pytest.fixture(scope="module")
def study(searched: tuple[Job, Plan, PlanCost]) -> PlanStudy:
    of, best, cost = searched
    return search_for_report(best, request_of(of), of, cost)


def test_without_time_nothing_is_searched(searched: tuple[Job, Plan, PlanCost]) -> None:
    of, best, cost = searched
    found = search_for_report(best, request_of(of), of, cost, time_limit_s=0)
    assert not found.points
    assert not found.explanation.rivals
    assert not found.scope


def test_hardly_any_time_names_what_was_left_out(searched: tuple[Job, Plan, PlanCost]) -> None:
    of, best, cost = searched
    found = search_for_report(best, request_of(of), of, cost, time_limit_s=1e-9)
    assert BUDGETS in found.left_out
    assert not found.explanation.rivals


@pytest.mark.slow
def test_with_time_nothing_is_left_out(study: PlanStudy) -> None:
    assert not study.left_out
    assert study.explanation.rivals
    assert len(study.explanation.budgets) == 2
    assert study.explanation.binds


def test_less_memory_takes_more_time(study: PlanStudy) -> None:
    assert len(study.points) > 1
    sizes, times = ([getattr(point, name) for point in study.points] for name in ("memory_bytes", "step_time_s"))
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)


def test_a_proven_plan_is_a_point_of_its_frontier(searched: tuple[Job, Plan, PlanCost], study: PlanStudy) -> None:
    _, best, cost = searched
    assert best.prediction is not None
    if best.prediction.certificate.is_optimal:
        assert [point.step_time_s for point in study.points if point.is_chosen] == [cost.step_time_s]


def test_no_next_best_plan_lies_below_the_frontier(searched: tuple[Job, Plan, PlanCost], study: PlanStudy) -> None:
    of, best, cost = searched
    tight = min(study.points, key=lambda point: point.memory_bytes)
    smaller = replace(of.groups[0], budget_bytes=(tight.memory_bytes + peak_bytes(best)) // 2)
    other = plan_job(replace(of, groups=(smaller,)), Decisions()).plan
    assert other is not None
    with_other = best.model_copy(update={"next_best": (other.as_fallback(),)})
    found = search_for_report(with_other, request_of(of), of, cost, time_limit_s=1e-9)
    assert peak_bytes(other) in {point.memory_bytes for point in found.points}


def test_no_baseline_is_faster_than_a_proven_plan(study: PlanStudy) -> None:
    assert all(baseline.slowdown is None or baseline.slowdown > -0.01 for baseline in study.explanation.rivals)


def test_a_search_may_be_kept_to_the_pipeline_config_of_the_plan(
    searched: tuple[Job, Plan, PlanCost], study: PlanStudy
) -> None:
    of, best, cost = searched
    own = search_for_report(best, request_of(of), of, cost, time_limit_s=ENOUGH_S, everywhere=False)
    assert {(point.num_stages, point.num_microbatches) for point in own.points} == {
        (best.num_stages, best.num_microbatches)
    }
    assert len({(point.num_stages, point.num_microbatches) for point in study.points}) > 1


@pytest.mark.slow
def test_a_slow_plan_by_hand_has_a_faster_one_in_its_own_config() -> None:
    of = job(cluster(1, 4), global_batch=16)
    by_hand = plan(of, ", ".join(["fsdp4 remat=full"] * 6), num_microbatches=4)
    found = search_for_report(by_hand, request_of(of), of, predict(by_hand, of), time_limit_s=ENOUGH_S)
    best = found.explanation.rivals[0]
    assert best.name == "any plan"
    assert best.slowdown is not None
    assert best.slowdown < 0


@pytest.mark.slow
def test_where_processes_share_cores_the_frontier_has_the_plan_that_the_planner_finds() -> None:
    of = job_on_shared_cores()
    by_hand, best = plan(of, "tp2, tp2, tp2, tp2, tp2, tp2", num_microbatches=4), plan_job(of, Decisions()).cost
    found = search_for_report(by_hand, request_of(of), of, predict(by_hand, of))
    assert best is not None
    assert min(point.step_time_s for point in found.points) == best.step_time_s
