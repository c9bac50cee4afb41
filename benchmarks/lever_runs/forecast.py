"""Predictions of each row: seconds, tokens per second, memory, whether it fits, or why the cost model says nothing."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lever_runs.jobs import Case, Skipped, case_of
from lever_runs.rows import Row
from steelyard.cost.predict import predict
from steelyard.errors import UserError
from steelyard.planning.settings import plan_of_settings
from steelyard.units import GIB

COLUMNS = ("id", "step_time_s", "tokens_per_s", "peak_allocated_gib", "peak_reserved_gib", "fits", "skipped")
_STATES = ("parameters", "gradients", "optimizer", "optimizer step")
_SHORTEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Prediction of a row; times are None where no length or rate is known, ``fits`` where no device is."""

    row: Row
    step_time_s: float | None
    tokens_per_s: float | None
    """Of a device or of all, as the row's rate."""
    samples_per_s: float | None
    """Of all devices."""
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    """Reserved, and the process."""
    fits: bool | None

    @property
    def is_micro_batch(self) -> bool:
        """Whether the row's seconds are those of one microbatch."""
        return "one micro-batch" in self.row.text("notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpredicted:
    """A row that is skipped, and why."""

    row: Row
    reason: str


Outcome = Forecast | Unpredicted


def forecast(row: Row) -> Outcome:
    """The prediction for one row from the catalogue alone."""
    case = case_of(row)
    if isinstance(case, Skipped):
        return Unpredicted(row=row, reason=case.reason)
    try:
        return _forecast(case)
    except UserError as error:
        return Unpredicted(row=row, reason=f"{error.field}: found {error.found}; expected {error.expected}")


class _Priced:
    """Cases without their rows, each priced once at a length."""

    def __init__(self) -> None:
        self.known: dict[object, tuple[float, dict[str, int], int]] = {}

    def __call__(self, case: Case, seq_len: int) -> tuple[float, dict[str, int], int]:
        """Seconds of a step, bytes of the fullest stage by term, and the device's bytes."""
        framework = case.framework
        key = (
            str(sorted(case.config.items(), key=str)),
            case.cluster.name,
            case.levers,
            case.settings,
            case.precision,
            case.global_batch,
            seq_len,
            framework,
        )
        text = repr(key)
        if text not in self.known:
            job = case.job(seq_len)
            cost = predict(plan_of_settings(job, case.settings), job)
            fullest = max(cost.stages, key=lambda stage: stage.total_bytes)
            self.known[text] = cost.step_time_s, dict(fullest.memory_bytes), job.budget_bytes
        return self.known[text]


@cache
def _priced() -> _Priced:
    return _Priced()


def _forecast(case: Case) -> Forecast:
    row, price = case.row, _priced()
    step_s, terms, budget = price(case, case.seq_len)
    tensors = {name: each for name, each in terms.items() if name not in ("context", "allocator slack")}
    allocated = sum(tensors.values()) + case.prompt_bytes
    beside = case.framework.reserve * sum(each for name, each in tensors.items() if name not in _STATES)
    beside += max(0.0, case.blocks_bytes - tensors.get("optimizer step", 0))
    reserved = max(allocated, min(allocated + int(beside), budget - terms.get("context", 0)))
    seconds = _seconds(case, step_s)
    seconds = seconds and seconds * case.parts
    devices = case.cluster.num_devices
    tokens = case.tokens or (case.global_batch * case.mean_len if case.mean_len else None)
    of_rate = devices if row.text("rate_scope").startswith("gpu") else 1
    return Forecast(
        row=row,
        step_time_s=seconds,
        tokens_per_s=tokens / seconds / of_rate if seconds and tokens else None,
        samples_per_s=case.global_batch / seconds if seconds else None,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + terms.get("context", 0),
        fits=sum(terms.values()) + case.prompt_bytes <= budget if row.text("gpu") else None,
    )


def _seconds(case: Case, at_longest: float) -> float | None:
    """Seconds of a step of the mean length, between those of the powers of two beside it."""
    if case.mean_len is None or not case.has_rates:
        return None
    if case.mean_len == case.seq_len:
        return at_longest
    low = _SHORTEST
    while 2 * low <= case.mean_len:
        low *= 2
    high = min(2 * low, case.seq_len)
    low = min(low, case.seq_len)
    price = _priced()
    low_s, high_s = (price(case, each)[0] for each in (low, high))
    return low_s if high == low else low_s + (high_s - low_s) * (case.mean_len - low) / (high - low)


def write_predictions(outcomes: Iterable[Outcome], path: Path) -> None:
    """Writes a line per row: a prediction, or the reason why there is none."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(_line, outcomes))


def _line(outcome: Outcome) -> tuple[str, ...]:
    if isinstance(outcome, Unpredicted):
        return (outcome.row.id, "", "", "", "", "", outcome.reason)
    seconds = reported_s(outcome)
    return (
        outcome.row.id,
        "" if seconds is None else f"{seconds:.6g}",
        "" if outcome.tokens_per_s is None else f"{outcome.tokens_per_s:.6g}",
        f"{outcome.allocated_bytes / GIB:.4f}",
        f"{outcome.reserved_bytes / GIB:.4f}",
        "" if outcome.fits is None else str(int(outcome.fits)),
        "",
    )


def reported_s(found: Forecast) -> float | None:
    """The seconds that the row's ``step_time_s`` counts."""
    if found.step_time_s is None or not found.is_micro_batch:
        return found.step_time_s
    return found.step_time_s / (found.row.count("grad_accum") or 1)
