"""The plan that is chosen fits as reported, also where the tables of the search count less."""

from dataclasses import replace

import pytest

from steelyard.cost import predict as cost
from steelyard.cost.predict import PlanCost
from steelyard.cost.setting import Job
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Backend
from steelyard.plan.certificate import Certificate
from steelyard.plan.plan import Plan
from steelyard.planning import PlanOptions, choose, make_job, plan_job
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
    assert found.prediction.certificate.spared_bytes
    assert "less than there is" in str(found.prediction.certificate)


def test_a_plan_that_the_search_proves_and_the_simulator_confirms_is_optimal_without_a_gap() -> None:
    found = plan_job(job(), PlanOptions())
    assert found.plan is not None
    assert found.plan.prediction is not None
    certificate = found.plan.prediction.certificate
    assert certificate == Certificate(status="optimal", gap=0.0)


def test_a_plan_that_the_simulator_prefers_says_among_how_many_and_its_gap_to_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulator is made to take longer for every plan of the pipeline setting that the search ranks first."""
    first = plan_job(job(), PlanOptions()).plan
    assert first is not None

    def slow_for_the_first(plan: Plan, of: Job) -> PlanCost:
        found = cost.predict(plan, of)
        is_first = (plan.num_stages, plan.num_microbatches) == (first.num_stages, first.num_microbatches)
        return replace(found, step_time_s=found.step_time_s * 100) if is_first else found

    monkeypatch.setattr(choose, "predict", slow_for_the_first)
    found = plan_job(job(), PlanOptions())
    assert found.plan is not None
    assert found.plan.prediction is not None
    certificate = found.plan.prediction.certificate
    assert (certificate.status, certificate.num_simulated) == ("simulated", choose.NUM_RESCORED)
    assert certificate.gap is not None
    assert 0 < certificate.gap < 1


def test_a_plan_says_where_its_costs_come_from_and_what_carries_its_collectives() -> None:
    of = replace(job(), time_factor=1.25)
    found = plan_job(of, PlanOptions()).plan
    assert found is not None
    assert found.prediction is not None
    assert found.prediction.profile == of.cost_source()
    assert found.prediction.time_factor == 1.25
    assert found.prediction.backend is Backend.NCCL


def test_a_profile_of_another_kind_of_device_is_refused() -> None:
    of = job()
    identity = of.profile.identity.model_copy(update={"method": "measured", "num_devices": 8, "device_kind": "cpu"})
    profile = of.profile.model_copy(update={"identity": identity})
    with pytest.raises(InvalidProfileError, match=r"identity\.device_kind: found cpu\n.*gpu, as in this job"):
        make_job(
            of.chain, of.cluster, global_batch=8, seq_len=of.seq_len, precision="bf16", memory=None, profile=profile
        )


def test_if_nothing_fits_as_reported_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    report_more(monkeypatch, 2**50)
    found = plan_job(job(), PlanOptions())
    assert found.plan is None
    assert "per device, -" not in found.miss_text, "what is missing is never less than nothing"
