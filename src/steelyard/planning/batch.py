"""The global batch that is worth its size: doubled while throughput grows and it fits.

The published planners grow the batch until memory is full. Where microbatches can be added without end, memory never
is: throughput only nears a limit, since what is done once a step is spread over ever more samples. So growth also ends
where doubling gains next to nothing (`LEAST_GAIN`).

Source: Miao et al. 2022, Algorithm 1 (the outer loop over batch sizes).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from steelyard.cost.setting import Job
from steelyard.planning.choose import PlanningResult, plan_job
from steelyard.planning.problem import PlanOptions

LEAST_GAIN = 0.01
"""Throughput that a batch twice as large must gain to be worth it."""
MAX_DOUBLINGS = 10
"""Batches up to about a thousand samples per device are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """A global batch that was tried: tokens/s of its best plan, or None and why there is none."""

    global_batch: int
    tokens_per_s: float | None
    reason: str
    result: PlanningResult


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGrowth:
    """The batches tried, rising, the plan of the one chosen, and why growth ended there."""

    trials: tuple[BatchTrial, ...]
    stopped: str
    result: PlanningResult


def grow_batch(
    job: Job, options: PlanOptions, *, top: int, progress: Callable[[str], None] = lambda _: None
) -> BatchGrowth:
    """The plan of the global batch beyond which doubling gains less than `LEAST_GAIN`, or nothing fits.

    Starts from one sample per device, or from half as many, and so on, where that does not fit. The batch of ``job``
    plays no part.
    """

    def attempt(count: int) -> BatchTrial:
        progress(f"planning for a global batch of {count}")
        return _try(replace(job, global_batch=count), options, top)

    best = attempt(job.cluster.num_devices)
    trials = [best]
    while best.tokens_per_s is None and best.global_batch % 2 == 0:
        best = attempt(best.global_batch // 2)
        trials.append(best)
    if best.tokens_per_s is None:
        return _growth(trials, "nothing fits, however small the batch", best)
    if len(trials) > 1:
        return _growth(trials, f"{trials[-2].global_batch} samples do not fit", best)
    for _ in range(MAX_DOUBLINGS):
        trial = attempt(2 * best.global_batch)
        trials.append(trial)
        if trial.tokens_per_s is None:
            return _growth(trials, f"{trial.global_batch} samples do not fit", best)
        if best.result.has_margin and not trial.result.has_margin:
            words = f"{trial.global_batch} samples fit under pressure alone: no plan leaves the memory margin free"
            return _growth(trials, words, best)
        gain = trial.tokens_per_s / best.tokens_per_s - 1
        if gain < LEAST_GAIN:
            words = f"{trial.global_batch} samples change throughput by {gain:+.2%} only"
            return _growth(trials, words, best)
        best = trial
    return _growth(trials, f"{MAX_DOUBLINGS} doublings were tried", best)


def _growth(trials: list[BatchTrial], stopped: str, best: BatchTrial) -> BatchGrowth:
    ordered = sorted(trials, key=lambda trial: trial.global_batch)
    return BatchGrowth(trials=tuple(ordered), stopped=stopped, result=best.result)


def _try(job: Job, options: PlanOptions, top: int) -> BatchTrial:
    result = plan_job(job, options, top=top)
    prediction = result.plan.prediction if result.plan else None
    speed = prediction.tokens_per_s_per_device * job.cluster.num_devices if prediction else None
    return BatchTrial(global_batch=job.global_batch, tokens_per_s=speed, reason=result.miss_text, result=result)
