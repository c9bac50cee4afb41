"""Tables of predicted against published for the terminal, and the same figures as a mapping for JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from published_runs.evidence import RegretEvidence, regret_evidence
from published_runs.forecast import Outcome, Unpredicted
from published_runs.order import MIN_RANKED, RankedJob, order_by_class, ranked_jobs
from published_runs.score import ErrorSummary, LeftOut, RegretSummary, SourceScore
from published_runs.targets import TargetLine
from steelyard.units import format_plural


def comparison_view(
    timed: Sequence[SourceScore],
    held: Sequence[SourceScore],
    targets: Sequence[TargetLine],
    outcomes: Sequence[Outcome],
    left_out: Sequence[LeftOut] = (),
) -> Group:
    """Everything that was found: time, memory, what was skipped, and the targets."""
    beside = (left_out_table(left_out),) if left_out else ()
    regret = regret_tables(regret_evidence(outcomes, left_out)) + order_tables(ranked_jobs(outcomes))
    return Group(
        time_table(timed), *beside, *regret, memory_table(held), skipped_table(outcomes), target_table(targets)
    )


def time_table(scores: Sequence[SourceScore]) -> Table:
    """Errors of time and regret, a row per source."""
    table = Table(title="time: predicted over measured minus one (recommended dense bf16 and fp16 runs)")
    table.add_column("source")
    names = ("runs", "|error|", "90 %", "worst", "bias", "scaled", "90 %", "regret", "90 %", "of all", "jobs")
    for name in names:
        table.add_column(name, justify="right")
    for score in scores:
        table.add_row(
            score.source,
            str(0 if score.zero_shot is None else score.zero_shot.count),
            *_errors(score.zero_shot, "median_abs", "p90_abs", "worst", "bias"),
            *_errors(score.scaled, "median_abs", "p90_abs"),
            *_regret(score.regret, score.regret_of_all),
        )
    return table


def left_out_table(left_out: Sequence[LeftOut]) -> Table:
    """The same of each source by rates that were fitted without it, and the mean over sources."""
    table = Table(title="time, every source left out of the fit in turn (those of 20 such runs or more)")
    table.add_column("source")
    for name in ("runs", "|error|", "bias", "90 %", "scaled", "90 %", "regret", "90 %"):
        table.add_column(name, justify="right")
    rows = [
        (
            each.zero_shot.median_abs,
            each.zero_shot.bias,
            each.zero_shot.p90_abs,
            each.scaled.median_abs,
            each.scaled.p90_abs,
            None if each.regret is None else each.regret.mean,
            None if each.regret is None else each.regret.p90,
        )
        for each in left_out
    ]
    for each, row in zip(left_out, rows, strict=True):
        table.add_row(each.source, str(each.zero_shot.count), *map(_percent, row))
    known = ([value for value in column if value is not None] for column in zip(*rows, strict=True))
    table.add_row("mean", "", *(_percent(sum(values) / len(values) if values else None) for values in known))
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def regret_tables(found: RegretEvidence) -> tuple[Table, ...]:
    """Regret with and without what is set apart, and where there is any, what that is and why."""
    table = Table(title="regret, every source weighing the same")
    table.add_column("jobs that count")
    for name in ("jobs", "sources", "mean", "90 %", "left out: mean"):
        table.add_column(name, justify="right")
    for line in found.lines:
        figures = (line.mean, line.p90, line.left_out)
        table.add_row(line.name, str(line.jobs), str(line.sources), *map(_percent, figures))
    if not found.contradictions and not found.computed:
        return (table,)
    apart = Table(title="set apart")
    for name in ("what", "because"):
        apart.add_column(name)
    for pair in found.contradictions:
        reason = f"{pair.run} took {pair.longer:.0%} longer than {pair.twin}, of smaller microbatches, lets it"
        apart.add_row(f"job {pair.job}", reason)
    for (source, file), count in found.computed.items():
        reason = "times on straight lines in the number of microbatches to more digits than clocks repeat"
        apart.add_row(f"{format_plural(count, 'run')} of {source}: {file}", reason)
    return table, apart


def order_tables(jobs: Sequence[RankedJob]) -> tuple[Table, ...]:
    """Regret and rank correlation by class, and of every job with the plan that is ranked first."""
    table = Table(title=f"order of plans, jobs of {MIN_RANKED} measured plans or more (every source weighing the same)")
    table.add_column("class")
    for name in ("jobs", "sources", "regret", "90 %", "correlation"):
        table.add_column(name, justify="right")
    kept = order_by_class([each for each in jobs if not each.contradicts])
    for each, name in [(each, each.kind) for each in order_by_class(jobs)] + [
        (each, f"{each.kind}, without jobs that contradict themselves") for each in kept
    ]:
        figures = (_percent(each.regret), _percent(each.p90), _correlation(each.correlation))
        table.add_row(name, str(each.jobs), str(each.sources), *figures)
    every = Table(title="order of plans by job")
    for name in ("class", "source", "job"):
        every.add_column(name)
    for name in ("plans", "regret", "correlation"):
        every.add_column(name, justify="right")
    every.add_column("ranked first")
    for job in jobs:
        figures = (str(job.plans), _percent(job.regret), _correlation(job.correlation))
        first = job.first + (", the job contradicts itself" if job.contradicts else "")
        every.add_row(job.kind, job.source, job.job, *figures, first)
    return table, every


def _correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def memory_table(scores: Sequence[SourceScore]) -> Table:
    """Errors and verdicts of memory, a row per source that has any."""
    table = Table(
        title="memory: predicted over measured minus one (recommended runs); all runs that are called wrongly"
    )
    table.add_column("source")
    for name in ("runs", "|error|", "90 %", "worst", "bias", "too low", "false fits", "false misfits"):
        table.add_column(name, justify="right")
    for score in scores:
        memory, verdicts = score.memory, score.verdicts
        table.add_row(
            score.source,
            str(0 if memory is None else memory.errors.count),
            *_errors(None if memory is None else memory.errors, "median_abs", "p90_abs", "worst", "bias"),
            "–" if memory is None else f"{memory.too_low:.1%}",
            _fraction(verdicts.false_fits, verdicts.num_oom),
            _fraction(verdicts.false_misfits, verdicts.num_ran),
        )
    return table


def skipped_table(outcomes: Iterable[Outcome]) -> Table:
    """Every reason to skip a run with the number of runs that it holds for."""
    table = Table(title="skipped")
    table.add_column("runs", justify="right")
    table.add_column("reason")
    for reason, count in count_reasons(outcomes):
        table.add_row(str(count), reason)
    return table


def target_table(targets: Iterable[TargetLine]) -> Table:
    """Every target with what was reached."""
    table = Table(title="targets, every source weighing the same")
    table.add_column("figure")
    for name in ("target", "reached", "met"):
        table.add_column(name, justify="right")
    for line in targets:
        sign = "≤" if line.at_most else "≥"
        met = "–" if line.is_met is None else "yes" if line.is_met else "no"
        reached = "–" if line.reached is None else f"{line.reached:.1%}"
        table.add_row(line.name, f"{sign} {line.bound:.0%}", reached, met)
    return table


def count_reasons(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """Reasons to skip with their numbers, the most frequent first."""
    counts = Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Unpredicted))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def counted(outcomes: Sequence[Outcome]) -> str:
    """How many runs there are and how many of them are predicted."""
    skipped = sum(isinstance(outcome, Unpredicted) for outcome in outcomes)
    return f"{format_plural(len(outcomes), 'run')}, {len(outcomes) - skipped} predicted, {skipped} skipped"


def comparison_json(
    timed: Sequence[SourceScore],
    held: Sequence[SourceScore],
    targets: Sequence[TargetLine],
    outcomes: Sequence[Outcome],
    left_out: Sequence[LeftOut] = (),
) -> dict[str, Any]:
    """The figures of `comparison_view`."""
    return {
        "num_runs": len(outcomes),
        "num_predicted": sum(not isinstance(outcome, Unpredicted) for outcome in outcomes),
        "time": [asdict(score) for score in timed],
        "left_out": [asdict(each) for each in left_out],
        "regret": _regret_json(regret_evidence(outcomes, left_out)),
        "order": [asdict(job) for job in ranked_jobs(outcomes)],
        "memory": [asdict(score) for score in held],
        "skipped": dict(count_reasons(outcomes)),
        "targets": [asdict(line) | {"is_met": line.is_met} for line in targets],
    }


def _regret_json(found: RegretEvidence) -> dict[str, Any]:
    computed = [{"source": source, "file": file, "runs": count} for (source, file), count in found.computed.items()]
    return {
        "lines": [asdict(line) for line in found.lines],
        "contradictions": [asdict(pair) for pair in found.contradictions],
        "computed": computed,
    }


def _errors(summary: ErrorSummary | None, *names: str) -> tuple[str, ...]:
    if summary is None:
        return ("–",) * len(names)
    return tuple(
        f"{getattr(summary, name):+.1%}" if name in _SIGNED else f"{getattr(summary, name):.1%}" for name in names
    )


_SIGNED = frozenset({"worst", "bias"})


def _regret(summary: RegretSummary | None, of_all: RegretSummary | None) -> tuple[str, ...]:
    if summary is None or of_all is None:
        return ("–", "–", "–", "0")
    return (f"{summary.mean:.1%}", f"{summary.p90:.1%}", f"{of_all.mean:.1%}", str(summary.jobs))


def _fraction(count: int, total: int) -> str:
    return "–" if total == 0 else f"{count} of {total}"
