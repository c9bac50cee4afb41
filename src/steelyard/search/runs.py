r"""Runs of layers that a stage of a fast plan may hold, with their time limits and exact minimum times.

A plan of step time $\hat T$ or less that puts the layers $l..l'-1$ on stage $i$ spends at least $\underline v$ seconds
in the other stages together and $\underline w$ in the slowest of them. The stage itself may therefore take at most

$$t \le \frac{\hat T - \underline v}{m} \;\text{ if that is } \ge \underline w, \qquad
t \le \hat T - \underline v - (m-1)\,\underline w \;\text{ otherwise.}$$

Runs whose bound exceeds their limit are left out. The others are solved, those with the least slack first, because
every minimum time raises the bounds of the others and leaves them less slack. A looser limit makes solving slower, and
a stage that is not the slowest has much slack. A run is therefore first solved within a limit just above its bound, and
further only if `pipeline_dp` asks for it: the times of a run are exact up to a `level`, and all others are longer.
Equal runs are solved once.

| symbol           | name                 | unit | meaning                                              |
|------------------|----------------------|------|------------------------------------------------------|
| $\hat T$         | `aim_s`              | s    | target of the step time                              |
| $\underline v$   | `others`             | s    | minimum total of the stages before and after         |
| $\underline w$   | `slowest`            | s    | minimum of the slowest of these stages               |
| $m$              | `num_passes`         | –    | microbatches, times chunks if interleaved            |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.search.bounds import (
    StageBounds,
    StageMemory,
    boundaries_within,
    furthest_boundaries,
    least_budget,
    least_memory_strategies,
    memory_reaches,
    stage_bounds,
    stage_memories,
)
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.kernels import FloatArray, IntArray
from steelyard.search.layers import (
    ROUNDING,
    ChainFrontier,
    Pruning,
    StageCosts,
    chain_frontier,
    distinct,
    option_table,
)

FIRST_STEP = 0.001
"""Relative distance above its bound up to which a run is first solved."""

STEP_GROWTH = 2.0
"""Factor by which that distance grows each time it is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestRuns:
    """Minimum times of one run by entry and exit class, exact up to the level, with the chain that reaches them.

    If the chain dropped states, times and level may exceed the true ones by its ``missed_s``; ``bound_s`` is a lower
    bound of the minimum time even then.
    """

    level_s: float
    entry: IntArray
    exit: IntArray
    seconds: FloatArray
    state: IntArray
    chain: ChainFrontier
    step: float

    @property
    def bound_s(self) -> float:
        """Minimum time of the run if known, else the level, less what dropped states may gain."""
        return min(float(self.seconds.min(initial=np.inf)), self.level_s) - self.chain.missed_s

    def best(self) -> tuple[int, ...]:
        """Return the strategies of the fastest known state; there must be one."""
        return self.chain.strategies(int(self.state[np.argmin(self.seconds)]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedTables:
    """One `CostTables` prepared for partitioning; ``solved`` caches runs."""

    tables: CostTables
    budget_bytes: int
    rooms: tuple[int, ...]
    """[P] budget minus overhead"""
    memories: list[StageMemory]
    bounds: list[StageBounds]
    fastest_total_s: float
    """Minimum sum of the stage times, without memory and resharding."""
    fitting: list[IntArray]
    """[P] of [L] the largest end of a run that fits on a stage from each layer; empty if there is one pool."""
    solved: dict[tuple[object, ...], BestRuns] = field(default_factory=dict)
    run_bounds: dict[StageBounds, FloatArray] = field(default_factory=dict)
    """[L, L] bounds by first and last layer, filled in by `reaches`."""

    @property
    def has_dropped(self) -> bool:
        """Whether runs have dropped states that no other state beats."""
        return any(runs.chain.missed_s for runs in self.solved.values())

    def forget_dropped(self) -> bool:
        """Return whether runs have dropped states, and let these be solved again, at once up to their limit."""
        dropped = {key: runs for key, runs in self.solved.items() if runs.chain.missed_s}
        self.solved.update((key, replace(runs, level_s=0.0, step=np.inf)) for key, runs in dropped.items())
        return bool(dropped)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.tables.layers)

    def exits(self, stage: int) -> IntArray:
        """Return the switch classes that the last layer of a stage may have."""
        if self.tables.pools is None:
            return np.arange(self.bounds[stage].costs.num_groups)
        costs = self.bounds[stage].costs
        return distinct(costs.switches.group[self.tables.legal_on(stage).any(axis=0)])

    def received(self, stage: int) -> IntArray | None:
        """Return [C + 1, S] bytes that the first layer of a stage receives, by the class before and its strategy."""
        if stage == 0 or self.tables.received is None:
            return None
        by_layout = self.tables.received.num_bytes(stage, self.tables.pipeline.in_flight(stage))
        layout = self.tables.layout_of
        by_strategy = by_layout[layout[self.bounds[stage].costs.switches.sender]][:, layout]
        return np.concatenate([by_strategy, np.zeros_like(by_strategy[:1])])

    def reaches(self, limit_s: float) -> list[IntArray]:
        """Return [P] of [L] the largest end of a run from each layer that fits and has a bound within the limit."""
        starts = np.arange(self.num_layers)
        within: dict[StageBounds, IntArray] = {}
        for bounds in dict.fromkeys(self.bounds):
            if bounds not in self.run_bounds:
                self.run_bounds[bounds] = bounds.matrix((0, self.num_layers), (1, self.num_layers))
            within[bounds] = starts + (self.run_bounds[bounds] <= limit_s).sum(axis=1)
        return [np.minimum(fits, within[bounds]) for fits, bounds in zip(self.fitting, self.bounds, strict=True)]

    def step_s(self, total: FloatArray, worst: FloatArray) -> FloatArray:
        """Return step times from the sums and the maxima of the stage times."""
        more = self.tables.num_passes - 1
        return total + more * worst if more else total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRuns:
    """The runs that one stage may hold: first layers, ends, and [starts, ends] of known bounds and times."""

    starts: IntArray
    ends: IntArray
    bound_s: FloatArray
    """lower bounds of the time, exact if the run has been solved without dropping states"""
    level_s: FloatArray
    """limits up to which the times of the runs are known"""
    found: dict[tuple[int, int], BestRuns]
    """by index of first layer and of end"""


class AnyBudget:
    """Cost tables with the parts of their search that are independent of the budget, computed on first use."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables

    @cached_property
    def memories(self) -> list[StageMemory]:
        """[P] memory of the stages."""
        return stage_memories(self.tables)

    @cached_property
    def least_bytes(self) -> int | None:
        """Lower bound of the bytes per device of every plan; None if some layer has no legal strategy."""
        return least_budget(self.tables, self.memories)

    @cached_property
    def least_plan(self) -> Solution | None:
        """Plan of little memory, the minimum if nothing is freed; None if some layer has no legal strategy."""
        tables, memories, needed = self.tables, self.memories, self.least_bytes
        boundaries = None if needed is None else furthest_boundaries(tables, memories, needed)
        if boundaries is None:
            return None
        return evaluate(tables, boundaries, least_memory_strategies(tables, memories, boundaries))

    @cached_property
    def _bounds(self) -> list[StageBounds]:
        """[P] bounds of every stage, with a memory of 0 bytes; identical stages share one object."""
        tables, options = self.tables, option_table(self.tables)
        alike = [tables.likeness(stage) for stage in range(tables.pipeline.num_stages)]
        costs: dict[tuple[int, int], StageCosts] = {}
        for pool in sorted({own for _, own, *_ in alike}):
            flights = sorted({in_flight for in_flight, own, *_ in alike if own == pool})
            costs |= {
                (in_flight, pool): each for in_flight, each in zip(flights, options.costs(flights, pool), strict=True)
            }
        shared = {each: stage_bounds(costs[each[:2]], tables.layers, 0, each[-1]) for each in dict.fromkeys(alike)}
        return [shared[each] for each in alike]

    def within(self, budget_bytes: int) -> PreparedTables:
        """Return the tables prepared for a budget."""
        tables, rooms = self.tables, self.tables.rooms(budget_bytes)
        fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]
        shared = {
            bounds: replace(bounds, room_bytes=room_bytes)
            for bounds, room_bytes in zip(self._bounds, rooms, strict=True)
        }
        return PreparedTables(
            tables=tables,
            budget_bytes=budget_bytes,
            rooms=rooms,
            memories=self.memories,
            fitting=[] if tables.pools is None else memory_reaches(tables, self.memories, budget_bytes),
            bounds=[shared[bounds] for bounds in self._bounds],
            fastest_total_s=float(fastest.sum()) + tables.all_received_s,
        )


def smallest_peak_bytes(tables: Iterable[AnyBudget]) -> int | None:
    """Return the fewest bytes per device in which some of these tables have a plan; None if none has."""
    found: int | None = None
    of_least = [(each.least_bytes, place, each) for place, each in enumerate(tables) if each.least_bytes is not None]
    for least_bytes, _, each in sorted(of_least, key=lambda one: one[:2]):
        if found is not None and least_bytes >= found:
            break
        plan = each.least_plan
        found = found if plan is None else min(plan.peak_bytes, found or plan.peak_bytes)
    return found


def filled_boundaries(prepared: PreparedTables, limit_s: float) -> tuple[int, ...] | None:
    """Return boundaries that fill each stage as far as memory and the time limit allow; None if layers are left."""
    if prepared.tables.pools is not None:
        return boundaries_within(prepared.tables, prepared.reaches(limit_s))
    boundaries = [0]
    for stage, (memory, bounds) in enumerate(zip(prepared.memories, prepared.bounds, strict=True)):
        place = boundaries[-1]
        end = min(memory.farthest(place, prepared.rooms[stage]), bounds.farthest(place, limit_s))
        end = min(end, prepared.num_layers - prepared.tables.least_layers_behind(stage))
        if end < place + prepared.tables.least_layers(stage):
            return None
        boundaries.append(end)
    return tuple(boundaries) if boundaries[-1] == prepared.num_layers else None


def possible_runs(prepared: PreparedTables, aim_s: float) -> list[StageRuns] | None:
    """Return the window of first layers and of ends of each stage, with bounds; None if some window is empty."""
    more = prepared.tables.num_passes - 1
    limit = (aim_s - prepared.fastest_total_s) / more if more else aim_s
    latest, earliest = [0], [prepared.num_layers]
    for stage, (memory, bounds) in enumerate(zip(prepared.memories, prepared.bounds, strict=True)):
        place = latest[-1]
        end = min(memory.farthest(place, prepared.rooms[stage]), bounds.farthest(place, limit))
        latest.append(min(end, prepared.num_layers - prepared.tables.least_layers_behind(stage)))
    for stage in reversed(range(prepared.tables.pipeline.num_stages)):
        memory, bounds, end = prepared.memories[stage], prepared.bounds[stage], earliest[-1]
        start = max(memory.smallest_start(end, prepared.rooms[stage]), bounds.smallest_start(end, limit))
        start = max(start, prepared.tables.least_layers_before(stage))
        earliest.append(start)
    windows = [np.arange(low, high + 1) for low, high in zip(reversed(earliest), latest, strict=True)]
    if any(len(window) == 0 for window in windows) or windows[0][0] > 0:
        return None
    return _runs_of(prepared, windows)


def runs_between(prepared: PreparedTables, boundaries: Sequence[int]) -> list[StageRuns]:
    """Return the single run of each stage between these boundaries."""
    return _runs_of(prepared, [np.array([place]) for place in boundaries])


def _runs_of(prepared: PreparedTables, windows: Sequence[IntArray]) -> list[StageRuns]:
    stages = []
    for bounds, starts, ends in zip(prepared.bounds, windows, windows[1:], strict=False):
        bound_s = bounds.matrix((int(starts[0]), len(starts)), (int(ends[0]), len(ends)))
        stages.append(StageRuns(starts=starts, ends=ends, bound_s=bound_s, level_s=bound_s.copy(), found={}))
    return stages


def rest_bounds(stages: Sequence[StageRuns]) -> tuple[list[FloatArray], list[FloatArray]]:
    """Return the minimum total and the minimum of the slowest stage from each stage and start to the end.

    The last entry, of zeros, is for the end.
    """
    totals, worsts = [np.zeros(len(stages[-1].ends))], [np.zeros(len(stages[-1].ends))]
    for runs in reversed(stages):
        totals.append(np.min(runs.bound_s + totals[-1], axis=1))
        worsts.append(np.min(np.maximum(runs.bound_s, worsts[-1]), axis=1))
    return totals[::-1], worsts[::-1]


def time_limits(prepared: PreparedTables, stages: Sequence[StageRuns], aim_s: float) -> list[FloatArray]:
    """Return [starts, ends] per stage: the time limit of each run; minus infinity if no plan within the aim has it."""
    rest_total, rest_worst = rest_bounds(stages)
    total, worst = np.zeros(1), np.zeros(1)
    more = prepared.tables.num_passes - 1
    limits = []
    for runs, after_total, after_worst in zip(stages, rest_total[1:], rest_worst[1:], strict=True):
        others = total[:, None] + after_total
        slowest = np.where(np.isfinite(others), np.maximum(worst[:, None], after_worst), 0.0)
        as_slowest = (aim_s - others) / (more + 1)
        limits.append(np.where(as_slowest >= slowest, as_slowest, aim_s - others - more * slowest))
        total = np.min(total[:, None] + runs.bound_s, axis=0)
        worst = np.min(np.maximum(worst[:, None], runs.bound_s), axis=0)
    return limits


def solve_runs(
    prepared: PreparedTables, stages: Sequence[StageRuns], aim_s: float, deadline: float | None = None
) -> None:
    """Find the minimum time of every run that a plan within the aim may hold, those with the least slack first."""
    while True:
        limits = time_limits(prepared, stages, aim_s)
        rooms = []  # [starts, ends] slack between bound and limit, relative to the limit; infinite if useless or known
        for runs, limit in zip(stages, limits, strict=True):
            wanted = (runs.bound_s >= runs.level_s) & (runs.bound_s <= limit)
            room = np.full(limit.shape, np.inf)
            room[wanted] = 1 - runs.bound_s[wanted] / np.maximum(limit[wanted], 1e-300)
            rooms.append(room)
        least = min(float(room.min()) for room in rooms)
        if np.isinf(least):
            return
        for stage, (runs, limit, room) in enumerate(zip(stages, limits, rooms, strict=True)):
            for row, column in np.argwhere(room <= max(2 * least, 0.01)).tolist():
                solve_further(prepared, stage, runs, (row, column), float(limit[row, column]), deadline)


def solve_further(
    prepared: PreparedTables,
    stage: int,
    runs: StageRuns,
    place: tuple[int, int],
    limit_s: float,
    deadline: float | None,
) -> None:
    """Solve one run up to the next step above its level, but not beyond the limit."""
    span = (int(runs.starts[place[0]]), int(runs.ends[place[1]]))
    level = float(runs.level_s[place])
    layer_types = np.array(prepared.tables.run_types(range(*span)), dtype=np.int32).tobytes()
    signature = (
        *prepared.tables.likeness(stage),
        prepared.tables.pool_of(stage - 1) if stage else None,
        stage == prepared.tables.pipeline.num_stages - 1,
        layer_types,
    )
    known = prepared.solved.get(signature)
    if known is None or known.level_s <= level:
        limit_s *= 1 + ROUNDING
        step = FIRST_STEP if known is None else STEP_GROWTH * known.step
        goal = limit_s if level == 0 else min(level * (1 + step), limit_s)
        goal = max(goal, level * (1 + ROUNDING))
        known = prepared.solved[signature] = best_runs(prepared, stage, span, goal, step, deadline)
    runs.found[place] = known
    runs.level_s[place] = known.level_s
    runs.bound_s[place] = max(known.bound_s, runs.bound_s[place])


def best_runs(
    prepared: PreparedTables,
    stage: int,
    span: tuple[int, int],
    level_s: float,
    step: float,
    deadline: float | None = None,
) -> BestRuns:
    """Return the minimum times of one run by entry and exit class that are within the level."""
    tables, bounds = prepared.tables, prepared.bounds[stage]
    groups = bounds.costs.num_groups
    is_last = stage == prepared.tables.pipeline.num_stages - 1
    pruning = Pruning(
        budget_bytes=prepared.rooms[stage],
        limit_s=level_s - bounds.transfer_s,
        prices=bounds.good_prices(*span),
        deadline=deadline,
    )
    entries = prepared.exits(stage - 1) if stage else None
    layer_types = tables.run_types(range(*span))
    received = prepared.received(stage)
    chain = chain_frontier(
        bounds.costs, layer_types, entries=entries, pruning=pruning, received=received, is_last=is_last
    )
    last = chain.last
    ends = last.entry * (groups + 1) + last.group
    order = np.lexsort((last.seconds, ends))
    chosen = order[np.unique(ends[order], return_index=True)[1]]
    return BestRuns(
        level_s=level_s,
        entry=last.entry[chosen],
        exit=last.group[chosen],
        seconds=last.seconds[chosen] + bounds.transfer_s,
        state=chosen,
        chain=chain,
        step=step,
    )
