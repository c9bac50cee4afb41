"""The global batch that is worth its size: doubled while throughput grows and it fits.

The published planners grow the batch until memory is full. Where microbatches can be added without end, memory never
is: throughput only nears a limit, since what is done once a step is spread over ever more samples. So growth also ends
where doubling gains next to nothing (`LEAST_GAIN`).

Source: Miao et al. 2022, Algorithm 1 (the outer loop over batch sizes).
"""

from collections.abc import Callable
from dataclasses import replace

from steelyard.cost.setting import Job
from steelyard.planning.choose import PlanningResult
from steelyard.planning.problem import PlanOptions
from steelyard.planning.trial import Trial, Trials, try_job

LEAST_GAIN = 0.01
"""Throughput that a batch twice as large must gain to be worth it."""
MAX_DOUBLINGS = 10
"""Batches up to about a thousand samples per device are tried."""


def grow_batch(job: Job, options: PlanOptions, *, top: int, progress: Callable[[str], None] = lambda _: None) -> Trials:
    """The plan of the global batch beyond which doubling gains less than `LEAST_GAIN`, or nothing fits.

    Starts from one sample per device, or from half as many, and so on, where that does not fit. The batch of ``job``
    plays no part.
    """

    def attempt(count: int) -> tuple[Trial, PlanningResult]:
        progress(f"planning for a global batch of {count}")
        return try_job(replace(job, global_batch=count), options, size=count, top=top)

    best, result = attempt(job.cluster.num_devices)
    trials = [best]
    while best.tokens_per_s is None and best.size % 2 == 0:
        best, result = attempt(best.size // 2)
        trials.append(best)
    if best.tokens_per_s is None:
        return _growth(trials, "nothing fits, however small the batch", best, result)
    if len(trials) > 1:
        return _growth(trials, f"{trials[-2].size} samples do not fit", best, result)
    for _ in range(MAX_DOUBLINGS):
        trial, larger = attempt(2 * best.size)
        trials.append(trial)
        if trial.tokens_per_s is None:
            return _growth(trials, f"{trial.size} samples do not fit", best, result)
        if best.has_margin and not trial.has_margin:
            words = f"{trial.size} samples fit under pressure alone: no plan leaves the memory margin free"
            return _growth(trials, words, best, result)
        gain = trial.tokens_per_s / best.tokens_per_s - 1
        if gain < LEAST_GAIN:
            words = f"{trial.size} samples change throughput by {gain:+.2%} only"
            return _growth(trials, words, best, result)
        best, result = trial, larger
    return _growth(trials, f"{MAX_DOUBLINGS} doublings were tried", best, result)


def _growth(trials: list[Trial], stopped: str, best: Trial, result: PlanningResult) -> Trials:
    ordered = sorted(trials, key=lambda trial: trial.size)
    return Trials(tried=tuple(ordered), stopped=stopped, taken=best, result=result)
