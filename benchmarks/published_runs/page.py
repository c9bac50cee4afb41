"""The page docs/explanation/accuracy.md: errors of predictions by class and source, beside others' estimators."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

from others.estimators import NOT_ASKED, Answers

from published_runs.accuracy import (
    TOO_LOW,
    Errors,
    KindErrors,
    MemoryLine,
    accuracy_targets,
    counts_for_memory,
    errors_by_kind,
    judged_once,
    memory_by_source,
    time_by_source,
    time_of_devices,
)
from published_runs.classes import CLASSES
from published_runs.forecast import Forecast, Outcome, Unpredicted
from published_runs.order import MIN_RANKED, Order, RankedJob, order_by_class, ranked_jobs
from published_runs.score import ErrorSummary, measured_memory, scaled_errors, time_errors
from published_runs.targets import MIN_JUDGED, TargetLine

COMMAND = "python benchmarks/scoreboard.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that a page says."""

    outcomes: tuple[Outcome, ...]
    left_out: tuple[Forecast, ...]
    """The judged runs as rates predict them that were fitted without the run's source."""
    others: tuple[Answers, ...]
    states: Mapping[str, float]
    """Predicted bytes of model states on the fullest rank, by the id of a run."""


def accuracy_page(found: Findings, date: str) -> str:
    """The page as Markdown; it ends with a line feed."""
    open_runs = [each for each in found.outcomes if each.run.is_open]
    time, devices = time_by_source(open_runs), time_of_devices(open_runs)
    left_out, memory = time_by_source(found.left_out), memory_by_source(open_runs)
    jobs = ranked_jobs(open_runs)
    parts = [
        _introduction(open_runs, date),
        _targets(accuracy_targets(time, devices, left_out, memory, jobs)),
        _time(time, devices, left_out),
        _memory(memory),
        _order(jobs, ranked_jobs(open_runs, 2)),
        _others(found),
        _LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(outcomes: Sequence[Outcome], date: str) -> str:
    predicted = sum(not isinstance(each, Unpredicted) for each in outcomes)
    sources = len({each.run.source for each in outcomes})
    return f"""# How accurate predictions are

steelyard predicts how long a training step takes and how much memory each GPU needs, before anything runs. This page
compares these predictions with {len(outcomes):,} training runs that others measured and published, from
{sources} sources: MLPerf results, framework benchmarks, papers. {predicted:,} of them state enough to be predicted.
All figures are shown, including the bad ones.

An *error* is predicted over measured minus one: +10 % means that the prediction is 10 % too high. *Bias* is the median
signed error, *median* the median absolute error, *90 %* the 90th percentile of the absolute error, and *worst* the
largest error.

Each run has a *class*: dense models in 16 bits, models with experts, long context (context parallelism), matmuls in
8 bits or fewer, adapters (LoRA). In the figure of a class every source of {MIN_JUDGED} runs or more weighs
the same, and smaller sources do not count, unless no source of the class has as many. In *median of all*, smaller
sources count in proportion to their runs.

Written on {date} by one command, in a few minutes on 2 cores, without a GPU:

```
{COMMAND}
```

The runs and their sources are in [benchmarks/published_runs/data](../../benchmarks/published_runs/data/README.md)."""


def _targets(lines: Iterable[TargetLine]) -> str:
    rows = [
        (
            line.name,
            f"≤ {line.bound:.1%}",
            "–" if line.reached is None else f"{line.reached:.1%}",
            "–" if line.is_met is None else "yes" if line.is_met else "**no**",
        )
        for line in lines
    ]
    return f"""## Targets

A class may have a single source that counts. The next section gives the number of sources that count, and the error of
every source.

{_table(("figure", "target", "reached", "met"), rows)}"""


def _time(time: Sequence[Errors], devices: Sequence[Errors], left_out: Sequence[Errors]) -> str:
    head = ("class", "runs", "sources that count", "bias", "median", "90 %", "worst", "median of all")
    rows = [(line.kind, line.source, str(len(line.values)), *_figures(line.summary)) for line in time]
    unseen = (
        f"""The next table predicts the same runs with rates fitted without the run's own source. Rates are fitted to
dense 16-bit runs. Engine constants are not refitted; they were chosen with open runs of all classes in view.

{_table(head, map(_kind_line, errors_by_kind(left_out)))}"""
        if left_out
        else "No source was left out of the fit in this run of the benchmark."
    )
    return f"""## Time of a step

{_table(head, map(_kind_line, (*errors_by_kind(time), *errors_by_kind(devices))))}

{unseen}

Dense runs count if the authors of the table recommend them; all runs of other classes count. Runs of one adapter plan
are repeats by several submitters: they count once, with their median.

{_table(("class", "source", "runs", "bias", "median", "90 %", "worst"), rows)}"""


def _kind_line(each: KindErrors) -> tuple[str, ...]:
    sources = f"{each.judged} of {each.sources}" if each.judged else f"all {each.sources} together"
    return each.kind, f"{each.rows:,}", sources, *_figures(each), f"{each.median_of_all:.1%}"


def _memory(lines: Sequence[MemoryLine]) -> str:
    head = (
        "class",
        "source",
        "runs",
        "bias",
        "median",
        "90 %",
        "worst",
        f"too low by over {TOO_LOW:.0%}",
        "out of memory, called fitting",
        "ran, called not fitting",
    )
    rows = [
        (
            line.kind,
            line.source,
            str(line.errors.count if line.errors else 0),
            *(_figures(line.errors) if line.errors else ("–",) * 4),
            _of(line.too_low, line.errors.count if line.errors else 0),
            _of(line.false_fits, line.oom),
            _of(line.false_misfits, line.ran),
        )
        for line in lines
    ]
    return f"""## Memory of a GPU

Predictions are upper bounds, so errors should be small and positive. Sources measure different quantities: memory
allocated by torch, memory reserved by torch, or all memory in use on the device; some sources do not say which. Each
prediction is of the quantity that its source names.

{_table(head, rows)}"""


def _order(jobs: Sequence[RankedJob], of_two: Sequence[RankedJob]) -> str:
    head = ("class", "jobs", "sources", "regret", "90 %", "rank correlation")
    apart = [job for job in jobs if not job.contradicts]
    every = [(each.kind, *_order_figures(each)) for each in order_by_class(jobs)]
    kept = [(f"{each.kind}, without inconsistent jobs", *_order_figures(each)) for each in order_by_class(apart)]
    pairs = [(each.kind, *_order_figures(each)) for each in order_by_class([job for job in of_two if job.plans == 2])]
    few = [
        (job.kind, job.source, f"`{job.first}`", str(job.plans), f"{job.regret:.1%}", _correlation(job.correlation))
        for job in jobs
        if job.kind != CLASSES[0]
    ]
    return f"""## Order of plans

A planner needs the order of plans more than their times. *Regret* is the extra measured time of the plan ranked first,
relative to the fastest measured plan of its job. The rank correlation (Spearman's) is 1 for the measured order and −1
for its reverse; a class shows the median of its jobs. Jobs have {MIN_RANKED} measured plans or more, and every source
of a class weighs the same. A job is *inconsistent* if its own measurements contradict each other: larger microbatches
took longer than the same work in smaller ones can take (`benchmarks/published_runs/evidence.py`). Outside dense models,
the versions of a framework count as one job, because few publications compare plans of such models.

{_table(head, every + kept)}

Jobs with two plans:

{_table(head, pairs)}

Jobs of classes with few jobs, each with the run whose plan is ranked first:

{_table(("class", "source", "ranked first", "plans", "regret", "rank correlation"), few)}

`python benchmarks/published_runs.py` prints every job."""


def _order_figures(each: Order) -> tuple[str, ...]:
    figures = f"{each.regret:.1%}", f"{each.p90:.1%}", _correlation(each.correlation)
    return str(each.jobs), str(each.sources), *figures


def _correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def _others(found: Findings) -> str:
    asked = "\n".join(
        fill(
            f"- **{each.estimator.package}**: {each.estimator.call}. States: {each.estimator.states}. "
            f"Leaves out: {each.estimator.leaves_out}." + (f" *Not asked: {each.failure}*" if each.failure else ""),
            width=120,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for each in found.others
    )
    passed = "\n".join(f"- {name}: {reason}." for name, reason in NOT_ASKED.items())
    if not found.others:
        return "## Others' estimators\n\nNone was asked in this run of the benchmark."
    time, memory, states, order = (
        _beside_time(found),
        _beside_memory(found),
        _beside_states(found),
        _beside_order(found),
    )
    head = ("estimator", "runs", "bias", "median", "90 %", "worst")
    return f"""## Others' estimators

This section compares open estimators of training time and memory that install from the Python package index and need
no GPU. Each estimator is asked only about runs within its stated scope, with the settings of the run and its own
defaults for everything else. Both lines of a pair predict the same runs, and every run counts once. *Scaled* is
the median error after one factor per source, framework and device, because these tools read the reachable rate of a
device as an input.

{asked}

Time of a step:

{_table((*head, "scaled"), time)}

Order of plans by these times, jobs of {MIN_RANKED} measured plans or more that are not inconsistent:

{_table(("estimator", "jobs", "sources", "regret", "90 %", "rank correlation"), order)}

Peak memory of a GPU:

{_table(head, memory)}

No published run measures model states alone, so estimates of model states cannot be judged here. The table gives the
median of stated model states over measured peak memory, and the number of runs for which the estimate exceeds the
measured peak:

{_table(("estimator", "runs", "states / measured peak", "more than the peak"), states)}

Not asked:

{passed}"""


def _beside_time(found: Findings) -> list[tuple[str, ...]]:
    judged, rows = judged_once(found.outcomes), []
    for each in found.others:
        named = {row: one.step_time_s for row, one in each.estimates.items() if one.step_time_s}
        ours = [run for run in judged if run.run.id in named]
        theirs = [replace(run, step_time_s=named[run.run.id]) for run in ours]
        scaled = [ErrorSummary.of(scaled_errors(runs)) for runs in (theirs, ours)]
        pair = _pair(each.estimator.name, time_errors(theirs), time_errors(ours))
        rows += (
            [(*line, f"{one.median_abs:.1%}") for line, one in zip(pair, scaled, strict=True) if one] if pair else []
        )
    return rows


def _beside_order(found: Findings) -> list[tuple[str, ...]]:
    rows = []
    for each in found.others:
        named = {row: one.step_time_s for row, one in each.estimates.items() if one.step_time_s}
        ours = [run for run in found.outcomes if isinstance(run, Forecast) and run.run.id in named]
        theirs = [replace(run, step_time_s=named[run.run.id]) for run in ours]
        for name, runs in ((each.estimator.name, theirs), ("steelyard, the same runs", ours)):
            jobs = [job for job in ranked_jobs(runs) if not job.contradicts]
            rows += [(name, *_order_figures(order)) for order in order_by_class(jobs)]
    return rows


def _beside_memory(found: Findings) -> list[tuple[str, ...]]:
    rows = []
    for each in found.others:
        named = {row: one.peak_bytes for row, one in each.estimates.items() if one.peak_bytes}
        ours, theirs = [], []
        for run, measured in _with_memory(found.outcomes):
            if run.run.id in named:
                ours.append(run.peak_bytes / measured - 1)
                theirs.append(named[run.run.id] / measured - 1)
        rows += _pair(each.estimator.name, theirs, ours)
    return rows


def _beside_states(found: Findings) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for each in found.others:
        named = {row: one.states_bytes for row, one in each.estimates.items() if one.states_bytes}
        parts = [
            (named[run.run.id] / measured, found.states[run.run.id] / measured)
            for run, measured in _with_memory(found.outcomes)
            if run.run.id in named and run.run.id in found.states
        ]
        for place, name in enumerate((each.estimator.name, "steelyard, the same runs")):
            summary = ErrorSummary.of([part[place] for part in parts])
            if summary is not None:
                more = sum(part[place] > 1 for part in parts)
                rows.append((name, str(summary.count), f"{summary.bias:.0%}", _of(more, summary.count)))
    return rows


def _with_memory(outcomes: Iterable[Outcome]) -> list[tuple[Forecast, float]]:
    """The runs whose memory is judged, with the larger reading of what was measured."""
    judged = [each for each in outcomes if isinstance(each, Forecast) and counts_for_memory(each.run)]
    return [(each, readings[1]) for each in judged if (readings := measured_memory(each.run)) is not None]


def _pair(name: str, theirs: Sequence[float], ours: Sequence[float]) -> list[tuple[str, ...]]:
    pair = ((name, ErrorSummary.of(theirs)), ("steelyard, the same runs", ErrorSummary.of(ours)))
    return [(who, str(errors.count), *_figures(errors)) for who, errors in pair if errors is not None]


_LIMITS = """## What this page does not show

- Sealed runs, which are reserved for judging predictions: this repository does not have their measurements.
- steelyard's own runtime on GPUs: published runs use other engines. For CPU processes, see
  [benchmarks](../../benchmarks/README.md).
- Differences below the spread of repeats: two runs of one plan differ by 1 to 9 %.
- Unpublished plans. Few sources publish runs that were slow or out of memory.
- Causes: [what is not modelled](what-is-not-modelled.md) lists effects that predictions leave out, and
  [the log](log/index.md) lists what was tried."""


def _figures(errors: ErrorSummary | KindErrors) -> tuple[str, str, str, str]:
    """Bias, median, 90th percentile and worst."""
    return f"{errors.bias:+.1%}", f"{errors.median_abs:.1%}", f"{errors.p90_abs:.1%}", f"{errors.worst:+.0%}"


def _of(count: int, total: int) -> str:
    return "–" if total == 0 else f"{count} of {total:,}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
