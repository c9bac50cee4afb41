"""The plan that is chosen fits as reported, also where the tables of the search count less."""

from dataclasses import replace

import pytest

from steelyard.cost import predict as cost
from steelyard.cost.predict import PlanCost
from steelyard.cost.setting import Job
from steelyard.plan.plan import Plan
from steelyard.planning import PlanOptions, choose, plan_job
from tests.cost.examples import job


def report_more(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Lets reports count bytes on every stage that the tables do not."""

    def predict(plan: Plan, of: Job) -> PlanCost:
        found = cost.predict(plan, of)
        stages = tuple(
            stage.model_copy(update={"memory_bytes": {**stage.memory_bytes, "unforeseen": num_bytes}})
            for stage in found.stages
        )
        return replace(found, stages=stages, fits=all(stage.total_bytes <= of.budget_bytes for stage in stages))

    monkeypatch.setattr(choose, "predict", predict)


def fullest_bytes(found: choose.PlanningResult) -> int:
    assert found.cost is not None
    return max(stage.total_bytes for stage in found.cost.stages)


def test_a_plan_that_does_not_fit_as_reported_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    report_more(monkeypatch, 100_000)
    roomy = plan_job(job(), PlanOptions())
    tight = plan_job(replace(job(), budget_bytes=fullest_bytes(roomy) - 1), PlanOptions())
    assert roomy.cost is not None
    assert tight.cost is not None
    assert tight.cost.fits
    assert tight.cost.step_time_s >= roomy.cost.step_time_s


def test_the_certificate_says_that_the_search_had_less(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = replace(job(), budget_bytes=fullest_bytes(plan_job(job(), PlanOptions())))
    left_bytes = tight.budget_bytes - fullest_bytes(plan_job(tight, PlanOptions()))
    report_more(monkeypatch, left_bytes + 1)
    found = plan_job(tight, PlanOptions()).plan
    assert found is not None
    assert found.prediction is not None
    assert "less than there is" in found.prediction.certificate


def test_if_nothing_fits_as_reported_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    report_more(monkeypatch, 2**50)
    found = plan_job(job(), PlanOptions())
    assert found.plan is None
    assert "per device, -" not in found.miss_text, "what is missing is never less than nothing"
