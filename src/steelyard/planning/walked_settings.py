"""The pipeline settings of a job that compete, and the walk through passes, which accepts plans or refuses them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from steelyard.cost.fold import unfold_layers, unfold_parts
from steelyard.cost.memory_floor import Floors
from steelyard.cost.pools import AnyJob, PooledFloors, PooledJob, stage_settings, usable_of
from steelyard.cost.predict import memory_terms, predict_memory
from steelyard.cost.setting import Setting
from steelyard.cost.tables import CostTables
from steelyard.plan.certificate import TOLERANCE
from steelyard.plan.plan import Plan
from steelyard.planning.plan_from_search import bare_plan
from steelyard.search import OnDemand, SettingOutcome, SettingResult
from steelyard.search.evaluate import Solution
from steelyard.search.group_strategies import group_equal_strategies
from steelyard.search.stage_walk import StageWalks

SAME = 1e-9
"""Times that differ by no more than this fraction are equal: sums in another order."""
LEAST_GAIN = 0.01
"""Of a step what a plan must gain to be looked for, once there is one, where the search does not go to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A plan that the walk accepts, and the outcome of the search that it comes from."""

    outcome: SettingOutcome
    plan: Plan
    is_settled: bool = False
    """Whether no accepted plan of its setting is faster."""


@dataclass(slots=True, kw_only=True, eq=False)
class WalkedSettings:
    """The settings of a job, what is known of each, and the best accepted plan of each."""

    job: AnyJob
    given: Sequence[OnDemand]
    num_exact: int
    made: Floors | PooledFloors
    known_s: float
    """What a plan of other settings takes."""
    deadline: float | None
    """A `time.monotonic` value."""
    to_the_end: bool = True
    """As `accept` was asked for."""
    refines: bool = False
    """Whether the best plans are refined before other settings are searched further."""
    room_bytes: int = field(init=False)
    """What tensors and the process may take at most, of any plan that fits: a byte may be lost in rounding."""
    bounds_s: list[float] = field(init=False)
    accepted: dict[int, Accepted] = field(default_factory=dict)
    refined_s: dict[int, float] = field(default_factory=dict)
    """What the refined plans of settings take."""
    walks: dict[tuple[object, ...], int] = field(default_factory=dict)
    """By how much they exceed the room, by pipeline setting, pools, cuts and strategies."""
    walked_stages: dict[int, StageWalks | None] = field(default_factory=dict)
    """By the index of a setting."""
    settings: dict[tuple[object, ...], tuple[Setting, ...]] = field(default_factory=dict)
    """Of the stages, by pipeline setting and pools."""

    def __post_init__(self) -> None:
        own_slack = self.job.execution.keeps_own_buffers
        self.room_bytes = self.job.budget_bytes if own_slack else usable_of(self.job) + 1
        self.bounds_s = [0.0] * len(self.given)

    def floors(self, index: int) -> tuple[CostTables, ...]:
        """The floors of a setting, made when first asked for."""
        return self.made.of(self.given[index].tables)

    def stage_walks(self, index: int) -> StageWalks | None:
        """What a setting's stages hold as each layer works; None for a framework with states of its own."""
        if index not in self.walked_stages:
            tables = self.given[index].tables
            working = self.made.working(tables)
            self.walked_stages[index] = None if working is None else StageWalks(tables, working)
        return self.walked_stages[index]

    @property
    def left_s(self) -> float | None:
        """Seconds that are left; None for as many as it takes."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def cutoff_s(self) -> float:
        """What an accepted plan has to be faster than to be of use."""
        best = sorted(each.outcome.score_s for each in self.accepted.values())
        return min(self.known_s, best[self.num_exact - 1] if len(best) >= self.num_exact else np.inf)

    @property
    def enough_s(self) -> float:
        """A setting of which no plan is faster than this is not searched further.

        Over unlike pools, of which each search takes long, it need not be searched for less than `TOLERANCE`.
        """
        least = TOLERANCE if isinstance(self.job, PooledJob) else SAME
        return self.cutoff_s * (1 - (least if self.to_the_end else LEAST_GAIN))

    def open(self) -> list[int]:
        """The settings of which a faster plan may be accepted, most promising first."""
        enough_s = self.enough_s
        found = [
            index for index, bound_s in enumerate(self.bounds_s) if bound_s < enough_s and not self.is_settled(index)
        ]
        return sorted(found, key=lambda index: self.bounds_s[index])

    def is_settled(self, index: int) -> bool:
        """Whether the accepted plan of a setting is as fast as any of it can be."""
        mine = self.accepted.get(index)
        return mine is not None and mine.outcome.score_s <= self.bounds_s[index] * (1 + SAME)

    def admit(self, outcomes: Sequence[SettingOutcome]) -> list[SettingOutcome]:
        """Lets the walk judge the plans of these outcomes; returns those that it refuses."""
        return [outcome for outcome in outcomes if self.excess_bytes(outcome) > 0]

    def excess_bytes(self, outcome: SettingOutcome) -> int:
        """By how much the walk of an outcome's plan exceeds the room, 0 where it fits: then the plan competes.

        Equal layers in the order that reads best, or where that does not fit as they were found.
        """
        excess, as_found = 0, outcome.solution
        for solution in (group_equal_strategies(outcome.tables, as_found), as_found):
            excess = self._walked_excess(outcome.tables, solution)
            if excess == 0:
                known = self.accepted.get(outcome.index)
                if known is None or outcome.score_s < known.outcome.score_s:
                    plan = bare_plan(self.job, outcome.tables, solution)
                    self.accepted[outcome.index] = Accepted(outcome=outcome, plan=plan)
                break
        return excess

    def holds_too_much(
        self, index: int, tables: CostTables, boundaries: Sequence[int], strategies: Sequence[int]
    ) -> bool:
        """Whether a choice for a setting, some tables of which are given, takes too much by what is known of layers.

        Most that do not fit do, and need no walk.
        """
        walks = self.stage_walks(index)
        if walks is None or walks.tables.strategies != tables.strategies:
            return False
        return walks.least_bytes(boundaries, strategies) > self.room_bytes

    def fits(self, tables: CostTables, solution: Solution) -> bool:
        """Whether the walk accepts the plan of a solution of a setting, some tables of which are given."""
        return self._walked_excess(tables, solution) == 0

    def _walked_excess(self, tables: CostTables, solution: Solution) -> int:
        """By how much the walk of a solution's plan exceeds the room, of any tables of the pipeline setting."""
        strategies = tuple(tables.strategies[index] for index in solution.strategies)
        place = tables.pipeline, tables.pools and (tables.pools.order, tables.pools.of_stages)
        key = (*place, solution.boundaries, strategies)
        if key not in self.walks:
            if place not in self.settings:
                self.settings[place] = _stage_settings(self.job, tables, solution)
            chunks, settings = tables.pipeline.num_chunks, self.settings[place]
            parts = [range(first, end) for _, first, end in unfold_parts(solution.boundaries, chunks)]
            stages = memory_terms(parts, unfold_layers(strategies, chunks), settings)
            self.walks[key] = self._excess_bytes(stages, settings)
        return self.walks[key]

    def _excess_bytes(self, stages: Sequence[Mapping[str, int]], settings: Sequence[Setting]) -> int:
        budgets = [each.job.budget_bytes for each in settings]
        if all(sum(terms.values()) <= budget for terms, budget in zip(stages, budgets, strict=True)):
            return 0
        return max(1, _fullest_bytes(stages, settings, self.job) - self.room_bytes)


def _stage_settings(job: AnyJob, tables: CostTables, solution: Solution) -> tuple[Setting, ...]:
    """The setting of each stage of a solution's plan; on one pool all are alike."""
    if isinstance(job, PooledJob):
        return stage_settings(bare_plan(job, tables, solution), job)
    return (Setting(job=job, pipeline=tables.pipeline),) * tables.pipeline.num_stages


def walked_bytes(plan: Plan, job: AnyJob) -> int:
    """Bytes of the fullest device of a plan, the allocator's slack left out.

    Of several pools with what a device has less than one of the roomiest, as in their tables.
    """
    return _fullest_bytes(predict_memory(plan, job), stage_settings(plan, job), job)


def _fullest_bytes(stages: Sequence[Mapping[str, int]], settings: Sequence[Setting], job: AnyJob) -> int:
    spared = [usable_of(job) - usable_of(each.job) for each in settings]
    pairs = zip(stages, spared, strict=True)
    return max(sum(terms.values()) - terms.get("allocator slack", 0) + more for terms, more in pairs)


def outcome_of(index: int, tables: CostTables, result: SettingResult) -> SettingOutcome:
    """The outcome of a setting of this index, by tables of it that may not be its own."""
    return SettingOutcome(
        index=index, given=OnDemand.of(tables), result=result, reason="the fastest that the walk accepts"
    )
