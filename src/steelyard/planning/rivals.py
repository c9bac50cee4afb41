"""The best plans under a restriction: what each decision of a plan is worth.

The cost tables are built once; a restriction takes pipeline settings away and forbids strategies in the rest.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from steelyard.cost.build import build_tables
from steelyard.cost.memory_floor import Floors
from steelyard.cost.predict import predict
from steelyard.cost.setting import Job
from steelyard.cost.tables import CostTables
from steelyard.plan.choices import Rival
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Baseline, Prediction
from steelyard.planning.acceptance import Acceptance, accept
from steelyard.planning.choose import device_bytes, ranks_all
from steelyard.planning.plain import PLAIN_KINDS, PlainKind, plain_tables
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.planning.problem import PlanOptions, make_tables, settings_under, stage_strategies
from steelyard.planning.restrictions import Keeps, means_of, restricted
from steelyard.schedules import SCHEDULES, Schedule
from steelyard.search import TIME_LIMIT_S, OnDemand
from steelyard.units import format_plural

ANY_PLAN = "any plan"
"""The name of the best plan under no restriction at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """What a rival may not do, by name, and how it is searched, when it is asked for."""

    name: str
    rival: Callable[[], Rival]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A job, its cost tables, the step time that rivals are compared with, and for how long each may be searched."""

    job: Job
    tables: tuple[OnDemand, ...]
    step_s: float
    floors: Floors
    """Of its own tables."""
    time_limit_s: float | None = TIME_LIMIT_S

    @classmethod
    def of(cls, job: Job, options: PlanOptions, step_s: float, *, time_limit_s: float | None) -> Self:
        """The contest of a job with all that the options allow."""
        tables = make_tables(job, options)
        return cls(job=job, tables=tables, step_s=step_s, floors=Floors(job), time_limit_s=time_limit_s)

    def any_plan(self) -> "tuple[Rival, Contest]":
        """The best plan of all tables, and the contest with what is then known of them, within its budget or less."""
        found = self.accepted(self.tables)
        return self._rival(ANY_PLAN, found), replace(self, tables=found.bounded(self.tables))

    def rival(self, name: str, tables: Sequence[CostTables | OnDemand]) -> Rival:
        """The best plan of these tables within the budget of the job, or by how much it misses."""
        return self._rival(name, self.accepted(tables)) if tables else Rival(name=name)

    def accepted(self, tables: Sequence[CostTables | OnDemand]) -> Acceptance:
        """What of these tables the walk accepts within the budget of the job."""
        floors = self.floors if {*tables} <= {*self.tables} else self.floors.of_others()
        count = len(tables) if ranks_all(self.job) else 1
        limit_s = self.time_limit_s
        return accept(
            self.job, tables, num_exact=count, num_alternatives=count - 1, time_limit_s=limit_s, floors=floors
        )

    def _rival(self, name: str, found: Acceptance) -> Rival:
        if not found.ranked:
            miss = found.search.nearest_miss
            missing = device_bytes(self.job, miss.needed_bytes) - self.job.budget_bytes if miss else None
            return Rival(name=name, missing_bytes=missing)
        own_s, plan = self.fastest(found)
        return rival_of(name, plan, own_s, self.step_s)

    def fastest(self, found: Acceptance) -> tuple[float, Plan]:
        """The seconds of a step of the fastest accepted plan, of which there is one, and the plan."""
        plans = [each.plan for each in (found.ranked if ranks_all(self.job) else found.ranked[:1])]
        return min(((predict(each, self.job).step_time_s, each) for each in plans), key=lambda pair: pair[0])


def rival_of(name: str, plan: Plan, own_s: float, step_s: float) -> Rival:
    """A plan whose step takes ``own_s`` next to one whose step takes ``step_s``."""
    slowdown, setting = own_s / step_s - 1, describe(plan.pipeline)
    return Rival(name=name, step_time_s=own_s, slowdown=slowdown, setting=setting, strategies=summarise(plan))


def beside_baselines(plan: Plan, prediction: Prediction, rivals: Iterable[Rival]) -> Plan:
    """The plan with these rivals as the baselines of its prediction."""
    found = tuple(Baseline(**{name: getattr(each, name) for name in Baseline.model_fields}) for each in rivals)
    return plan.model_copy(update={"prediction": prediction.model_copy(update={"baselines": found})})


def restrictions(contest: Contest, plan: Plan, options: PlanOptions) -> tuple[Restriction, ...]:
    """The plain kinds, without each means of the plan, and other pipeline settings; nothing is searched yet."""
    found = _plain(contest)
    for name, keeps in means_of(plan).items():
        found.append(_among(contest, name, partial(_all_restricted, contest, keeps)))
    found += _other_pipelines(contest, plan)
    if plan.num_stages > 1:
        found += _other_schedules(contest, plan, options)
    return tuple(found)


def _plain(contest: Contest) -> list[Restriction]:
    def tables(kind: PlainKind) -> list[CostTables]:
        limit_s = math.inf if contest.time_limit_s is None else contest.time_limit_s
        return plain_tables(kind, contest.job, contest.tables, contest.floors.of, deadline=time.monotonic() + limit_s)

    return [_among(contest, each.name, partial(tables, each)) for each in PLAIN_KINDS]


def _all_restricted(contest: Contest, keeps: Keeps) -> list[OnDemand]:
    return [each.narrowed(partial(restricted, keeps=keeps)) for each in contest.tables]


def with_baselines(
    plan: Plan,
    job: Job,
    tables: Sequence[OnDemand],
    *,
    time_limit_s: float | None = TIME_LIMIT_S,
    floors: Floors | None = None,
) -> Plan:
    """The plan with the best plan of each plain kind in its prediction, searched among all settings of these tables.

    The time limit is of each kind; what is found by then is the best so far. ``floors`` of the job save making them.
    """
    if plan.prediction is None:
        return plan
    contest = Contest(
        job=job,
        tables=tuple(tables),
        step_s=plan.prediction.step_time_s,
        floors=floors or Floors(job),
        time_limit_s=time_limit_s,
    )
    return beside_baselines(plan, plan.prediction, (each.rival() for each in _plain(contest)))


def _other_pipelines(contest: Contest, plan: Plan) -> list[Restriction]:
    found = []
    for count in sorted({tables.pipeline.num_stages for tables in contest.tables} - {plan.num_stages}):
        chosen = [tables for tables in contest.tables if tables.pipeline.num_stages == count]
        found.append(_among(contest, format_plural(count, "stage"), partial(list, chosen)))
    counts = {tables.pipeline.num_microbatches for tables in contest.tables}
    for count in (plan.num_microbatches // 2, plan.num_microbatches * 2):
        if count in counts:
            chosen = [tables for tables in contest.tables if tables.pipeline.num_microbatches == count]
            found.append(_among(contest, format_plural(count, "microbatch", "microbatches"), partial(list, chosen)))
    return found


def _other_schedules(contest: Contest, plan: Plan, options: PlanOptions) -> list[Restriction]:
    """The plan's number of stages under the other schedules that were searched.

    Those that the search leaves out of some settings come last, here with all numbers of microbatches.
    """
    here = [tables for tables in contest.tables if tables.pipeline.num_stages == plan.num_stages]
    counts = sorted({tables.pipeline.num_microbatches for tables in here})
    mine = plan.pipeline.schedule
    found = [
        _among(contest, schedule.name, partial(_of_schedule, schedule, here))
        for schedule in dict.fromkeys(tables.pipeline.schedule for tables in here)
        if schedule != mine and not schedule.why_not_everywhere
    ]
    for schedule in SCHEDULES.values():
        if schedule != mine and schedule.why_not_everywhere:
            tables = partial(_tables_under, schedule, contest.job, plan.num_stages, counts, options)
            found.append(_among(contest, schedule.name, tables))
    return found


def _among(contest: Contest, name: str, tables: Callable[[], Sequence[CostTables | OnDemand]]) -> Restriction:
    return Restriction(name=name, rival=lambda: contest.rival(name, tables()))


def _of_schedule(schedule: Schedule, tables: Sequence[OnDemand]) -> list[OnDemand]:
    return [each for each in tables if each.pipeline.schedule == schedule]


def _tables_under(
    schedule: Schedule, job: Job, num_stages: int, counts: Sequence[int], options: PlanOptions
) -> list[CostTables]:
    settings = settings_under([schedule], job, [num_stages], counts)
    strategies = stage_strategies(job, settings[0].devices_per_stage, options) if settings else ()
    return [build_tables(setting, strategies) for setting in settings]
