"""What the cost model says of each published run: seconds, memory and whether it fits, or why it says nothing."""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from steelyard.cost.predict import predict
from steelyard.units import GIB
from steelyard.validation.jobs import Case, Skipped, case_of
from steelyard.validation.rows import PublishedRun

COLUMNS = ("id", "step_time_s", "peak_mem_gib", "fits", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of one run."""

    run: PublishedRun
    step_time_s: float
    peak_bytes: int
    """Upper bound of what the fullest rank reserves, without the process's context, which torch does not count."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpredicted:
    """A run that is skipped, and why."""

    run: PublishedRun
    reason: str


Outcome = Forecast | Unpredicted


def forecast(run: PublishedRun) -> Outcome:
    """The prediction for one run from the catalogue alone."""
    case = case_of(run)
    return Unpredicted(run=run, reason=case.reason) if isinstance(case, Skipped) else forecast_case(case)


def forecast_case(case: Case) -> Forecast:
    """The prediction for a run that the cost model can price."""
    cost = predict(case.plan, case.job)
    peak = max(stage.total_bytes for stage in cost.stages)
    return Forecast(run=case.run, step_time_s=cost.step_time_s, peak_bytes=peak, fits=cost.fits)


def forecast_all(runs: Iterable[PublishedRun], progress: Callable[[], None] = lambda: None) -> tuple[Outcome, ...]:
    """The predictions for all runs in their order; ``progress`` is called after each."""
    outcomes = []
    for run in runs:
        outcomes.append(forecast(run))
        progress()
    return tuple(outcomes)


def write_predictions(outcomes: Iterable[Outcome], path: Path) -> None:
    """Writes one line per run: seconds and GiB of a prediction, or the reason why there is none."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for outcome in outcomes:
            writer.writerow(_line(outcome))


def _line(outcome: Outcome) -> tuple[str, ...]:
    if isinstance(outcome, Unpredicted):
        return (outcome.run.id, "", "", "", outcome.reason)
    peak = f"{outcome.peak_bytes / GIB:.4f}"
    return (outcome.run.id, f"{outcome.step_time_s:.6g}", peak, str(int(outcome.fits)), "")
