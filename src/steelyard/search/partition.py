r"""Cuts and strategies chosen together: the provably fastest plan of one pipeline setting.

The objective $T = \sum_i t_i + (m-1) \max_i t_i$ depends on the layers only through the stage times, and rises with
each. So a run of layers $l..l'-1$ on stage $i$, entered from switch class $e$ and left in class $x$, is summed up by
one number, its least time $w_i(l, l', e, x)$ within the memory of that stage. The search aims at a target $\hat T$:

1. *Windows*: where can stage $i$ begin, if every stage fits and none is too slow for the target?
2. *Bounds*: the matrix $\underline t_i(l, l')$ of `bounds`; with the least total and the least maximum of the stages
   before and after, it limits the time that the stage may take in a plan of $T \le \hat T$.
3. *Runs*: those whose bound is within the limit are solved exactly (`chain_frontier`), equal runs once.
4. *Joining*: from the first stage to the last, the pairs (maximum so far, total so far) that nothing beats, for each
   place and class, extended by every run; a pair that cannot reach the target is dropped.

If a plan is found it is optimal, since everything dropped is slower than the target. If not, the target itself is a
proven lower bound, and the search aims higher. It ends, because the plan of least memory is always within reach.

| symbol              | name         | unit | meaning                                              |
|---------------------|--------------|------|------------------------------------------------------|
| $\hat T$            | `target_s`   | s    | step time aimed at                                   |
| $\underline t_i$    | `bound_s`    | s    | lower bound of a stage's time for a run of layers    |
| $w_i$               | `seconds`    | s    | least time of a run, per entry and exit class        |
| $m$                 | –            | –    | microbatches                                         |

Not modelled: what `CostTables` leaves out; the schedule's exact time comes from the simulator in `cost`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.search.bounds import StageBounds, stage_bounds
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.frontier import FloatArray, IntArray, reduce_groups
from steelyard.search.layers import ROUNDING, ChainFrontier, chain_frontier, option_table
from steelyard.search.memory import (
    NearestMiss,
    StageMemory,
    furthest_boundaries,
    least_memory_strategies,
    nearest_miss,
    stage_memories,
)

Status = Literal["optimal", "feasible", "infeasible", "beaten"]

FIRST_AIM = 0.002
"""The first target lies this far above the lower bound; each next one lies four times as far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """The outcome for one pipeline setting.

    ``optimal``: ``solution`` is proven best. ``feasible``: best so far when time ran out. ``infeasible``: see
    ``miss`` (None where no budget helps). ``beaten``: proven no better than the cutoff, so left unsolved.
    ``lower_bound_s`` holds for every plan of the setting.
    """

    status: Status
    solution: Solution | None
    lower_bound_s: float
    miss: NearestMiss | None = None

    @property
    def gap(self) -> float:
        """How much of the step time is not proven necessary, as a fraction; 0 when optimal."""
        if self.solution is None or self.solution.step_s <= self.lower_bound_s or self.status == "optimal":
            return 0.0
        return 1 - self.lower_bound_s / self.solution.step_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestRuns:
    """Least time of one run for each entry and exit class that can reach the target, and how to recover it."""

    entry: IntArray
    exit: IntArray
    seconds: FloatArray
    state: IntArray
    chain: ChainFrontier


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """One `CostTables` prepared for partitioning; ``solved`` remembers runs across targets."""

    tables: CostTables
    room_bytes: int
    memories: list[StageMemory]
    bounds: list[StageBounds]
    solved: dict[tuple[int, bool, bytes], tuple[float, BestRuns]] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.tables.num_stages

    def step_s(self, total: FloatArray | float, worst: FloatArray | float) -> FloatArray | float:
        """Step time from the sum and the maximum of the stage times."""
        more = self.tables.num_microbatches - 1
        return total + more * worst if more else total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRuns:
    """The runs that one stage may hold: first layers, ends, bounds and limits of the time, [starts, ends]."""

    starts: IntArray
    ends: IntArray
    bound_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joined:
    """Unbeaten ways to place the first stages: where they end, their class, total and maximum time."""

    place: IntArray
    group: IntArray
    total: FloatArray
    worst: FloatArray
    parent: IntArray
    run: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transitions:
    """Exact runs of one stage in one flat list, ordered by (start, entry)."""

    start: IntArray
    end: IntArray
    entry: IntArray
    exit: IntArray
    seconds: FloatArray
    source: list[tuple[BestRuns, int]]


def partition_exact(
    tables: CostTables, budget_bytes: int, *, cutoff_s: float = np.inf, deadline: float | None = None
) -> SettingResult:
    """The fastest plan of this setting within the budget per device, with its proof.

    Settings that cannot be faster than ``cutoff_s`` are returned as beaten. ``deadline`` is a `time.monotonic` value.
    """
    memories = stage_memories(tables)
    room = budget_bytes - tables.overhead_bytes
    fitting = furthest_boundaries(memories, room) if len(tables.layers) >= tables.num_stages else None
    if fitting is None:
        return SettingResult(
            status="infeasible", solution=None, lower_bound_s=np.inf, miss=nearest_miss(tables, budget_bytes)
        )
    fallback = evaluate(tables, fitting, least_memory_strategies(tables, fitting))
    lower = quick_bound_s(tables)
    if lower > cutoff_s:
        return SettingResult(status="beaten", solution=None, lower_bound_s=lower)
    setting = prepare(tables, room, memories)
    lower = max(lower, _bottleneck_bound_s(setting))
    aim = FIRST_AIM
    while lower <= cutoff_s and lower < fallback.step_s:
        if deadline is not None and time.monotonic() > deadline:
            return SettingResult(status="feasible", solution=fallback, lower_bound_s=lower)
        target = min(lower * (1 + aim), cutoff_s, fallback.step_s)
        found = _plan_within(setting, target)
        if found is not None:
            return SettingResult(status="optimal", solution=found, lower_bound_s=found.step_s)
        if target >= fallback.step_s:
            break
        lower = max(lower, target * (1 + ROUNDING))
        aim *= 4
    if lower > cutoff_s:
        return SettingResult(status="beaten", solution=None, lower_bound_s=lower)
    return SettingResult(status="optimal", solution=fallback, lower_bound_s=fallback.step_s)


def quick_bound_s(tables: CostTables) -> float:
    """A lower bound of the step time that ignores memory and switches: perfectly even stages of fastest strategies."""
    fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]
    total = float(fastest.sum()) + (tables.num_stages - 1) * tables.transfer_s
    worst = max(total / tables.num_stages, float(fastest.max()))
    return (total + (tables.num_microbatches - 1) * worst) * (1 - ROUNDING)


def prepare(tables: CostTables, room_bytes: int, memories: list[StageMemory] | None = None) -> Setting:
    """Options, dominance and bounds of every stage; stages with equal microbatches in flight share theirs."""
    options = option_table(tables)
    bounds: list[StageBounds] = []
    shared: dict[tuple[int, bool], StageBounds] = {}
    costs = {n: options.stage(n) for n in {tables.in_flight(stage) for stage in range(tables.num_stages)}}
    for stage in range(tables.num_stages):
        key = (tables.in_flight(stage), stage == 0)
        if key not in shared:
            transfer_s = tables.transfer_s if stage else 0.0
            shared[key] = stage_bounds(costs[key[0]], tables.layers, room_bytes, transfer_s)
        bounds.append(shared[key])
    return Setting(tables=tables, room_bytes=room_bytes, memories=memories or stage_memories(tables), bounds=bounds)


def _bottleneck_bound_s(setting: Setting) -> float:
    """Lower bound of the step time: the least maximum that the stage bounds allow, by bisection."""
    tables = setting.tables
    fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]
    total = float(fastest.sum()) + (tables.num_stages - 1) * tables.transfer_s
    low, high = total / tables.num_stages, 2 * total / tables.num_stages
    while not _reaches(setting, high):
        low, high = high, 2 * high
    while high - low > 0.001 * low and high > 0:
        middle = (low + high) / 2
        low, high = (low, middle) if _reaches(setting, middle) else (middle, high)
    return float(setting.step_s(max(total, low), low)) * (1 - ROUNDING)


def _reaches(setting: Setting, limit_s: float) -> bool:
    """Whether stages whose bounds stay within the limit can cover all layers."""
    place, num_layers = 0, len(setting.tables.layers)
    for stage, bounds in enumerate(setting.bounds):
        end = min(bounds.farthest(place, limit_s), num_layers - (setting.num_stages - 1 - stage))
        if end <= place:
            return False
        place = end
    return place == num_layers


def _plan_within(setting: Setting, target_s: float) -> Solution | None:
    """The fastest plan with a step time of at most the target, or None if there is none."""
    aim = target_s * (1 + ROUNDING)
    stages = _stage_runs(setting, aim)
    if stages is None:
        return None
    limits = _limits(setting, stages, aim)
    transitions: list[Transitions] = []
    exact: list[StageRuns] = []
    for stage, (runs, limit) in enumerate(zip(stages, limits, strict=True)):
        found, least = _solve_runs(setting, stage, runs, limit)
        transitions.append(found)
        exact.append(StageRuns(starts=runs.starts, ends=runs.ends, bound_s=least))
    return _join(setting, exact, transitions, aim)


def _stage_runs(setting: Setting, aim: float) -> list[StageRuns] | None:
    """For each stage the window of first layers and of ends, with bounds; None if some window is empty."""
    tables, num_layers = setting.tables, len(setting.tables.layers)
    fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]
    total = float(fastest.sum()) + (tables.num_stages - 1) * tables.transfer_s
    slack = aim - total
    limit = slack / (tables.num_microbatches - 1) if tables.num_microbatches > 1 else aim
    latest, earliest = [0], [num_layers]
    for stage, (memory, bounds) in enumerate(zip(setting.memories, setting.bounds, strict=True)):
        place = latest[-1]
        end = min(memory.farthest(place, setting.room_bytes), bounds.farthest(place, limit))
        latest.append(min(end, num_layers - (setting.num_stages - 1 - stage)))
    for stage in reversed(range(setting.num_stages)):
        memory, bounds, end = setting.memories[stage], setting.bounds[stage], earliest[-1]
        start = max(memory.smallest_start(end, setting.room_bytes), bounds.smallest_start(end, limit), stage)
        earliest.append(start)
    earliest.reverse()
    windows = [np.arange(low, high + 1) for low, high in zip(earliest, latest, strict=True)]
    windows[0] = np.arange(1) if earliest[0] <= 0 else np.arange(0)
    if any(len(window) == 0 for window in windows):
        return None
    runs = []
    for bounds, starts, ends in zip(setting.bounds, windows, windows[1:], strict=False):
        runs.append(StageRuns(starts=starts, ends=ends, bound_s=bounds.matrix(starts, ends)))
    return runs


def _rest(stages: Sequence[StageRuns]) -> tuple[list[FloatArray], list[FloatArray]]:
    """For each stage and each start, the least total and the least maximum from there to the end."""
    totals, worsts = [np.zeros(len(stages[-1].ends))], [np.zeros(len(stages[-1].ends))]
    for runs in reversed(stages):
        totals.append(np.min(runs.bound_s + totals[-1], axis=1))
        worsts.append(np.min(np.maximum(runs.bound_s, worsts[-1]), axis=1))
    return totals[::-1], worsts[::-1]


def _limits(setting: Setting, stages: Sequence[StageRuns], aim: float) -> list[FloatArray]:
    """[starts, ends] per stage: how long the stage may take in a plan within the aim; negative if it may not be."""
    rest_total, rest_worst = _rest(stages)
    total, worst = np.zeros(1), np.zeros(1)
    more = setting.tables.num_microbatches - 1
    limits = []
    for runs, after_total, after_worst in zip(stages, rest_total[1:], rest_worst[1:], strict=True):
        others = total[:, None] + after_total
        slowest = np.maximum(worst[:, None], after_worst)
        with np.errstate(invalid="ignore"):
            as_slowest = (aim - others) / (more + 1)
            as_other = aim - others - more * slowest
            limit = np.where(as_slowest >= slowest, as_slowest, as_other)
        limits.append(np.where(np.isnan(limit), -np.inf, limit))
        total = np.min(total[:, None] + runs.bound_s, axis=0)
        worst = np.min(np.maximum(worst[:, None], runs.bound_s), axis=0)
    return limits


def _solve_runs(
    setting: Setting, stage: int, runs: StageRuns, limit: FloatArray
) -> tuple[Transitions, FloatArray]:
    """Exact times of the runs that may be of use, and [starts, ends] the least of each (infinite if of no use)."""
    wanted: dict[bytes, list[tuple[int, int]]] = {}
    kinds = np.array(setting.tables.layers, dtype=np.int32)
    for row, column in np.argwhere(runs.bound_s <= limit):
        key = kinds[runs.starts[row] : runs.ends[column]].tobytes()
        wanted.setdefault(key, []).append((int(row), int(column)))
    least = np.full(runs.bound_s.shape, np.inf)
    parts: list[tuple[int, int, BestRuns]] = []
    for key, places in wanted.items():
        allowed = max(limit[place] for place in places)
        row, column = places[0]
        best = _best_runs(setting, stage, key, (int(runs.starts[row]), int(runs.ends[column])), allowed)
        if len(best.seconds) == 0:
            continue
        for row, column in places:
            least[row, column] = best.seconds.min()
            parts.append((int(runs.starts[row]), int(runs.ends[column]), best))
    return _flatten(parts, setting.bounds[stage].costs.num_groups), least


def _best_runs(setting: Setting, stage: int, key: bytes, run: tuple[int, int], limit_s: float) -> BestRuns:
    """Least time of one run per entry and exit class, remembered for later targets."""
    tables, bounds = setting.tables, setting.bounds[stage]
    signature = (tables.in_flight(stage), stage == 0, key)
    known = setting.solved.get(signature)
    if known is not None and known[0] >= limit_s:
        return known[1]
    start, end = run
    groups = bounds.costs.num_groups
    chain = chain_frontier(
        bounds.costs,
        tables.layers[start:end],
        entries=np.arange(groups) if stage else None,
        budget_bytes=setting.room_bytes,
        limit_s=limit_s - bounds.transfer_s,
        prices=bounds.best_prices(start, end),
    )
    last = chain.last
    ends = last.entry * (groups + 1) + last.group
    order = np.lexsort((last.seconds, ends))
    first = np.unique(ends[order], return_index=True)[1]
    chosen = order[first]
    best = BestRuns(
        entry=last.entry[chosen],
        exit=last.group[chosen],
        seconds=last.seconds[chosen] + bounds.transfer_s,
        state=chosen,
        chain=chain,
    )
    setting.solved[signature] = (limit_s, best)
    return best


def _flatten(parts: Sequence[tuple[int, int, BestRuns]], num_groups: int) -> Transitions:
    sizes = [len(best.seconds) for _, _, best in parts]
    start = np.repeat(np.array([part[0] for part in parts], dtype=np.int64), sizes)
    end = np.repeat(np.array([part[1] for part in parts], dtype=np.int64), sizes)
    none = np.zeros(0, dtype=np.int64)
    entry = np.concatenate([none, *(best.entry for _, _, best in parts)])
    leave = np.concatenate([none, *(best.exit for _, _, best in parts)])
    seconds = np.concatenate([np.zeros(0), *(best.seconds for _, _, best in parts)])
    source = [(best, index) for _, _, best in parts for index in range(len(best.seconds))]
    order = np.lexsort((leave, end, entry, start))
    return Transitions(
        start=start[order],
        end=end[order],
        entry=entry[order],
        exit=leave[order],
        seconds=seconds[order],
        source=[source[index] for index in order],
    )


def _join(
    setting: Setting, stages: Sequence[StageRuns], transitions: Sequence[Transitions], aim: float
) -> Solution | None:
    """The fastest chain of exact runs within the aim, or None."""
    rest_total, rest_worst = _rest(stages)
    groups = setting.bounds[0].costs.num_groups
    joined = [_nothing_placed(groups)]
    for stage, (runs, moves) in enumerate(zip(stages, transitions, strict=True)):
        before = joined[-1]
        parent, run = _matches(before, moves, groups)
        total = before.total[parent] + moves.seconds[run]
        worst = np.maximum(before.worst[parent], moves.seconds[run])
        column = moves.end[run] - runs.ends[0]
        bound = setting.step_s(
            total + rest_total[stage + 1][column], np.maximum(worst, rest_worst[stage + 1][column])
        )
        useful = np.flatnonzero(bound <= aim)
        parent, run, total, worst = parent[useful], run[useful], total[useful], worst[useful]
        place, group = moves.end[run], moves.exit[run]
        kept = reduce_groups(place * (groups + 1) + group, worst, np.zeros(len(run), dtype=np.int64), total)
        joined.append(
            Joined(
                place=place[kept],
                group=group[kept],
                total=total[kept],
                worst=worst[kept],
                parent=parent[kept],
                run=run[kept],
            )
        )
    if len(joined[-1].place) == 0:
        return None
    best = int(np.argmin(setting.step_s(joined[-1].total, joined[-1].worst)))
    return _recover(setting.tables, joined, transitions, best)


def _nothing_placed(num_groups: int) -> Joined:
    zero = np.zeros(1, dtype=np.int64)
    return Joined(
        place=zero, group=zero + num_groups, total=np.zeros(1), worst=np.zeros(1), parent=zero - 1, run=zero - 1
    )


def _matches(before: Joined, moves: Transitions, num_groups: int) -> tuple[IntArray, IntArray]:
    """All pairs (index of a placement, index of a run) where the run begins where the placement ends."""
    have = before.place * (num_groups + 1) + before.group
    offered = moves.start * (num_groups + 1) + moves.entry
    first, last = np.searchsorted(offered, have, side="left"), np.searchsorted(offered, have, side="right")
    sizes = last - first
    parent = np.repeat(np.arange(len(have)), sizes)
    skipped: NDArray[np.int64] = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return parent, np.arange(len(parent)) - skipped + np.repeat(first, sizes)


def _recover(tables: CostTables, joined: Sequence[Joined], transitions: Sequence[Transitions], last: int) -> Solution:
    boundaries, strategies = [len(tables.layers)], []
    for placed, moves in zip(reversed(joined[1:]), reversed(transitions), strict=True):
        run = int(placed.run[last])
        best, index = moves.source[run]
        strategies.append(best.chain.strategies(int(best.state[index])))
        boundaries.append(int(moves.start[run]))
        last = int(placed.parent[last])
    return evaluate(tables, boundaries[::-1], [each for run in reversed(strategies) for each in run])
