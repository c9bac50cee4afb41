r"""How far predictions are from what was published: errors, verdicts on memory, and regret, per source and in all.

| figure | formula                                                            | over                        |
|--------|--------------------------------------------------------------------|-----------------------------|
| error  | predicted / measured − 1                                           | runs with the measurement   |
| bias   | median error                                                       | runs of a source            |
| regret | time of the plan that is ranked first / fastest measured time − 1  | jobs of five plans or more  |
| of all | the same of that plan over any plan of the job                     | the same jobs               |
| scaled | error after one factor per source, framework and device: the       | runs                        |
|        | median of measured / predicted                                     |                             |

Ranked are a job's plans that leave their margin of memory free, or all where none does.

A job's plans differ in nothing but the plan, so a factor per device and framework cannot change the regret by much: it
is scored with both all the same. In the summary every source weighs the same, whatever its number of runs.

A memory figure whose unit is not stated (``GB?``) counts as too low if it is below the published number in decimal GB
and its over-prediction is taken against the number in GiB.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from published_runs.forecast import Forecast, Outcome
from published_runs.rows import PublishedRun
from steelyard.units import GB, GIB

MIN_PLANS = 5
"""Measured plans that a job needs to have a regret."""
TOO_LOW = 0.02
"""Under-prediction of memory beyond which a row counts as too low."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Signed errors of a number of runs: predicted over measured minus one."""

    count: int
    median_abs: float
    p90_abs: float
    worst: float
    bias: float

    @staticmethod
    def of(errors: Sequence[float]) -> "ErrorSummary | None":
        """The summary, or None of no errors. ``worst`` is the error that is furthest from zero, with its sign."""
        if not errors:
            return None
        sizes = [abs(error) for error in errors]
        return ErrorSummary(
            count=len(errors),
            median_abs=median(sizes),
            p90_abs=float(np.quantile(sizes, 0.9)),
            worst=max(errors, key=abs),
            bias=median(errors),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Errors of memory: too low is judged against the smaller reading of a unit, over-prediction against the larger."""

    errors: ErrorSummary
    too_low: float
    """Part of the runs that are predicted too low by more than `TOO_LOW`."""
    over: float
    """Median error against the larger reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Runs whose fitting is known, and how many are called wrongly."""

    num_oom: int
    false_fits: int
    num_ran: int
    false_misfits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretSummary:
    """Regret of a number of jobs."""

    jobs: int
    mean: float
    p90: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScore:
    """Everything that is said of one source, or in the summary of all of them."""

    source: str
    num_runs: int
    num_predicted: int
    zero_shot: ErrorSummary | None
    scaled: ErrorSummary | None
    memory: MemorySummary | None
    verdicts: Verdicts
    regret: RegretSummary | None
    regret_of_all: RegretSummary | None
    scaled_regret: RegretSummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A source as rates that were fitted without it predict it."""

    source: str
    zero_shot: ErrorSummary
    scaled: ErrorSummary
    regret: RegretSummary | None
    log_ratios: Mapping[str, float]
    """Logarithms of predicted over measured time by the id of the run."""
    parameters: Mapping[str, float]
    """The rates that the other sources give, by name as `calibrate.USUAL` has them."""


Predicate = Callable[[PublishedRun], bool]


def score_sources(outcomes: Iterable[Outcome], keep: Predicate) -> tuple[SourceScore, ...]:
    """One score per source over its open runs that ``keep`` admits, in order of name."""
    by_source: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.run.is_open and keep(outcome.run):
            by_source[outcome.run.source].append(outcome)
    return tuple(_score(source, by_source[source]) for source in sorted(by_source))


def _score(source: str, outcomes: Sequence[Outcome]) -> SourceScore:
    forecasts = [outcome for outcome in outcomes if isinstance(outcome, Forecast)]
    timed = [each for each in forecasts if each.run.step_time_s]
    factors = scale_factors(timed)
    zero_shot = {each.run.id: each.step_time_s for each in timed}
    scaled = {each.run.id: each.step_time_s * factors[_scale_key(each.run)] for each in timed}
    return SourceScore(
        source=source,
        num_runs=len(outcomes),
        num_predicted=len(forecasts),
        zero_shot=ErrorSummary.of(time_errors(timed)),
        scaled=ErrorSummary.of(scaled_errors(timed)),
        memory=_memory(forecasts),
        verdicts=_verdicts(forecasts),
        regret=regret(timed, zero_shot),
        regret_of_all=regret(timed, zero_shot, of_all=True),
        scaled_regret=regret(timed, scaled),
    )


def _scale_key(run: PublishedRun) -> tuple[str, str, str]:
    return run.source, run.text("framework"), f"{run.text('gpu')} {run.text('gpu_mem_gb')}"


def scale_factors(timed: Sequence[Forecast]) -> Mapping[tuple[str, str, str], float]:
    """For each source, framework and device the median of measured over predicted time."""
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in timed:
        ratios[_scale_key(each.run)].append(measured_s(each) / each.step_time_s)
    return {key: median(values) for key, values in ratios.items()}


def measured_s(timed: Forecast) -> float:
    assert timed.run.step_time_s is not None, "only timed runs are asked"
    return timed.run.step_time_s


def time_errors(timed: Sequence[Forecast]) -> list[float]:
    """Predicted over measured time minus one."""
    return [each.step_time_s / measured_s(each) - 1 for each in timed]


def scaled_errors(timed: Sequence[Forecast]) -> list[float]:
    """The same with each prediction times its source's, framework's and device's factor."""
    factors = scale_factors(timed)
    return [factors[_scale_key(each.run)] * each.step_time_s / measured_s(each) - 1 for each in timed]


def regret(
    timed: Sequence[Forecast], predicted_s: Mapping[str, float], *, of_all: bool = False
) -> RegretSummary | None:
    """How much slower the plan that is predicted fastest is than the fastest, over jobs with enough plans.

    Of the plans that leave their margin free, which the search prefers, or of any plan where none does; with
    ``of_all`` the choice is the same, and held against any plan.
    """
    jobs: dict[str, list[Forecast]] = defaultdict(list)
    for each in timed:
        jobs[each.run.job].append(each)
    found = []
    for runs in jobs.values():
        if len(runs) >= MIN_PLANS:
            searched = plans_searched(runs)
            chosen = ranked_first(searched, predicted_s)
            found.append(regret_of(chosen, runs if of_all else searched))
    if not found:
        return None
    return RegretSummary(
        jobs=len(found), mean=sum(found) / len(found), p90=float(np.quantile(found, 0.9)), worst=max(found)
    )


def plans_searched(runs: Sequence[Forecast]) -> Sequence[Forecast]:
    """The plans of a job that leave their margin of memory free, or all where none does."""
    return [each for each in runs if each.has_margin] or runs


def ranked_first(runs: Sequence[Forecast], predicted_s: Mapping[str, float]) -> Forecast:
    """The plan that is predicted fastest; of equals the first by the id of its run."""
    return min(runs, key=lambda each: (predicted_s[each.run.id], each.run.id))


def regret_of(chosen: Forecast, runs: Sequence[Forecast]) -> float:
    """How much longer a plan took than the fastest of these, as a fraction."""
    return measured_s(chosen) / min(map(measured_s, runs)) - 1


def measured_memory(run: PublishedRun) -> tuple[float, float] | None:
    """The smaller and the larger reading of a run's published memory, in bytes; equal where the unit is certain."""
    certain = run.number("peak_mem_gib")
    if certain is not None:
        return certain * GIB, certain * GIB
    value = run.number("peak_mem")
    return None if value is None else (value * GB, value * GIB)


def _memory(forecasts: Sequence[Forecast]) -> MemorySummary | None:
    low_errors, high_errors = [], []
    for each in forecasts:
        readings = measured_memory(each.run) if each.run.is_recommended else None
        if readings is not None:
            low, high = readings
            low_errors.append(each.peak_bytes / low - 1)
            high_errors.append(each.peak_bytes / high - 1)
    errors = ErrorSummary.of(high_errors)
    if errors is None:
        return None
    too_low = sum(error < -TOO_LOW for error in low_errors) / len(low_errors)
    return MemorySummary(errors=errors, too_low=too_low, over=median(high_errors))


def _verdicts(forecasts: Sequence[Forecast]) -> Verdicts:
    oom = [each for each in forecasts if each.run.status == "oom"]
    ran = [each for each in forecasts if each.run.status == "ok"]
    return Verdicts(
        num_oom=len(oom),
        false_fits=sum(each.fits for each in oom),
        num_ran=len(ran),
        false_misfits=sum(not each.fits for each in ran),
    )
