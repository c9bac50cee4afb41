"""What the cost model says of each published run: seconds, memory and whether it fits, or why it says nothing."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from published_runs.jobs import Case, Skipped, case_of
from published_runs.rows import PublishedRun
from steelyard.cost.predict import predict
from steelyard.errors import UserError
from steelyard.planning.request import MARGIN
from steelyard.units import GIB

STATES = ("parameters", "gradients", "optimizer")
RESERVED = 0.23
"""Reserved over allocated memory minus one where there is room: 6 to 23 % on public torchtitan runs, here the most.
Short of memory torch gives the reserve back, so whether a plan fits is judged with less (`Execution.reserve`)."""
STEP = "optimizer step"
EVERYTHING = "reserved, nvidia-smi"
"""The kind of measurement that counts all that a process takes of a device."""
COLUMNS = ("id", "step_time_s", "peak_mem_gib", "fits", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of one run."""

    run: PublishedRun
    step_time_s: float
    peak_bytes: int
    """Upper bound of what the row's measurement counts (`counted_bytes`) on the rank that it is of."""
    fits: bool
    has_margin: bool
    """Whether it leaves as much free as a plan is searched with (`steelyard.planning.request.MARGIN`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpredicted:
    """A run that is skipped, and why."""

    run: PublishedRun
    reason: str


Outcome = Forecast | Unpredicted


def forecast(run: PublishedRun) -> Outcome:
    """The prediction for one run from the catalogue alone."""
    case = case_of(run)
    if isinstance(case, Skipped):
        return Unpredicted(run=run, reason=case.reason)
    try:
        return forecast_case(case)
    except UserError as error:  # such as a precision that the device lacks
        return Unpredicted(run=run, reason=f"no price: {error.found}")


def forecast_case(case: Case) -> Forecast:
    """The prediction for a run that the cost model can price."""
    cost = predict(case.plan, case.job)
    stages = [stage.memory_bytes for stage in cost.stages]
    peaks = _stage_peaks(case, stages, case.run.text("mem_kind"))
    return Forecast(
        run=case.run,
        step_time_s=cost.step_time_s,
        peak_bytes={"first": peaks[0], "last": peaks[-1], "fullest": max(peaks)}[case.reports],
        fits=cost.fits,
        has_margin=has_margin(case, stages),
    )


def has_margin(case: Case, stages: Sequence[Mapping[str, int]]) -> bool:
    """Whether a plan whose stages take so much leaves its margin free beside all that an allocator usually keeps.

    These runs had none that expands its segments, as those of this project have.
    """
    return max(_stage_peaks(case, stages, EVERYTHING)) <= case.job.budget_bytes * (1 - MARGIN)


def _stage_peaks(case: Case, stages: Sequence[Mapping[str, int]], kind: str) -> list[int]:
    """The bytes of a rank of each stage that a kind of measurement counts."""
    peaks = []
    for part, memory_bytes in zip(case.plan.parts, stages, strict=False):
        data_degree = part.runs[0].strategy.data_degree
        step_bytes = case.job.execution.step_bytes(memory_bytes["parameters"], data_degree)
        peaks.append(counted_bytes(memory_bytes, kind, step_bytes) + case.workspace_bytes)
    peaks[-1] += case.further_bytes
    return peaks


def counted_bytes(memory_bytes: Mapping[str, int], kind: str, step_bytes: int = 0) -> int:
    """The bytes of a rank that a kind of measurement counts; ``step_bytes``: what the optimizer's step takes.

    The driver's tool sees the process's context, torch does not. What torch reserves is above what it has allocated by
    `RESERVED`, of all that is not there from step to step. The tensors of the step are each as large as a rank's share
    of the model, too large for any block that activations left behind: they are reserved on top while there is room.
    """
    kind = kind.lower()
    tensors = {name: each for name, each in memory_bytes.items() if name not in ("context", "allocator slack")}
    if _is_allocated(kind):
        return sum(tensors.values())
    tensors[STEP] = step_bytes
    comes_and_goes = sum(each for name, each in tensors.items() if name not in (*STATES, STEP))
    context = memory_bytes.get("context", 0) if "smi" in kind else 0
    return sum(tensors.values()) + int(RESERVED * comes_and_goes) + context


def _is_allocated(kind: str) -> bool:
    return "alloc" in kind and "reserved" not in kind


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
