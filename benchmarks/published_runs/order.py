r"""Order of a job's plans before their times: which is ranked first, its regret, and the rank correlation, by class.

Spearman's correlation of $n$ plans is Pearson's correlation of their ranks by predicted and by measured time, equal
times sharing the mean of their ranks: 1 for the measured order, −1 for its reverse, not defined where either kind of
time is the same for all. As for `regret`, plans that leave their margin of memory free are ranked, or all where none
does.

A job of dense models is that of column ``job``. Rows of other classes are few, so there the versions of a framework
count as one job. Runs of one plan are repeats: they count once, with the medians of their times.

Not modelled: how much versions and submitters differ beside the plan; repeats of one plan spread by 1 to 9 %.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from published_runs.classes import CLASSES, DENSE, class_of, counts_for_time
from published_runs.evidence import worst_contradictions
from published_runs.forecast import Forecast, Outcome
from published_runs.rows import PublishedRun
from published_runs.score import measured_s, plans_searched, ranked_first, regret_of

MIN_RANKED = 3
"""Distinct measured plans of a job whose order is judged."""
_PLAN_TEXT = """
    dp_shard dp_replicate zero_stage tp sp pp vpp cp ep etp mbs grad_accum act_ckpt act_ckpt_detail schedule overlap
    offload optimizer options cuda_graph cp_method moe_dispatcher compile
"""
_PLAN = tuple(_PLAN_TEXT.split())
"""Columns in which the plans of a job differ."""
_JOB = ("source_file", "model", "gpu", "gpu_mem_gb", "gpus", "gbs", "seq_len", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedJob:
    """A job's plans as they are ranked beside what was measured."""

    kind: str
    """One of `CLASSES`."""
    source: str
    job: str
    """Of column ``job``, that of the first run where several count as one."""
    plans: int
    first: str
    """The run whose plan is ranked first."""
    regret: float
    correlation: float | None
    contradicts: bool
    """Whether the job contradicts itself (`evidence`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The jobs of a class: means over sources, each source weighing the same; the median correlation of its jobs."""

    kind: str
    jobs: int
    sources: int
    regret: float
    p90: float
    correlation: float | None


def ranked_jobs(outcomes: Iterable[Outcome], min_plans: int = MIN_RANKED) -> tuple[RankedJob, ...]:
    """Every job of so many measured plans or more, by class and source in order of name."""
    timed = (each for each in outcomes if isinstance(each, Forecast) and counts_for_time(each.run))
    found = [_ranked(plans) for plans in measured_plans(timed) if len(plans) >= min_plans]
    return tuple(sorted(found, key=lambda each: (CLASSES.index(each.kind), each.source, each.job)))


def measured_plans(timed: Iterable[Forecast]) -> list[list[Forecast]]:
    """The distinct plans of each job."""
    jobs: dict[tuple[str, ...], list[Forecast]] = defaultdict(list)
    for each in timed:
        jobs[_job_of(each.run)].append(each)
    return [distinct_plans(runs) for runs in jobs.values()]


def _ranked(plans: Sequence[Forecast]) -> RankedJob:
    run = plans[0].run
    searched = plans_searched(plans)
    predicted = {each.run.id: each.step_time_s for each in searched}
    first = ranked_first(searched, predicted)
    as_one = [replace(each, run=_with(each.run, job=run.job)) for each in plans]
    return RankedJob(
        kind=class_of(run),
        source=run.source,
        job=run.job,
        plans=len(plans),
        first=first.run.id,
        regret=regret_of(first, searched),
        correlation=spearman(list(predicted.values()), [measured_s(each) for each in searched]),
        contradicts=bool(worst_contradictions(as_one, len(plans))),
    )


def _job_of(run: PublishedRun) -> tuple[str, ...]:
    """What runs of one job share."""
    kind = class_of(run)
    if kind == DENSE:
        return kind, run.source, run.job
    framework = re.match(r"[A-Za-z-]*", run.text("framework"))
    return kind, framework.group() if framework else "", *(run.text(column) for column in _JOB)


def distinct_plans(runs: Iterable[Forecast]) -> list[Forecast]:
    """One run for each plan of a job: the first, with the medians of predicted and measured seconds."""
    plans: dict[tuple[str, ...], list[Forecast]] = defaultdict(list)
    for each in runs:
        plans[tuple(each.run.cells.get(column, "") for column in _PLAN)].append(each)
    return [
        replace(
            alike[0],
            run=_with(alike[0].run, step_time_s=str(median(map(measured_s, alike)))),
            step_time_s=median(each.step_time_s for each in alike),
        )
        if len(alike) > 1
        else alike[0]
        for alike in plans.values()
    ]


def _with(run: PublishedRun, **cells: str) -> PublishedRun:
    return PublishedRun(cells={**run.cells, **cells})


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation of two series of one length; None where either is the same throughout."""
    ranks = np.array([_ranks(first), _ranks(second)])
    if np.ptp(ranks, axis=1).min() == 0:
        return None
    return float(np.round(np.corrcoef(ranks)[0, 1], 9))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, equal values (to six digits) sharing their mean."""
    rounded = np.array([float(f"{value:.6g}") for value in values])
    return [float((rounded < value).sum() + ((rounded == value).sum() - 1) / 2) for value in rounded]


def order_by_class(jobs: Iterable[RankedJob]) -> tuple[Order, ...]:
    """The figures of every class that has such jobs, in the order of `CLASSES`."""
    by_class: Mapping[str, list[RankedJob]] = {kind: [] for kind in CLASSES}
    for each in jobs:
        by_class[each.kind].append(each)
    return tuple(_order(kind, found) for kind, found in by_class.items() if found)


def _order(kind: str, jobs: Sequence[RankedJob]) -> Order:
    sources: dict[str, list[RankedJob]] = defaultdict(list)
    for each in jobs:
        sources[each.source].append(each)
    regrets = [[each.regret for each in found] for found in sources.values()]
    known = [[each.correlation for each in found if each.correlation is not None] for found in sources.values()]
    medians = [median(found) for found in known if found]
    return Order(
        kind=kind,
        jobs=len(jobs),
        sources=len(sources),
        regret=float(np.mean([np.mean(found) for found in regrets])),
        p90=float(np.mean([np.quantile(found, 0.9) for found in regrets])),
        correlation=float(np.mean(medians)) if medians else None,
    )
