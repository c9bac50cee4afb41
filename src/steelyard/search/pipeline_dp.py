r"""Dynamic program that joins runs of layers, stage after stage, into the fastest pipeline.

The stages placed so far may end at several places and switch classes. The unbeaten pairs (maximum $w$, total $v$) of
stage times are kept for each; they are a frontier like that of bytes and seconds. A pair is extended by every run
that begins there, and dropped if even the minimum total and the minimum maximum of the stages still to come
($\underline v$, $\underline w$) leave the step time $v + \underline v + (m-1)\max(w, \underline w)$ above the aim.

Only the times of a run up to a level are known; all others are longer. They are represented by a *hopeful* run that
takes exactly the level and may be entered from any class and left in any. The fastest pipeline with hopeful runs is a
lower bound; one without them is the answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.search.kernels import FloatArray, IntArray
from steelyard.search.runs import BestRuns, PreparedTables, StageRuns, rest_bounds, time_limits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joined:
    """Unbeaten placements of the first stages: their end, class, total and maximum time.

    Class C + 1 is that of a hopeful run, which matches any next run.
    """

    place: IntArray
    group: IntArray
    total: FloatArray
    worst: FloatArray
    parent: IntArray
    run: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transitions:
    """Runs of one stage in one flat list, ordered by (start, entry); ``state`` is -1 for hopeful ones."""

    start: IntArray
    end: IntArray
    entry: IntArray
    exit: IntArray
    seconds: FloatArray
    state: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One stage of a pipeline: first layer, end, and the state of its run, -1 if it is hopeful."""

    start: int
    end: int
    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The fastest pipeline; a lower bound of the step time if some leg is hopeful."""

    step_s: float
    legs: tuple[Leg, ...]

    @property
    def hopeful(self) -> tuple[int, ...]:
        """Stages whose runs have to be solved further."""
        return tuple(stage for stage, leg in enumerate(self.legs) if leg.state < 0)


def join_runs(prepared: PreparedTables, stages: Sequence[StageRuns], aim_s: float) -> Pipeline | None:
    """Return the fastest pipeline with a step time within the aim, hopeful runs included, or None."""
    rest_total, rest_worst = rest_bounds(stages)
    groups = prepared.bounds[0].costs.num_groups
    limits = time_limits(prepared, stages, aim_s)
    transitions = [transitions_of(runs, limit, groups) for runs, limit in zip(stages, limits, strict=True)]
    zero = np.zeros(1, dtype=np.int64)
    nothing = {"place": zero, "group": zero + groups, "parent": zero - 1, "run": zero - 1}
    joined = [Joined(**nothing, total=np.zeros(1), worst=np.zeros(1))]
    for stage, (runs, moves) in enumerate(zip(stages, transitions, strict=True)):
        before = joined[-1]
        parent, run = _matches(before, moves, groups)
        total = before.total[parent] + moves.seconds[run]
        worst = np.maximum(before.worst[parent], moves.seconds[run])
        column = moves.end[run] - runs.ends[0]
        bound = prepared.step_s(total + rest_total[stage + 1][column], np.maximum(worst, rest_worst[stage + 1][column]))
        useful = np.flatnonzero(bound <= aim_s)
        parent, run, total, worst = parent[useful], run[useful], total[useful], worst[useful]
        place, group = moves.end[run], moves.exit[run]
        kept = reduce_groups(place * (groups + 2) + group, worst, total)
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
    step_s = prepared.step_s(joined[-1].total, joined[-1].worst)
    best = int(np.argmin(step_s))
    return Pipeline(step_s=float(step_s[best]), legs=tuple(_legs(joined, transitions, best))[::-1])


def reduce_groups(group: IntArray, first: FloatArray, second: FloatArray) -> IntArray:
    """Return indices of the points that no point of their own group beats, ordered by group, then ``first``.

    The first of equal points is kept.
    """
    order = np.lexsort((second, first, group))
    rank = np.unique(second, return_inverse=True)[1][order]
    number = np.unique(group, return_inverse=True)[1][order]
    falling = rank - number * len(order)  # all ranks of a later group are below those of an earlier one
    is_kept = np.ones(len(order), dtype=bool)
    is_kept[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
    return order[is_kept]


def _matches(before: Joined, moves: Transitions, num_groups: int) -> tuple[IntArray, IntArray]:
    """Return all pairs (index of a placement, index of a run) in which the run begins where the placement ends."""
    have = before.place * (num_groups + 2) + before.group
    offered = moves.start * (num_groups + 2) + moves.entry
    first, last = np.searchsorted(offered, have, side="left"), np.searchsorted(offered, have, side="right")
    sizes = last - first
    parent = np.repeat(np.arange(len(have)), sizes)
    skipped: NDArray[np.int64] = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return parent, np.arange(len(parent)) - skipped + np.repeat(first, sizes)


def _legs(joined: Sequence[Joined], transitions: Sequence[Transitions], last: int) -> Iterator[Leg]:
    """Yield the legs of the pipeline that ends in this placement, last stage first."""
    for placed, moves in zip(reversed(joined[1:]), reversed(transitions), strict=True):
        run = int(placed.run[last])
        yield Leg(start=int(moves.start[run]), end=int(moves.end[run]), state=int(moves.state[run]))
        last = int(placed.parent[last])


def transitions_of(runs: StageRuns, limit_s: FloatArray, num_groups: int) -> Transitions:
    """Return all runs of one stage that may be within their limits, known and hopeful."""
    parts = [_known(runs, place, best) for place, best in runs.found.items() if runs.bound_s[place] <= limit_s[place]]
    parts += [_into_any(part, num_groups) for part in parts]
    parts.append(_hopeful(runs, limit_s, num_groups))
    start, end, entry, leave, state = np.concatenate([numbers for numbers, _ in parts], axis=1)
    seconds = np.concatenate([seconds for _, seconds in parts])
    order = np.lexsort((leave, end, entry, start))
    return Transitions(
        start=start[order],
        end=end[order],
        entry=entry[order],
        exit=leave[order],
        seconds=seconds[order],
        state=state[order],
    )


Part = tuple[IntArray, FloatArray]
"""[5, n] start, end, entry, exit and state, and [n] seconds."""


def _known(runs: StageRuns, place: tuple[int, int], best: BestRuns) -> Part:
    span = np.array([[runs.starts[place[0]]], [runs.ends[place[1]]]])
    spans = np.broadcast_to(span, (2, len(best.seconds)))
    return np.concatenate([spans, [best.entry, best.exit, best.state]]), best.seconds


def _into_any(part: Part, num_groups: int) -> Part:
    """Return the fastest of these runs for each exit, entered after a hopeful run."""
    numbers, seconds = part
    order = np.lexsort((seconds, numbers[3]))
    fastest = order[np.unique(numbers[3][order], return_index=True)[1]]
    after = numbers[:, fastest].copy()
    after[2] = num_groups + 1
    return after, seconds[fastest]


def _hopeful(runs: StageRuns, limit_s: FloatArray, num_groups: int) -> Part:
    """Return hopeful runs: each takes exactly its level, from each entry class into any exit class."""
    rows, columns = np.nonzero(runs.level_s <= limit_s)
    size, classes = len(rows), num_groups + 2
    numbers = np.empty((5, size * classes), dtype=np.int64)
    numbers[0], numbers[1] = np.repeat(runs.starts[rows], classes), np.repeat(runs.ends[columns], classes)
    numbers[2], numbers[3], numbers[4] = np.tile(np.arange(classes), size), num_groups + 1, -1
    return numbers, np.repeat(runs.level_s[rows, columns], classes)
