"""The project's targets for predictions, what was reached, and the distance: sources weigh the same in every figure.

They hold for runs that whoever compiled the table recommends and for sources of `MIN_JUDGED` such runs or more: times
of dense models that compute in bf16 or fp16, memory of all. Whether a run fits is judged by rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from published_runs.forecast import Forecast, Outcome, Unpredicted
from published_runs.rows import PublishedRun
from published_runs.score import ErrorSummary, LeftOut, SourceScore, time_errors

MIN_JUDGED = 20
"""Runs of a source from which on it counts as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLine:
    """One target: the figure must not exceed (``at most``) or fall below (``at least``) the bound."""

    name: str
    bound: float
    at_most: bool
    reached: float | None

    @property
    def is_met(self) -> bool | None:
        """Whether it is reached; None where nothing measured it."""
        if self.reached is None:
            return None
        return self.reached <= self.bound if self.at_most else self.reached >= self.bound


def is_recommended_dense(run: PublishedRun) -> bool:
    """Whether a run counts towards the targets of time and regret."""
    return run.is_dense_half and run.is_recommended


def is_dense(run: PublishedRun) -> bool:
    """Whether a run counts towards the targets of memory, which failed runs are part of."""
    return run.is_dense_half


def counts_for_memory(run: PublishedRun) -> bool:
    """Whether a run counts towards the verdicts of memory, which failed runs are part of, or towards its errors."""
    return is_dense(run) or run.is_recommended


def summarise(
    timed: Sequence[SourceScore],
    held: Sequence[SourceScore],
    outcomes: Sequence[Outcome],
    left_out: Sequence[LeftOut] = (),
) -> tuple[TargetLine, ...]:
    """Every target with what was reached: ``timed`` are scores of recommended dense runs, ``held`` of memory."""
    judged = [score for score in timed if score.zero_shot and score.zero_shot.count >= MIN_JUDGED]
    weighed = [score for score in held if score.memory and score.memory.errors.count >= MIN_JUDGED]
    ranked = [score.regret for score in judged if score.regret]
    again = [each.regret for each in left_out if each.regret]
    verdicts = [score.verdicts for score in held]
    experts, context = (_median_abs(outcomes, keep) for keep in (_has_ep, _has_cp))
    zero, scaled = [s.zero_shot for s in judged if s.zero_shot], [s.scaled for s in judged if s.scaled]
    return (
        most("time, zero-shot: median |error|", 0.08, _mean([e.median_abs for e in zero])),
        most("the same, left out", 0.10, _mean([each.zero_shot.median_abs for each in left_out])),
        most("time, zero-shot: |bias|", 0.04, _size(_mean([e.bias for e in zero]))),
        most("time, left out: 90th percentile", 0.30, _mean([each.zero_shot.p90_abs for each in left_out])),
        most("time, scaled: median |error|", 0.05, _mean([e.median_abs for e in scaled])),
        most("time, scaled: 90th percentile", 0.15, _mean([e.p90_abs for e in scaled])),
        most("regret: mean", 0.03, _mean([each.mean for each in ranked])),
        most("the same, left out", 0.05, _mean([each.mean for each in again])),
        most("regret: 90th percentile", 0.12, _mean([each.p90 for each in ranked])),
        most("time, experts in parallel: median |error|", 0.15, experts),
        most("time, context parallel: median |error|", 0.12, context),
        most("memory: too low by over 2 %", 0.05, _mean([s.memory.too_low for s in weighed if s.memory])),
        most("memory: median over-prediction", 0.08, _mean([s.memory.over for s in weighed if s.memory])),
        most("out of memory, called fitting", 0.04, _part([(v.false_fits, v.num_oom) for v in verdicts])),
        most("ran, called not fitting", 0.04, _part([(v.false_misfits, v.num_ran) for v in verdicts])),
        TargetLine(name="recommended runs predicted", bound=0.85, at_most=False, reached=_predicted_part(outcomes)),
    )


def _has_ep(run: PublishedRun) -> bool:
    return (run.count("ep") or 1) > 1


def _has_cp(run: PublishedRun) -> bool:
    return (run.count("cp") or 1) > 1 and not _has_ep(run)


def _median_abs(outcomes: Iterable[Outcome], keep: Callable[[PublishedRun], bool]) -> float | None:
    """The median |error| of the time of open runs of a kind, whether they are recommended or not: they are few."""
    timed = [each for each in outcomes if isinstance(each, Forecast) and each.run.is_open and each.run.step_time_s]
    found = ErrorSummary.of(time_errors([each for each in timed if keep(each.run)]))
    return None if found is None else found.median_abs


def most(name: str, bound: float, reached: float | None) -> TargetLine:
    """A target that a figure must not exceed."""
    return TargetLine(name=name, bound=bound, at_most=True, reached=reached)


def _mean(values: Sequence[float]) -> float | None:
    """The mean over sources, each weighing the same."""
    return float(np.mean(values)) if values else None


def _size(value: float | None) -> float | None:
    return None if value is None else abs(value)


def _part(counts: Sequence[tuple[int, int]]) -> float | None:
    """The part of all such runs that is called wrongly: by rows, since some sources have five."""
    total = sum(count for _, count in counts)
    return sum(wrong for wrong, _ in counts) / total if total else None


def _predicted_part(outcomes: Iterable[Outcome]) -> float | None:
    asked = [outcome for outcome in outcomes if outcome.run.is_open and outcome.run.is_recommended]
    if not asked:
        return None
    return sum(not isinstance(outcome, Unpredicted) for outcome in asked) / len(asked)
