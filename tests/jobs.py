"""Jobs for tests, from what a user would enter."""

from typing import Any

from steelyard.cost.job import Job
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.plan import Plan
from steelyard.planning import job
from steelyard.planning.request import PlanRequest, make_request, request_of_plan


def make_job(config: Any, cluster: Any, **asked: Any) -> Job:
    """Return the job of a request."""
    return job.job_of(make_request(config, cluster, **asked))


def job_of(plan: Plan, **given: Any) -> Any:
    """Return the job that a plan answers, there or elsewhere."""
    return job.job_of(request_of_plan(plan, **given))


def request_of(of: Job, decisions: Decisions = FREE, **asked: Any) -> PlanRequest:
    """Return the request of a job that was made by hand."""
    return PlanRequest(
        chain=of.chain,
        cluster=of.hardware,
        global_batch=of.global_batch,
        seq_len=of.seq_len,
        precision=of.precision,
        decisions=decisions,
        **asked,
    )
