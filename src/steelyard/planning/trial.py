"""Plans of one job after another, of which each is a trial of a batch or a length."""

from dataclasses import dataclass

from steelyard.cost.setting import Job
from steelyard.planning.choose import PlanningResult, plan_job
from steelyard.planning.problem import PlanOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A size of a job that was tried: tokens/s of its best plan, or None and why there is none.

    What the search found is not kept in it: the tables of many sizes take gigabytes.
    """

    size: int
    """Samples of a step, or tokens of a sample."""
    tokens_per_s: float | None
    reason: str
    has_margin: bool
    """Whether the plan leaves the margin of the job free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What was tried, smallest first, why nothing else was, and which was chosen, with its plan."""

    tried: tuple[Trial, ...]
    stopped: str
    taken: Trial
    result: PlanningResult


def try_job(job: Job, options: PlanOptions, *, size: int, top: int) -> tuple[Trial, PlanningResult]:
    """The trial of a job, whose batch or length is ``size``, and what the search found."""
    result = plan_job(job, options, top=top)
    prediction = result.plan.prediction if result.plan else None
    speed = prediction.tokens_per_s_per_device * job.cluster.num_devices if prediction else None
    return Trial(size=size, tokens_per_s=speed, reason=result.miss_text, has_margin=result.has_margin), result
