r"""Joining runs of layers, stage after stage, into the fastest pipeline.

For each place and switch class where the stages placed so far may end, the pairs (maximum $w$, total $v$) of stage
times that nothing beats are kept; they are a frontier like that of bytes and seconds. A pair is extended by every run
that begins there, and dropped if even the least total and the least maximum of the stages still to come
($\underline v$, $\underline w$) leave the step time $v + \underline v + (m-1)\max(w, \underline w)$ above the aim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.frontier import FloatArray, IntArray, reduce_groups
from steelyard.search.runs import BestRuns, Setting, StageRuns, rest_bounds


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


def join_runs(setting: Setting, stages: Sequence[StageRuns], aim_s: float) -> Solution | None:
    """The fastest pipeline of solved runs with a step time within the aim, or None."""
    rest_total, rest_worst = rest_bounds(stages)
    groups = setting.bounds[0].costs.num_groups
    transitions = [transitions_of(runs.found, groups) for runs in stages]
    joined = [_nothing_placed(groups)]
    for stage, (runs, moves) in enumerate(zip(stages, transitions, strict=True)):
        before = joined[-1]
        parent, run = _matches(before, moves, groups)
        total = before.total[parent] + moves.seconds[run]
        worst = np.maximum(before.worst[parent], moves.seconds[run])
        column = moves.end[run] - runs.ends[0]
        bound = setting.step_s(total + rest_total[stage + 1][column], np.maximum(worst, rest_worst[stage + 1][column]))
        useful = np.flatnonzero(bound <= aim_s)
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


def transitions_of(parts: Sequence[tuple[int, int, BestRuns]], num_groups: int) -> Transitions:
    """The runs (start, end, times) of one stage as one list."""
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
