"""The project's targets for predictions, what was reached, and the distance: sources weigh the same in every figure.

They hold for runs that whoever compiled the table recommends, of dense models that compute in bf16 or fp16; the part
that is predicted, not skipped, is that of the fully specified runs of that kind (tier A).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from published_runs.forecast import Outcome, Unpredicted
from published_runs.rows import PublishedRun
from published_runs.score import SourceScore


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


def summarise(
    timed: Sequence[SourceScore], held: Sequence[SourceScore], outcomes: Iterable[Outcome]
) -> tuple[TargetLine, ...]:
    """Every target with what was reached: ``timed`` are scores of recommended runs, ``held`` of all dense ones."""
    verdicts = [score.verdicts for score in held]
    return (
        _most(
            "time, zero-shot: median |error|",
            0.12,
            _mean(timed, lambda s: s.zero_shot.median_abs if s.zero_shot else None),
        ),
        _most(
            "time, zero-shot: |bias|", 0.04, _size(_mean(timed, lambda s: s.zero_shot.bias if s.zero_shot else None))
        ),
        _most("time, scaled: median |error|", 0.07, _mean(timed, lambda s: s.scaled.median_abs if s.scaled else None)),
        _most("time, scaled: 90th percentile", 0.20, _mean(timed, lambda s: s.scaled.p90_abs if s.scaled else None)),
        _most("memory: too low by over 2 %", 0.02, _mean(timed, lambda s: s.memory.too_low if s.memory else None)),
        _most("memory: median over-prediction", 0.10, _mean(timed, lambda s: s.memory.over if s.memory else None)),
        _most("out of memory, called fitting", 0.03, _part([(v.false_fits, v.num_oom) for v in verdicts])),
        _most("ran, called not fitting", 0.05, _part([(v.false_misfits, v.num_ran) for v in verdicts])),
        _most("regret, zero-shot: mean", 0.04, _mean(timed, lambda s: s.regret.mean if s.regret else None)),
        _most("regret, zero-shot: 90th percentile", 0.12, _mean(timed, lambda s: s.regret.p90 if s.regret else None)),
        TargetLine(name="tier A dense runs predicted", bound=0.85, at_most=False, reached=_predicted_part(outcomes)),
    )


def _most(name: str, bound: float, reached: float | None) -> TargetLine:
    return TargetLine(name=name, bound=bound, at_most=True, reached=reached)


def _mean(scores: Sequence[SourceScore], value: Callable[[SourceScore], float | None]) -> float | None:
    """The mean over the sources that have the figure, each weighing the same."""
    found = [each for score in scores if (each := value(score)) is not None]
    return float(np.mean(found)) if found else None


def _size(value: float | None) -> float | None:
    return None if value is None else abs(value)


def _part(counts: Sequence[tuple[int, int]]) -> float | None:
    """The mean over the sources that have such runs of the part that is called wrongly."""
    found = [wrong / total for wrong, total in counts if total]
    return float(np.mean(found)) if found else None


def _predicted_part(outcomes: Iterable[Outcome]) -> float | None:
    asked = [
        outcome
        for outcome in outcomes
        if outcome.run.is_open and outcome.run.is_dense_half and outcome.run.text("tier") == "A"
    ]
    if not asked:
        return None
    return sum(not isinstance(outcome, Unpredicted) for outcome in asked) / len(asked)
