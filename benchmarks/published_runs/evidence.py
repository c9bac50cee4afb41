r"""Regret over all jobs, and over those whose rows can tell plans apart: measured times alone decide which.

**Jobs that contradict themselves.** Of two runs that differ in nothing but the samples of a microbatch, with $m$
microbatches on $p$ stages or $m/k$ of $k$ times the samples,

$$T_{m/k} \le T_m \frac{m + k (p - 1)}{m + p - 1}$$

since more samples at once never take longer than one after the other, and the bubble is what a schedule makes it. A run
slower than this by more than `CONTRADICTS` was held up by something that its row does not name: no model that knows
plans can rank the rows of such a job. Runs that leave no margin of memory are not asked, which may be slow for that.

**Tables that were computed.** Times of three runs or more that differ in the number of microbatches alone lie on a
straight line to more digits than any clock repeats (`REPEATS`): they are sums of a few layers' times, in which a
pipeline's transfers, bubbles and what runs beside what are as somebody's formula has them.

Not found so: a job that was slow as a whole, and one without two runs that differ in the microbatch alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp

import numpy as np

from published_runs.forecast import Forecast, Outcome
from published_runs.rows import PublishedRun
from published_runs.score import MIN_PLANS, LeftOut, RegretSummary, regret
from published_runs.targets import MIN_JUDGED, TargetLine, is_recommended_dense, most

CONTRADICTS = 0.25
"""Part by which a run is slower than it can be beside its twin: repeats of one run differ by 2 to 9 %."""
REPEATS = 1e-9
"""Part of a time that no clock repeats to."""
_OF_ITSELF_TEXT = """
    id split tier recommended measures source_loc flags notes step_time_s tokens_per_s_per_gpu peak_mem_gib peak_mem
    mem_unit mem_kind grad_accum
"""
_OF_ITSELF = frozenset(_OF_ITSELF_TEXT.split())
"""Columns in which runs of the same settings may differ."""

CONSISTENT = "without jobs that contradict themselves"

Table = tuple[str, str]
"""A source and the file of it that holds a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A run that took longer than its twin of smaller microbatches lets it."""

    job: str
    run: str
    twin: str
    longer: float
    """By what part of the most that the twin's time allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretLine:
    """Regret over some of the jobs: the mean over sources, each weighing the same."""

    name: str
    jobs: int
    sources: int
    mean: float
    p90: float
    left_out: float | None
    """The mean where each source is predicted by rates that were fitted without it; None where none was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretEvidence:
    """Regret with and without what is set apart, and what that is."""

    lines: tuple[RegretLine, ...]
    contradictions: tuple[Contradiction, ...]
    """The worst of each job, the worst first."""
    computed: Mapping[Table, int]
    """Tables whose times were computed, with their judged runs."""


def regret_evidence(outcomes: Iterable[Outcome], left_out: Sequence[LeftOut] = ()) -> RegretEvidence:
    """Regret over all jobs, over those that do not contradict themselves, and over measured ones among these."""
    by_source: dict[str, list[Forecast]] = defaultdict(list)
    for each in outcomes:
        if isinstance(each, Forecast) and each.run.step_time_s and each.run.is_open and is_recommended_dense(each.run):
            by_source[each.run.source].append(each)
    judged = [found for found in by_source.values() if len(found) >= MIN_JUDGED]
    contradictions = worst_contradictions([each for found in judged for each in found])
    computed = computed_tables([each.run for found in judged for each in found])
    apart = {each.job for each in contradictions}
    seconds = {each.run.id: each.step_time_s for found in judged for each in found}
    ratios = {name: ratio for each in left_out for name, ratio in each.log_ratios.items()}

    def line(name: str, keep: Callable[[Forecast], bool]) -> RegretLine | None:
        kept = [[each for each in found if keep(each)] for found in judged]
        return _line(name, kept, seconds, ratios)

    lines = (
        line("all jobs", lambda _: True),
        line(CONSISTENT, lambda each: each.run.job not in apart),
        line(
            "nor tables that were computed", lambda each: each.run.job not in apart and _table(each.run) not in computed
        ),
    )
    return RegretEvidence(
        lines=tuple(found for found in lines if found is not None), contradictions=contradictions, computed=computed
    )


def regret_targets(found: RegretEvidence) -> tuple[TargetLine, ...]:
    """The targets of regret over jobs that do not contradict themselves."""
    kept = next((line for line in found.lines if line.name == CONSISTENT), None)
    if kept is None or not found.contradictions:
        return ()
    return (
        most(f"regret {CONSISTENT}: mean", 0.03, kept.mean),
        most("the same, left out", 0.05, kept.left_out),
        most("the same: 90th percentile", 0.12, kept.p90),
    )


def _line(
    name: str, sources: Sequence[Sequence[Forecast]], seconds: Mapping[str, float], ratios: Mapping[str, float]
) -> RegretLine | None:
    fitted = [found for runs in sources if (found := regret(runs, seconds)) is not None]
    if not fitted:
        return None
    timed = [[each for each in runs if each.run.id in ratios] for runs in sources]
    again = [found for runs in timed if (found := regret(runs, _seconds_left_out(runs, ratios))) is not None]
    return RegretLine(
        name=name,
        jobs=sum(each.jobs for each in fitted),
        sources=len(fitted),
        mean=_mean(fitted),
        p90=float(np.mean([each.p90 for each in fitted])),
        left_out=_mean(again) if again else None,
    )


def _mean(found: Sequence[RegretSummary]) -> float:
    return float(np.mean([each.mean for each in found]))


def _seconds_left_out(runs: Sequence[Forecast], ratios: Mapping[str, float]) -> dict[str, float]:
    return {each.run.id: exp(ratios[each.run.id]) * (each.run.step_time_s or 0.0) for each in runs}


def worst_contradictions(timed: Sequence[Forecast], min_plans: int = MIN_PLANS) -> tuple[Contradiction, ...]:
    """The worst pair of every job of so many plans that contradicts itself, the worst job first."""
    jobs: dict[str, list[PublishedRun]] = defaultdict(list)
    num_plans: dict[str, int] = defaultdict(int)
    for each in timed:
        num_plans[each.run.job] += 1
        if each.has_margin:
            jobs[each.run.job].append(each.run)
    found = []
    for job, runs in jobs.items():
        pairs = [each for each in _contradictions(job, runs) if num_plans[job] >= min_plans]
        if pairs:
            found.append(max(pairs, key=lambda each: (each.longer, each.run)))
    return tuple(sorted(found, key=lambda each: -each.longer))


def _contradictions(job: str, runs: Sequence[PublishedRun]) -> Iterable[Contradiction]:
    for alike in _alike(runs, but=frozenset({"mbs"})):
        in_order = sorted(alike, key=lambda run: run.number("mbs") or 0.0)
        for smaller, larger in combinations(in_order, 2):
            longer = _longer(smaller, larger)
            if longer is not None and longer > CONTRADICTS:
                yield Contradiction(job=job, run=larger.id, twin=smaller.id, longer=longer)


def _longer(smaller: PublishedRun, larger: PublishedRun) -> float | None:
    """By what part the run of larger microbatches takes longer than it can; None where rows do not say enough."""
    sizes, times = (smaller.number("mbs"), larger.number("mbs")), (smaller.step_time_s, larger.step_time_s)
    count = smaller.number("grad_accum")
    if not (sizes[0] and sizes[1] and times[0] and times[1] and count) or sizes[1] <= sizes[0]:
        return None
    factor, waiting = sizes[1] / sizes[0], (smaller.number("pp") or 1.0) - 1
    most = (count + factor * waiting) / (count + waiting)
    return times[1] / times[0] / most - 1


def computed_tables(runs: Sequence[PublishedRun]) -> dict[Table, int]:
    """The tables with three runs or more on one line in the number of microbatches, and how many runs each has."""
    timed = [run for run in runs if run.step_time_s and run.number("grad_accum")]
    found = {_table(alike[0]) for alike in _alike(timed, but=frozenset({"gbs", "job"})) if _on_a_line(alike)}
    return {table: sum(_table(run) == table for run in runs) for table in sorted(found)}


def _on_a_line(runs: Sequence[PublishedRun]) -> bool:
    points = {run.number("grad_accum") or 0.0: run.step_time_s or 0.0 for run in runs}
    counts, times = np.array(list(points)), np.array(list(points.values()))
    if len(points) < 3:
        return False
    line = np.polynomial.Polynomial.fit(counts, times, 1)
    return bool(np.max(np.abs(line(counts) / times - 1)) < REPEATS)


def _alike(runs: Iterable[PublishedRun], *, but: frozenset[str]) -> Iterable[list[PublishedRun]]:
    """The runs that differ in nothing but these columns and what was measured, together."""
    groups: dict[tuple[tuple[str, str], ...], list[PublishedRun]] = defaultdict(list)
    for run in runs:
        settings = {name: cell for name, cell in run.cells.items() if name not in _OF_ITSELF | but}
        groups[tuple(sorted(settings.items()))].append(run)
    return groups.values()


def _table(run: PublishedRun) -> Table:
    return run.source, run.text("source_ref")
