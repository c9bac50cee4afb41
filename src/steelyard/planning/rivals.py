"""The best plans under a restriction: what each decision of a plan is worth.

The cost tables are built once; a restriction takes pipeline settings away and forbids strategies in the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steelyard.cost.build import build_tables, usable_bytes
from steelyard.cost.predict import predict
from steelyard.cost.setting import Job, Setting
from steelyard.cost.tables import CostTables
from steelyard.plan.choices import Rival
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat, Strategy
from steelyard.planning.assemble import bare_plan, describe_plan, summarise
from steelyard.planning.choose import device_bytes
from steelyard.planning.problem import PlanOptions, stage_strategies
from steelyard.search import search
from steelyard.units import format_plural

Keeps = Callable[[Strategy], bool]

WITHOUT: dict[str, Keeps] = {
    "without tp": lambda strategy: strategy.tp == 1,
    "without fsdp": lambda strategy: strategy.fsdp == 1,
    "without dp": lambda strategy: strategy.dp == 1,
    "without zero2": lambda strategy: strategy.zero == 3,
    "without remat": lambda strategy: strategy.remat is Remat.NONE,
}
"""What each means a plan may use can be taken away from it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A job, its cost tables, and the step time that rivals are compared with."""

    job: Job
    tables: tuple[CostTables, ...]
    step_s: float

    def rival(self, name: str, tables: Sequence[CostTables]) -> Rival:
        """The best plan of these tables within the budget of the job, or by how much it misses."""
        if not tables:
            return Rival(name=name)
        found = search(tables, usable_bytes(self.job), num_alternatives=0)
        if found.best is None:
            miss = found.nearest_miss
            missing = device_bytes(self.job, miss.needed_bytes) - self.job.budget_bytes if miss else None
            return Rival(name=name, missing_bytes=missing)
        plan = bare_plan(self.job, found.best)
        step_s = predict(plan, self.job).step_time_s
        return Rival(
            name=name,
            step_time_s=step_s,
            slowdown=step_s / self.step_s - 1,
            setting=describe_plan(plan),
            strategies=summarise(plan),
        )


def find_rivals(contest: Contest, plan: Plan, options: PlanOptions) -> tuple[Rival, ...]:
    """The best plan of all, without each means that the plan uses, of one strategy, and of other pipeline settings."""
    rivals = [contest.rival("any plan", contest.tables)]
    for name, keeps in WITHOUT.items():
        if not all(keeps(strategy) for strategy in plan.strategies):
            rivals.append(contest.rival(name, [restricted(tables, keeps) for tables in contest.tables]))
    if len(set(plan.strategies)) > 1:
        rivals.append(contest.rival("one strategy everywhere", uniform_tables(contest.tables)))
    rivals += _other_pipelines(contest, plan)
    if plan.num_stages > 1:
        rivals += _other_schedules(contest, plan, options)
    return tuple(rivals)


def restricted(tables: CostTables, keeps: Keeps) -> CostTables:
    """The tables with only those strategies legal that are kept."""
    kept = np.array([keeps(strategy) for strategy in tables.strategies], dtype=bool)
    return replace(tables, legal=tables.legal & kept)


def uniform_tables(tables: Sequence[CostTables]) -> list[CostTables]:
    """A setting for every strategy that all layers may take, with that strategy alone."""
    return [
        _sliced(each, index)
        for each in tables
        for index in np.flatnonzero(each.legal[sorted(set(each.layers))].all(axis=0))
    ]


def _sliced(tables: CostTables, index: int) -> CostTables:
    one = slice(index, index + 1)
    return replace(
        tables,
        strategies=tables.strategies[one],
        legal=tables.legal[:, one],
        time_s=tables.time_s[:, one],
        static_bytes=tables.static_bytes[:, one],
        activation_bytes=tables.activation_bytes[:, one],
        transient_bytes=tables.transient_bytes[:, one],
        switch_s=tables.switch_s[:, one, one],
        side_inputs=tuple(replace(side, seconds=side.seconds[one, one]) for side in tables.side_inputs),
    )


def _other_pipelines(contest: Contest, plan: Plan) -> list[Rival]:
    rivals = []
    for count in sorted({tables.num_stages for tables in contest.tables} - {plan.num_stages}):
        chosen = [tables for tables in contest.tables if tables.num_stages == count]
        rivals.append(contest.rival(format_plural(count, "stage"), chosen))
    counts = {tables.num_microbatches for tables in contest.tables}
    for count in (plan.num_microbatches // 2, plan.num_microbatches * 2):
        if count in counts:
            chosen = [tables for tables in contest.tables if tables.num_microbatches == count]
            rivals.append(contest.rival(format_plural(count, "microbatch", "microbatches"), chosen))
    return rivals


def _other_schedules(contest: Contest, plan: Plan, options: PlanOptions) -> list[Rival]:
    """The plan's number of stages under the other schedules that were searched, and under GPipe."""
    here = [tables for tables in contest.tables if tables.num_stages == plan.num_stages]
    rivals = [
        contest.rival(schedule, [tables for tables in here if tables.schedule == schedule])
        for schedule in dict.fromkeys(tables.schedule for tables in here)
        if schedule not in (plan.schedule, "gpipe")
    ]
    if plan.schedule == "gpipe":
        return rivals
    counts = sorted({tables.num_microbatches for tables in here})
    settings = [
        Setting(job=contest.job, num_stages=plan.num_stages, num_microbatches=count, schedule="gpipe")
        for count in counts
    ]
    strategies = stage_strategies(contest.job, settings[0].devices_per_stage, options) if settings else ()
    return [*rivals, contest.rival("gpipe", [build_tables(setting, strategies) for setting in settings])]
