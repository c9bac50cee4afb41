"""The fastest plan that the walk through its passes accepts, and what no such plan is faster than.

The walk (`steelyard.cost.stage_memory`) takes a whole plan; the search takes tables that add up. So a *floor* that no
walk is below (`steelyard.cost.memory_floor`) stands for each pipeline setting beside its own tables, which are about as
much above the walk. The fastest plan within a floor is a bound of all plans that the walk accepts, and where the walk
accepts that very plan it is the answer: so it is wherever memory does not bind. Else its cuts get the strategies that
are best by what a stage holds as each layer works (`steelyard.search.stage_walk`), which also bounds plans of one stage
better. Then the floor is searched within less and less, by as much as the walk of the plan found last exceeds its
floor, until a plan is accepted, and the room between the last two is halved; what the setting's own tables allow and
its plain plans compete with it, as far as the walk accepts them. Where the gap of a setting of one stage is open at the
end, or before where it is the only one of these, the fastest of all its plans is sought by what it holds as each layer
works.
Only settings whose bound is below the best accepted plan take part.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from steelyard.cost.fold import unfold_layers, unfold_parts
from steelyard.cost.memory_floor import Floors
from steelyard.cost.pools import AnyJob, PooledFloors, PooledJob, stage_settings, usable_of
from steelyard.cost.predict import memory_terms, predict_memory
from steelyard.cost.setting import Setting
from steelyard.cost.tables import CostTables
from steelyard.plan.certificate import TOLERANCE
from steelyard.plan.plan import Plan
from steelyard.planning.plain import PLAIN_N_D, plain_choices
from steelyard.planning.plan_from_search import bare_plan, grouped_plan
from steelyard.planning.refine import refined
from steelyard.planning.restrictions import means_of, restricted
from steelyard.search import (
    NearestMiss,
    OnDemand,
    Partition,
    SearchResult,
    SettingOutcome,
    SettingResult,
    partition_exact,
    search,
)
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.group_strategies import group_equal_strategies
from steelyard.search.layers import NO_LIMIT_BYTES
from steelyard.search.least_memory import IMPOSSIBLE, least_memory_strategies, nearest_miss, stage_memories
from steelyard.search.partition import quick_bound_s
from steelyard.search.runs import AnyBudget
from steelyard.search.stage_walk import StageWalks
from steelyard.units import format_seconds

SAME = 1e-9
"""Times that differ by no more than this fraction are equal: sums in another order."""
MAX_TRIES = 8
"""Budgets within which a floor is searched until the walk accepts a plan; then that of its own tables is left."""
HALVINGS = 4
"""How often the room between the least budget that was too much and the largest accepted is halved."""
WIDTH = 100
"""States of a layer that are kept where plans are sought by what a stage holds as each layer works."""
MOST_STATES = 2500
"""States of a layer that are told apart where the fastest plan of one stage is sought among all."""
NUM_REFINED = 3
"""Settings whose best plans are refined."""
REFINED_GAP = 0.001
"""Plans are not refined that may gain less than this fraction of a step."""
NUM_SMALL = 8
"""Strategies of least memory by a floor that are tried for the layers of the plan of least memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A plan that the walk accepts, and the outcome of the search that it comes from."""

    outcome: SettingOutcome
    plan: Plan
    is_settled: bool = False
    """Whether no accepted plan of its setting is faster."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """The accepted plans of the settings, fastest first, and what the search says of all settings.

    ``search`` has the bound of all accepted plans and ranks those found. Where there is none its nearest miss is what
    the walk of the plan of least memory found takes, and no plan takes less than ``floor_bytes``.
    """

    ranked: tuple[Accepted, ...]
    search: SearchResult
    bounds_s: tuple[float, ...]
    """What no accepted plan of each setting is faster than, in the order given."""
    floor_bytes: int = 0

    def bounded(self, tables: Sequence[OnDemand]) -> tuple[OnDemand, ...]:
        """The tables that were searched with their bounds, for further searches within no more memory."""
        return tuple(each.bounded(bound_s) for each, bound_s in zip(tables, self.bounds_s, strict=True))


def accept(
    job: AnyJob,
    tables: Sequence[CostTables | OnDemand],
    *,
    num_exact: int = 1,
    num_alternatives: int = 4,
    partition: Partition = "exact",
    time_limit_s: float | None = None,
    floors: Floors | PooledFloors | None = None,
    cutoff_s: float = np.inf,
    to_the_end: bool = True,
    least_gain: float = 0.0,
) -> Acceptance:
    """The fastest accepted plans of a job, of all settings whose cost tables are given.

    ``num_exact`` and ``num_alternatives`` as in `search`. With another ``partition`` than exact nothing is proven.
    ``floors`` saves making those of the tables again for another budget. Plans that are no faster than ``cutoff_s`` are
    of no use. Not ``to_the_end`` leaves out what takes most of the time and finds some percent at most: the tables
    within more than there is, refinement, the search without each means; what is proven holds all the same. Plans that
    gain less than the share ``least_gain`` of a step are not looked for once there is one. Plans over unlike pools,
    which are searched several times, are not refined.
    """
    made = floors or (PooledFloors(job) if isinstance(job, PooledJob) else Floors(job))
    given = [OnDemand.of(each) for each in tables]
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    contest = _Contest(
        job=job,
        given=given,
        num_exact=num_exact,
        made=made,
        known_s=cutoff_s,
        deadline=deadline,
        to_the_end=to_the_end,
        least_gain=least_gain,
        refines=to_the_end and not isinstance(job, PooledJob),
    )
    if partition != "exact":
        found = search(given, usable_of(job), partition=partition)
        contest.bounds_s = [quick_bound_s(each.tables) for each in given]
        contest.admit(found.ranked)
        return _summary(contest, found)
    found = _settle(contest, num_alternatives)
    if contest.refines:
        _refine(contest)
        _without_means(contest)
        _of_all_states(contest)
    return _summary(contest, found)


def _settle(contest: "_Contest", num_alternatives: int) -> SearchResult:
    """Searches all settings of a contest, lets the best of them compete, and says what the search says of all."""
    found = search(
        contest.given,
        contest.room_bytes,
        num_exact=contest.num_exact,
        num_alternatives=num_alternatives,
        time_limit_s=contest.left_s,
        stand_in=lambda index: contest.floors(index)[0],
        cutoff_s=contest.known_s,
    )
    known_s = [each.least_s for each in contest.given]
    contest.bounds_s = [max(each.result.lower_bound_s, known_s[each.index]) for each in found.settings]
    refused = contest.admit(found.ranked[: contest.num_exact + num_alternatives])
    _as_layers_work(contest, found)
    contested = sorted({*contest.open(), *(each.index for each in refused)})
    if contested:
        _compete(contest, contested, found, num_alternatives)
    return found


def _refine(contest: "_Contest") -> None:
    """Refines the best plans of the settings of which a faster one may be accepted."""
    goal_s = contest.cutoff_s * (1 - REFINED_GAP)
    known = [index for index in contest.open() if index in contest.accepted and contest.bounds_s[index] < goal_s]
    for index in sorted(known, key=lambda index: contest.accepted[index].outcome.score_s)[:NUM_REFINED]:
        outcome = contest.accepted[index].outcome
        if contest.refined_s.get(index) == outcome.score_s:
            continue
        solution = refined(
            outcome.tables,
            outcome.solution,
            fits=partial(contest.fits, index, outcome.tables),
            is_over=lambda: contest.left_s == 0,
        )
        result = SettingResult(status="feasible", solution=solution, lower_bound_s=contest.bounds_s[index])
        contest.excess_bytes(_outcome(index, outcome.tables, result))
        contest.refined_s[index] = contest.accepted[index].outcome.score_s


def _without_means(contest: "_Contest") -> None:
    """Tries the settings of which a faster plan may be accepted without each means of the best plan, over and over.

    A smaller space has floors closer to its walks, and plans in it that the whole one hides behind others that the walk
    refuses. Not over unlike pools, of which each search takes seconds.
    """
    assert isinstance(contest.made, Floors), "over pools there is no such search"
    tried = set[str]()
    while contest.accepted:
        best = min(contest.accepted.values(), key=lambda each: each.outcome.score_s)
        means = {name: keeps for name, keeps in means_of(best.plan).items() if name not in tried}
        indices = contest.open()
        if not means or not indices or contest.left_s == 0:
            return
        name, keeps = next(iter(means.items()))
        tried.add(name)
        given = [contest.given[index].narrowed(partial(restricted, keeps=keeps)) for index in indices]
        smaller = replace(
            contest,
            given=given,
            made=contest.made.of_others(),
            num_exact=1,
            known_s=contest.cutoff_s,
            accepted={},
            refines=False,
            walked_stages={},
        )
        _settle(smaller, 0)
        for index, each in smaller.accepted.items():
            outcome = replace(each.outcome, index=indices[index])
            known = contest.accepted.get(indices[index])
            if known is None or outcome.score_s < known.outcome.score_s:
                contest.accepted[indices[index]] = replace(each, outcome=outcome)


def _of_all_states(contest: "_Contest") -> None:
    """Finds the fastest plans of settings of one stage by what it holds as each layer works, or bounds them better."""
    for index in contest.open():
        walks = contest.stage_walks(index) if contest.given[index].pipeline.num_stages == 1 else None
        if walks is None or contest.left_s == 0 or not contest.bounds_s[index] < contest.enough_s < np.inf:
            continue
        solution, bound_s = walks.fastest(contest.room_bytes, contest.cutoff_s, MOST_STATES)
        contest.bounds_s[index] = max(contest.bounds_s[index], bound_s)
        if solution is not None:
            result = SettingResult(status="feasible", solution=solution, lower_bound_s=contest.bounds_s[index])
            contest.excess_bytes(_outcome(index, walks.tables, result))


@dataclass(slots=True, kw_only=True, eq=False)
class _Contest:
    """The settings of a job, what is known of each, and the best accepted plan of each."""

    job: AnyJob
    given: Sequence[OnDemand]
    num_exact: int
    made: Floors | PooledFloors
    known_s: float
    """What a plan of another contest takes."""
    deadline: float | None
    """A `time.monotonic` value."""
    to_the_end: bool = True
    least_gain: float = 0.0
    """Both as `accept` was asked for."""
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
        return self.cutoff_s * (1 - max(least, self.least_gain))

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

    def fits(self, index: int, tables: CostTables, solution: Solution) -> bool:
        """Whether the walk accepts the plan of a solution of a setting, some tables of which are given.

        Most that do not fit hold too much by what is known of every layer, and need no walk.
        """
        walks = self.stage_walks(index)
        if walks is not None and walks.tables.strategies == tables.strategies:
            least_bytes = walks.least_bytes(solution.boundaries, solution.strategies)
        else:
            least_bytes = 0
        return least_bytes <= self.room_bytes and self._walked_excess(tables, solution) == 0

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


def _compete(contest: _Contest, contested: Sequence[int], found: SearchResult, num_alternatives: int) -> None:
    """Finds accepted plans of these settings: what their own tables allow, then what lies between."""
    above = search(
        [contest.given[index].bounded(contest.bounds_s[index]) for index in contested],
        usable_of(contest.job),
        num_exact=contest.num_exact,
        num_alternatives=num_alternatives,
        time_limit_s=contest.left_s,
        cutoff_s=contest.cutoff_s,
    )
    best = above.ranked[: contest.num_exact + num_alternatives]
    contest.admit([replace(each, index=contested[each.index]) for each in best])
    _plain(contest, contest.open())
    if contest.refines:
        _refine(contest)
    if contest.refines and sum(contest.given[index].pipeline.num_stages == 1 for index in contest.open()) == 1:
        _of_all_states(contest)
    for index in contest.open():
        if contest.left_s == 0 and not contest.given[index].is_made:
            continue
        if contest.bounds_s[index] < contest.enough_s:
            _between(contest, index, found.settings[index])
        if contest.to_the_end and contest.bounds_s[index] < contest.enough_s:
            _beyond(contest, index)


def _as_layers_work(contest: _Contest, found: SearchResult) -> None:
    """Finds plans by what a stage holds as each layer works, with the cuts of those within floors."""
    for index in contest.open():
        like = found.settings[index].result.solution
        if like is None or contest.left_s == 0 or contest.bounds_s[index] >= contest.enough_s:
            continue
        walks = contest.stage_walks(index)
        if walks is None:
            return
        if contest.given[index].pipeline.num_stages == 1:
            bound_s = walks.bound_s(contest.room_bytes, min(contest.cutoff_s, 1.1 * like.step_s))
            contest.bounds_s[index] = max(contest.bounds_s[index], bound_s)
        spared = 0
        for _ in range(MAX_TRIES):
            solution = walks.solution(like, contest.room_bytes - spared, WIDTH)
            if solution is None:
                break
            result = SettingResult(status="feasible", solution=solution, lower_bound_s=contest.bounds_s[index])
            excess = contest.excess_bytes(_outcome(index, walks.tables, result))
            if excess == 0:
                break
            spared += excess


def _plain(contest: _Contest, indices: Sequence[int]) -> None:
    """Tries the plain plans of these settings that promise to be of use; over unlike pools none is plain."""
    if isinstance(contest.job, PooledJob):
        return
    given = [contest.given[index] for index in indices]
    for choice in plain_choices(PLAIN_N_D, contest.job, given, contest.made.of):
        if choice.least_s >= contest.cutoff_s * (1 - SAME) or contest.left_s == 0:
            return
        if choice.least_bytes > contest.room_bytes:
            continue
        index = indices[choice.index]
        for whole, narrow, room_bytes in (
            (choice.floor, choice.floor_tables(), contest.room_bytes),
            (choice.setting, choice.tables(), usable_of(contest.job)),
        ):
            result = partition_exact(narrow, room_bytes, cutoff_s=contest.cutoff_s, deadline=contest.deadline)
            if result.solution is None:
                break
            places = [whole.strategies.index(strategy) for strategy in narrow.strategies]
            chosen = tuple(places[strategy] for strategy in result.solution.strategies)
            solution = replace(result.solution, strategies=chosen)
            if contest.excess_bytes(_outcome(index, whole, replace(result, solution=solution))) == 0:
                break


def _between(contest: _Contest, index: int, known: SettingOutcome) -> None:
    """Searches the floors of a setting within less and less until the walk accepts a plan, then within a little more.

    Begins with the floor that bounds the setting best.
    """
    outcome = known if known.result.status == "optimal" else None
    floors = [AnyBudget(each) for each in contest.floors(index)]
    for floor in floors[outcome is not None :]:
        outcome = _within(contest, index, floor, 0) or outcome
        if contest.bounds_s[index] >= contest.enough_s:
            return
    refused, spared = 0, 0
    for _ in range(MAX_TRIES):
        excess = 0 if outcome is None else contest.excess_bytes(outcome)
        if outcome is None or excess == 0:
            break
        walked = contest.room_bytes + excess
        least = {walked - _peak_bytes(each.tables, outcome): each for each in floors}
        floor = least[min(least)]
        refused, spared = spared, max(spared + 1, min(least))
        outcome = _within(contest, index, floor, spared)
    for _ in range(HALVINGS):
        middle = (refused + spared) // 2
        if not refused < middle < spared or contest.left_s == 0 or contest.bounds_s[index] >= contest.enough_s:
            return
        outcome = _within(contest, index, floor, middle)
        if outcome is None or contest.excess_bytes(outcome) == 0:
            spared = middle
        else:
            refused = middle


def _beyond(contest: _Contest, index: int) -> None:
    """Searches the tables of a setting within more than there is, by as much as they are above the walk of its plan."""
    known, tables = contest.accepted.get(index), contest.given[index].tables
    if known is None:
        return
    accepted, refused, whole = 0, NO_LIMIT_BYTES, AnyBudget(tables)
    granted = _peak_bytes(tables, known.outcome) - walked_bytes(known.plan, contest.job)
    for _ in range(HALVINGS):
        if not accepted < granted < refused or contest.left_s == 0 or contest.bounds_s[index] >= contest.enough_s:
            return
        outcome = _within(contest, index, whole, -granted)
        if outcome is None or contest.excess_bytes(outcome) == 0:
            accepted = granted
        else:
            refused = granted
        granted = (accepted + refused) // 2 if refused < NO_LIMIT_BYTES else 2 * accepted


def _peak_bytes(tables: CostTables, outcome: SettingOutcome) -> int:
    solution = outcome.solution
    return evaluate(tables, solution.boundaries, solution.strategies).peak_bytes


def _within(contest: _Contest, index: int, floor: AnyBudget, spared_bytes: int) -> SettingOutcome | None:
    """The fastest plan of a floor within so much less than there is; None where it is of no use."""
    cutoff_s = contest.cutoff_s * (1 - SAME)
    result = partition_exact(floor, contest.room_bytes - spared_bytes, cutoff_s=cutoff_s, deadline=contest.deadline)
    if spared_bytes == 0:
        contest.bounds_s[index] = max(contest.bounds_s[index], result.lower_bound_s)
    if result.solution is None or result.solution.step_s >= cutoff_s:
        return None
    return _outcome(index, floor.tables, result)


def _outcome(index: int, tables: CostTables, result: SettingResult) -> SettingOutcome:
    return SettingOutcome(
        index=index, given=OnDemand.of(tables), result=result, reason="the fastest that the walk accepts"
    )


def _summary(contest: _Contest, found: SearchResult) -> Acceptance:
    """What was accepted, best first, with the bound that holds for all accepted plans."""
    least = None if contest.accepted or contest.known_s < np.inf else _least(contest)
    if least is not None:
        contest.admit([least.outcome])
    accepted = (replace(each, is_settled=contest.is_settled(index)) for index, each in contest.accepted.items())
    ranked = tuple(sorted(accepted, key=lambda each: (each.outcome.score_s, each.outcome.index)))
    if not ranked:
        return _nothing_accepted(contest, found, least)
    fastest_s = ranked[0].outcome.score_s
    bound_s = min(*contest.bounds_s, fastest_s)
    proven = bound_s >= fastest_s * (1 - SAME)
    return Acceptance(
        ranked=ranked,
        search=replace(
            found,
            status="optimal" if proven else "feasible",
            ranked=tuple(each.outcome for each in ranked),
            settings=tuple(_reported(contest, each) for each in found.settings),
            lower_bound_s=fastest_s if proven else bound_s,
        ),
        bounds_s=tuple(contest.bounds_s),
    )


def _reported(contest: _Contest, outcome: SettingOutcome) -> SettingOutcome:
    """The outcome of a setting with the plan that was accepted, or with none."""
    accepted = contest.accepted.get(outcome.index)
    if accepted is not None:
        return replace(outcome, given=accepted.outcome.given, result=accepted.outcome.result)
    if outcome.result.solution is None:
        return outcome
    bound_s = contest.bounds_s[outcome.index]
    reason = f"no plan of it that fits was found; none takes less than {format_seconds(bound_s)} a step"
    return replace(outcome, result=replace(outcome.result, solution=None), reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Least:
    """The plan of least memory of a setting, by the walk."""

    outcome: SettingOutcome
    walked_bytes: int
    miss: NearestMiss


def _least(contest: _Contest) -> _Least | None:
    """The plan that takes least of all settings; None where some layer has no legal strategy in any.

    Of each setting the plans of least memory by its tables are walked; those whose floor is above the best are left.
    Then the layers of the best one are changed, those of a kind on a stage together, as long as the walk takes less.
    """
    best: _Least | None = None
    needed = {index: miss.needed_bytes for index, miss in _misses(contest)}
    for index in sorted(needed, key=lambda index: needed[index]):
        if best is not None and needed[index] >= best.walked_bytes:
            break
        for tables in (contest.given[index].tables, *contest.floors(index)):
            least = _least_of(contest, index, tables)
            if least is not None and (best is None or least.walked_bytes < best.walked_bytes):
                best = least
    return None if best is None else _lessened(contest, best)


def _lessened(contest: _Contest, least: _Least) -> _Least:
    """A plan of the same cuts that takes less by the walk, where one is found by changing some layers at a time."""
    tables = contest.floors(least.outcome.index)[0]
    cuts = least.outcome.solution.boundaries
    best, is_better = least, True
    while is_better:
        is_better = False
        for stage, span in enumerate(pairwise(cuts)):
            for kind in dict.fromkeys(tables.layers[slice(*span)]):
                own = [layer for layer in range(*span) if tables.layers[layer] == kind]
                for strategy in _small_strategies(contest, least.outcome.index, kind, stage):
                    chosen = list(best.outcome.solution.strategies)
                    for layer in own:
                        chosen[layer] = strategy
                    tried = _walked(contest, least, tables, cuts, chosen)
                    if tried.walked_bytes < best.walked_bytes:
                        best, is_better = tried, True
    return best


def _small_strategies(contest: _Contest, index: int, kind: int, stage: int) -> list[int]:
    """The strategies of a kind that take least by some floor of a setting."""
    found: dict[int, None] = {}
    for tables in contest.floors(index):
        num_bytes = tables.held_bytes(tables.pipeline.in_flight(stage))[kind]
        legal = tables.legal_on(stage)[kind]
        order = np.argsort(np.where(legal, num_bytes, IMPOSSIBLE), kind="stable")
        found.update(dict.fromkeys(each for each in order[:NUM_SMALL].tolist() if legal[each]))
    return list(found)


def _misses(contest: _Contest) -> Iterator[tuple[int, NearestMiss]]:
    for index, each in enumerate(contest.given):
        if contest.left_s == 0 and not each.is_made:
            continue
        miss = nearest_miss(contest.floors(index)[0], 0)
        if miss is not None:
            yield index, miss


def _least_of(contest: _Contest, index: int, tables: CostTables) -> _Least | None:
    memories = stage_memories(tables)
    miss = nearest_miss(tables, 0, memories)
    if miss is None:
        return None
    chosen = least_memory_strategies(tables, memories, miss.boundaries)
    solution = evaluate(tables, miss.boundaries, chosen)
    outcome = _outcome(index, tables, SettingResult(status="feasible", solution=solution, lower_bound_s=0.0))
    return _weighed(contest, outcome, miss)


def _walked(contest: _Contest, least: _Least, tables: CostTables, cuts: Sequence[int], chosen: Sequence[int]) -> _Least:
    result = SettingResult(status="feasible", solution=evaluate(tables, cuts, chosen), lower_bound_s=0.0)
    return _weighed(contest, _outcome(least.outcome.index, tables, result), least.miss)


def _weighed(contest: _Contest, outcome: SettingOutcome, miss: NearestMiss) -> _Least:
    """An outcome with the bytes that the walk of its plan finds, and what they miss."""
    walked = walked_bytes(grouped_plan(contest.job, outcome), contest.job)
    missing = walked - usable_of(contest.job)
    return _Least(outcome=outcome, walked_bytes=walked, miss=replace(miss, needed_bytes=walked, miss_bytes=missing))


def _nothing_accepted(contest: _Contest, found: SearchResult, least: _Least | None) -> Acceptance:
    nothing = tuple(_reported(contest, each) for each in found.settings)
    return Acceptance(
        ranked=(),
        bounds_s=tuple(contest.bounds_s),
        floor_bytes=min((miss.needed_bytes for _, miss in _misses(contest)), default=0) if least else 0,
        search=replace(
            found,
            status="infeasible",
            ranked=(),
            settings=nothing,
            lower_bound_s=min(contest.bounds_s),
            nearest_miss=least.miss if least else None,
            nearest_index=least.outcome.index if least else None,
        ),
    )
