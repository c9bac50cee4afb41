"""Plans of one job after another, of which each is a trial of a batch or a length."""

from dataclasses import dataclass

from steelyard.cost.setting import Job
from steelyard.planning.choose import PlanningResult, plan_job
from steelyard.planning.problem import PlanOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A size of a job that was tried: tokens/s of its best plan, or None and why there is none."""

    size: int
    """Samples of a step, or tokens of a sample."""
    tokens_per_s: float | None
    reason: str
    result: PlanningResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What was tried, smallest first, the plan of the one chosen, and why no other was tried."""

    tried: tuple[Trial, ...]
    stopped: str
    result: PlanningResult


def try_job(job: Job, options: PlanOptions, *, size: int, top: int) -> Trial:
    """The trial of a job, whose batch or length is ``size``."""
    result = plan_job(job, options, top=top)
    prediction = result.plan.prediction if result.plan else None
    speed = prediction.tokens_per_s_per_device * job.cluster.num_devices if prediction else None
    return Trial(size=size, tokens_per_s=speed, reason=result.miss_text, result=result)
