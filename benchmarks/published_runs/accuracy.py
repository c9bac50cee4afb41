r"""Errors by class and source: time, memory, verdicts on memory, and targets; `../scoreboard.py` writes them as a page.

Time is judged as `classes.counts_for_time` says. Of adapters, whose rows are many repeats of few plans, each plan of a
job counts once (`order.distinct_plans`). The figure of a class is the mean over its sources of `MIN_JUDGED` rows or
more, each weighing the same; over all rows together where no source has as many.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from published_runs.classes import (
    ADAPTERS,
    BLACKWELL,
    CDNA3_ON,
    CLASSES,
    CONTEXT,
    DENSE,
    DEVICE_GROUPS,
    EIGHT_BIT,
    EXPERTS,
    class_of,
    counts_for_time,
)
from published_runs.forecast import Forecast, Outcome
from published_runs.order import RankedJob, measured_plans, order_by_class
from published_runs.rows import PublishedRun
from published_runs.score import ErrorSummary, measured_memory, time_errors
from published_runs.targets import MIN_JUDGED, TargetLine, most

TOO_LOW = 0.05
"""Under-prediction of memory beyond which a row counts as too low."""
_KINDS = (*CLASSES, *DEVICE_GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of a source's runs in one class or group of devices: predicted over measured minus one."""

    kind: str
    source: str
    values: tuple[float, ...]

    @property
    def summary(self) -> ErrorSummary:
        """Their figures."""
        found = ErrorSummary.of(self.values)
        assert found is not None, "a source has runs"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KindErrors:
    """Errors of a class or a group of devices."""

    kind: str
    rows: int
    sources: int
    judged: int
    """Sources of `MIN_JUDGED` rows or more, over which the figures are means; 0: over all rows together."""
    bias: float
    median_abs: float
    p90_abs: float
    worst: float
    median_of_all: float
    """The median error where sources of fewer rows weigh too, in proportion to their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Memory of a source's runs in one class: errors, and runs that are called wrongly."""

    kind: str
    source: str
    errors: ErrorSummary | None
    too_low: int
    """Of the runs with an error those that are predicted too low by more than `TOO_LOW`."""
    oom: int
    false_fits: int
    ran: int
    false_misfits: int


def time_by_source(outcomes: Iterable[Outcome]) -> tuple[Errors, ...]:
    """Errors of time by class and source."""
    return _grouped((class_of(run), run.source, error) for run, error in _time_errors(outcomes))


def time_of_devices(outcomes: Iterable[Outcome]) -> tuple[Errors, ...]:
    """Errors of time by group of devices and source, over all classes."""
    group = {gpu: name for name, gpus in DEVICE_GROUPS.items() for gpu in gpus}
    found = ((group.get(run.text("gpu")), run.source, error) for run, error in _time_errors(outcomes))
    return _grouped((name, source, error) for name, source, error in found if name is not None)


def judged_once(outcomes: Iterable[Outcome]) -> list[Forecast]:
    """The timed runs that are judged; of adapters each plan of a job once."""
    timed = [each for each in outcomes if isinstance(each, Forecast) and counts_for_time(each.run)]
    adapters = measured_plans(each for each in timed if class_of(each.run) == ADAPTERS)
    return [each for each in timed if class_of(each.run) != ADAPTERS] + [each for plans in adapters for each in plans]


def _time_errors(outcomes: Iterable[Outcome]) -> list[tuple[PublishedRun, float]]:
    judged = judged_once(outcomes)
    return [(each.run, error) for each, error in zip(judged, time_errors(judged), strict=True)]


def _grouped(found: Iterable[tuple[str, str, float]]) -> tuple[Errors, ...]:
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kind, source, error in found:
        values[kind, source].append(error)
    lines = [Errors(kind=kind, source=source, values=tuple(each)) for (kind, source), each in values.items()]
    return tuple(sorted(lines, key=lambda line: (_KINDS.index(line.kind), line.source)))


def errors_by_kind(lines: Sequence[Errors]) -> tuple[KindErrors, ...]:
    """The figures of every class or group of devices that has runs."""
    return tuple(
        _kind_errors(kind, found) for kind in _KINDS if (found := [line for line in lines if line.kind == kind])
    )


def _kind_errors(kind: str, lines: Sequence[Errors]) -> KindErrors:
    together = Errors(kind=kind, source="", values=tuple(error for line in lines for error in line.values)).summary
    judged = [line.summary for line in lines if len(line.values) >= MIN_JUDGED]
    over = judged or [together]
    weights = [min(1.0, len(line.values) / MIN_JUDGED) for line in lines]
    return KindErrors(
        kind=kind,
        rows=together.count,
        sources=len(lines),
        judged=len(judged),
        bias=float(np.mean([each.bias for each in over])),
        median_abs=float(np.mean([each.median_abs for each in over])),
        p90_abs=float(np.mean([each.p90_abs for each in over])),
        worst=together.worst,
        median_of_all=float(np.average([line.summary.median_abs for line in lines], weights=weights)),
    )


def counts_for_memory(run: PublishedRun) -> bool:
    """Whether a run's memory is judged: as `counts_for_time`, whether or not its time was measured."""
    return run.is_open and (run.is_recommended or class_of(run) != DENSE)


def memory_by_source(outcomes: Iterable[Outcome]) -> tuple[MemoryLine, ...]:
    """Errors of memory and verdicts by class and source; failed runs need no recommendation to have a verdict."""
    found: dict[tuple[str, str], list[Forecast]] = defaultdict(list)
    for each in outcomes:
        if isinstance(each, Forecast) and each.run.is_open:
            found[class_of(each.run), each.run.source].append(each)
    lines = [_memory_line(kind, source, runs) for (kind, source), runs in found.items()]
    kept = (line for line in lines if line.errors is not None or line.oom)
    return tuple(sorted(kept, key=lambda line: (_KINDS.index(line.kind), line.source)))


def _memory_line(kind: str, source: str, runs: Sequence[Forecast]) -> MemoryLine:
    """Errors of memory; where a unit is not certain, too low is against the smaller reading, errors the larger."""
    pairs = [(each.peak_bytes, measured_memory(each.run)) for each in runs if counts_for_memory(each.run)]
    known = [(peak, readings) for peak, readings in pairs if readings is not None]
    oom = [each for each in runs if each.run.status == "oom"]
    ran = [each for each in runs if each.run.status == "ok"]
    return MemoryLine(
        kind=kind,
        source=source,
        errors=ErrorSummary.of([peak / high - 1 for peak, (_, high) in known]),
        too_low=sum(peak / low - 1 < -TOO_LOW for peak, (low, _) in known),
        oom=len(oom),
        false_fits=sum(each.fits for each in oom),
        ran=len(ran),
        false_misfits=sum(not each.fits for each in ran),
    )


def accuracy_targets(
    time: Sequence[Errors],
    devices: Sequence[Errors],
    left_out: Sequence[Errors],
    memory: Sequence[MemoryLine],
    jobs: Sequence[RankedJob],
) -> tuple[TargetLine, ...]:
    """Every target with what was reached; None where nothing was measured or left out."""
    kinds = {each.kind: each for each in (*errors_by_kind(time), *errors_by_kind(devices))}
    without = {each.kind: each for each in errors_by_kind(left_out)}

    def reached(kind: str, figure: Callable[[KindErrors], float], of: dict[str, KindErrors] = kinds) -> float | None:
        return figure(of[kind]) if kind in of else None

    def median_abs(each: KindErrors) -> float:
        return each.median_abs

    def p90_abs(each: KindErrors) -> float:
        return each.p90_abs

    low = [each.too_low / each.errors.count for each in memory if each.errors and each.errors.count >= MIN_JUDGED]
    regret = {each.kind: each.regret for each in order_by_class([job for job in jobs if not job.contradicts])}
    return (
        most(f"{DENSE}: median error", 0.054, reached(DENSE, median_abs)),
        most(f"{DENSE}: the same, source left out", 0.075, reached(DENSE, median_abs, without)),
        most(f"{DENSE}: 90th percentile", 0.18, reached(DENSE, p90_abs)),
        most(f"{EXPERTS}: median error", 0.12, reached(EXPERTS, median_abs)),
        most(f"{EXPERTS}: the same, source left out", 0.18, reached(EXPERTS, median_abs, without)),
        most(f"{EXPERTS}: 90th percentile", 0.40, reached(EXPERTS, p90_abs)),
        most(f"{CONTEXT}: median error", 0.08, reached(CONTEXT, median_abs)),
        most(f"{EIGHT_BIT}: median error", 0.10, reached(EIGHT_BIT, median_abs)),
        most(f"{EIGHT_BIT}: the same, source left out", 0.15, reached(EIGHT_BIT, median_abs, without)),
        most(f"{ADAPTERS}: median error", 0.10, reached(ADAPTERS, median_abs)),
        most(f"{BLACKWELL}: median error", 0.10, reached(BLACKWELL, median_abs)),
        most(f"{CDNA3_ON}: median error", 0.15, reached(CDNA3_ON, median_abs)),
        most("memory too low by over 5 %, the worst source", 0.04, max(low, default=None)),
        most("regret, jobs that do not contradict themselves", 0.025, regret.get(DENSE)),
        most("regret, models with experts", 0.10, regret.get(EXPERTS)),
    )
