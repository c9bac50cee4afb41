r"""The best cuts of a pipeline whose strategies are given, up to how many leading blocks of each stage are recomputed.

With one strategy for each layer type a plan is its cuts $0 = c_0 < \dots < c_P = L$, and with recomputation also the
number $n_i$ of leading blocks of stage $i$ that are recomputed. Minimised is $\sum_i t_i + (mv-1) \max_i t_i$ over
stages that fit, where $t_i$ depends on $(c_{i-1}, c_i, n_i)$ alone. For every bound $T$ on $\max_i t_i$ a dynamic
program over stages finds the cuts of least $\sum_i t_i$:

$$f_i(b) = \min_{a < b,\ t_i(a, b) \le T} f_{i-1}(a) + t_i(a, b)$$

The least $T$ that has cuts comes from the same recursion with the maximum in place of the sum; greater ones are tried
as long as a smaller sum may pay for them.

What a run of layers holds beside its static and saved bytes is asked only of runs that the best cuts so far use
(`CostTables.transient_of`): by bounds of it most runs certainly fit or certainly do not. A run that turns out not to
fit is struck, or recomputes one block more, and the cuts are sought again, so the result is exact.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.layers import ROUNDING
from steelyard.search.partition import ConfigResult, assess_chain

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Leading(Enum):
    """How many leading blocks of a stage may be recomputed."""

    NONE = "none"
    SAME = "the same number on every stage"
    FREE = "any number on each stage"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """One strategy for every layer type of a configuration, and where blocks may be recomputed that of these."""

    columns: Ints
    """[K] strategies"""
    recomputed: Ints
    """[K] strategies of leading blocks that are recomputed; as ``columns`` where nothing is"""
    leading: Leading
    others: tuple[tuple[Ints, Ints], ...] = ()
    """Further strategies and those of recomputed blocks, of which a stage may have a pair instead if ``leading`` is
    free; they divide tensors as ``columns`` do, so that nothing is redistributed between two pairs."""
    least_s: float
    """What no plan of it is faster than."""
    least_bytes: float
    """What the fullest device of any plan of it holds at least."""

    def of(self, tables: CostTables) -> CostTables:
        """Return the cost tables with this choice alone, all blocks recomputed that may be."""
        legal = np.zeros_like(tables.legal)
        legal[np.arange(len(legal)), self.recomputed] = True
        return replace(tables, legal=legal & tables.legal)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceProspect:
    """A configuration of which only given choices count, before its search."""

    tables: CostTables
    choices: tuple[Choice, ...]
    """One or more, that of the least bound first."""
    budget_bytes: int

    @property
    def lower_bound_s(self) -> float:
        """No plan of any choice is faster."""
        return self.choices[0].least_s

    def settle(self, *, cutoff_s: float = np.inf, deadline: float | None = None) -> ConfigResult:
        """Return the fastest plan of all choices, or the proof that none takes at most ``cutoff_s`` a step."""
        best: Solution | None = None
        for choice in self.choices:
            limit_s = cutoff_s if best is None else best.step_s
            if choice.least_s > limit_s:
                break
            if choice.least_bytes > self.budget_bytes:
                continue
            if best is not None and deadline is not None and time.monotonic() > deadline:
                return ConfigResult(status="feasible", solution=best, lower_bound_s=self.lower_bound_s)
            best = best_cuts(self.tables, choice, self.budget_bytes, cutoff_s=limit_s) or best
        if best is not None:
            return ConfigResult(status="optimal", solution=best, lower_bound_s=best.step_s)
        if cutoff_s < np.inf:
            return ConfigResult(status="beaten", solution=None, lower_bound_s=cutoff_s)
        return ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf)

    def sketch(self) -> ConfigResult:
        """Return the plan of the first choice of which one fits."""
        found = self.settle(deadline=-np.inf)
        return replace(found, status="beaten") if found.status == "feasible" else found

    def with_miss(self) -> ConfigResult:
        """Return by how much the choice of least memory misses."""
        least = min(self.choices, key=lambda each: each.least_bytes)
        miss = assess_chain(replace(least.of(self.tables), cross_layer_inputs=()), self.budget_bytes).miss
        return ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf, miss=miss)


def best_cuts(tables: CostTables, choice: Choice, budget_bytes: int, *, cutoff_s: float = np.inf) -> Solution | None:
    """Return the fastest plan of a choice that fits and takes at most ``cutoff_s`` a step; None where there is none.

    Where all stages recompute the same number of blocks, one more is taken to need no more memory.
    """
    pairs = ((choice.columns, choice.recomputed), *choice.others)
    runs, *others = (_Runs(tables, *pair, budget_bytes) for pair in pairs)
    if choice.leading is not Leading.SAME:
        return _best((runs, *others), 0, cutoff_s, free=choice.leading is Leading.FREE)
    most, best = runs.num_blocks, None
    if runs.bound_s(0) > cutoff_s or _best((runs,), 0, cutoff_s, free=True) is None:
        return None
    count = 0 if runs.has_illegal else _least(most, lambda number: _best((runs,), number, np.inf) is not None)
    while count is not None and count <= most and runs.bound_s(count) <= cutoff_s:
        found = _best((runs,), count, cutoff_s)
        if found is not None:
            best, cutoff_s = found, min(cutoff_s, found.step_s)
            if runs.are_all_recomputed(found):
                break
        count += 1
    return best


def _least(most: int, holds: Callable[[int], bool]) -> int | None:
    """The least number up to ``most`` for which something holds that holds for all greater ones; None where none."""
    if holds(0):
        return 0
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Counts:
    """How many leading blocks are recomputed, for every run: a number, or a matrix of them."""

    given: Ints
    first: Ints
    """The number of the first block of a run, of its first that is not recomputed, and of one past its last."""
    middle: Ints
    end: Ints


class _Runs:
    """All runs of layers that a stage may hold.

    Matrices are [L + 1, L + 1], by the first layer and one past the last.
    """

    def __init__(self, tables: CostTables, columns: Ints, recomputed: Ints, budget_bytes: int) -> None:
        self.tables = tables
        self.rows = np.array(tables.layers)
        self._lasts = np.array(tables.last_types or range(len(tables.layer_types)))[self.rows]
        self.plain, self.recomputed = columns[self.rows], recomputed[self.rows]
        self.is_block = self.plain != self.recomputed
        self.before = np.concatenate([[0], np.cumsum(self.is_block)])
        self.rooms = tables.rooms(budget_bytes)
        self._transient: dict[tuple[int, bytes, int], int] = {}
        self._totals: dict[tuple[str, int, int], Ints] = {}
        works = tables.transient_bytes
        least = np.minimum(works[self._lasts, self.plain], works[self._lasts, self.recomputed])
        self.lower = np.concatenate([[0], least])
        """What a run takes at least beside static and saved bytes, by its end."""
        more = tables.time_s[self.rows, self.recomputed] - tables.time_s[self.rows, self.plain]
        self.more_s = more[self.is_block]
        """[blocks] what each takes more if it is recomputed."""

    @property
    def num_blocks(self) -> int:
        """Blocks that may be recomputed."""
        return int(self.before[-1])

    @property
    def has_illegal(self) -> bool:
        """Whether some block may only be recomputed, or never."""
        legal, rows = self.tables.legal, self.rows[self.is_block]
        return not (legal[rows, self.plain[self.is_block]] & legal[rows, self.recomputed[self.is_block]]).all()

    def are_all_recomputed(self, plan: Solution) -> bool:
        """Whether more of the plan's blocks cannot be recomputed."""
        return bool((np.array(plan.strategies) == self.recomputed)[self.is_block].all())

    def bound_s(self, count: int) -> float:
        """What no plan in which every stage recomputes so many blocks, or all it has, is faster than."""
        stages = self.tables.pipeline.num_stages
        more = np.sort(self.more_s)[: min(self.num_blocks, count)].sum()
        total = self.plain_s + float(more) + self.tables.all_received_s
        return (total + (self.tables.num_passes - 1) * total / stages) * (1 - ROUNDING)

    @property
    def plain_s(self) -> float:
        """What all layers take, none recomputed."""
        return float(self._seconds[-1])

    @cached_property
    def _seconds(self) -> Floats:
        """[L + 1] of the layers before each, none recomputed."""
        tables, rows, plain = self.tables, self.rows, self.plain
        found = tables.time_s[rows, plain].copy()
        shared = tables.switch_s[:1] if not tables.switch_s.strides[0] else tables.switch_s
        layouts = tables.layout_of[plain]
        found[1:] += shared[rows[1:] if len(shared) > 1 else 0, layouts[:-1], layouts[1:]]
        for side in tables.cross_layer_inputs:
            for reader in side.readers:
                found[reader] += side.seconds[plain[side.source], plain[reader]]
        sums: Floats = np.concatenate([[0.0], np.cumsum(found)])
        return sums

    def counts(self, given: Ints) -> _Counts:
        """These numbers of leading blocks, and where they end."""
        first = self.before[:, None]
        end = np.maximum(self.before, first)
        return _Counts(given=given, first=first, middle=np.minimum(first + given, end), end=end)

    def seconds(self, counts: _Counts) -> Floats:
        """What runs take, without receiving; infinite where a layer may not be as it would be."""
        found = self._seconds - self._seconds[:, None]
        legal, rows = self.tables.legal, self.rows
        never = _sums(~legal[rows, self.plain] & ~self.is_block)
        forbidden = never > never[:, None]
        if self.num_blocks:
            more = np.concatenate([[0.0], np.cumsum(self.more_s)])
            found += more[counts.middle] - more[counts.first]
            not_again = _sums(~legal[rows, self.recomputed][self.is_block])
            forbidden |= not_again[counts.middle] > not_again[counts.first]
            forbidden |= self.least_counts(counts) > counts.given
        found[forbidden | (np.arange(len(found)) <= np.arange(len(found))[:, None])] = np.inf
        return found

    def least_counts(self, counts: _Counts) -> Ints:
        """How many leading blocks of every run have to be recomputed, since one of them may not be otherwise."""
        not_plain = ~self.tables.legal[self.rows, self.plain][self.is_block]
        places = np.where(not_plain, np.arange(1, len(not_plain) + 1), 0)
        last = np.maximum.accumulate(np.concatenate([[0], places]))
        found: Ints = np.maximum(0, last[counts.end] - counts.first)
        return found

    def total(self, table: Ints, counts: _Counts) -> Ints:
        """The sum of a table [K, S] over the layers of every run."""
        own, last = table[self.rows, self.plain], table[self._lasts, self.plain]
        sums = _sums(own)
        found = np.zeros((len(sums), len(sums)), dtype=np.int64)
        found[:, 1:] = sums[:-1] - sums[:, None] + last
        if self.num_blocks:
            less, less_last = self.freed(table)
            freed = _sums(less[self.is_block])
            found -= freed[counts.middle] - freed[counts.first]
            is_last = np.concatenate([[False], self.is_block]) & (counts.middle == counts.end)
            found -= np.where(is_last & (counts.middle > counts.first), np.append(0, less_last - less), 0)
        return found

    def freed(self, table: Ints) -> tuple[Ints, Ints]:
        """[L] what a table [K, S] has less of each layer if it is recomputed, inside a stage and as its last."""
        inside, last = (table[rows, self.plain] - table[rows, self.recomputed] for rows in (self.rows, self._lasts))
        return inside, last

    def held(self, in_flight: int, counts: _Counts) -> Ints:
        """Static bytes of every run, and those of so many microbatches in flight."""
        tables = self.tables
        found = self._kept("static", 0, tables.static_bytes, counts)
        found = found + in_flight * self._kept("activation", 0, tables.activation_bytes, counts)
        if in_flight in tables.stage_bytes:
            found += self._kept("stage", in_flight, tables.stage_bytes[in_flight], counts)
        return found

    def _kept(self, name: str, in_flight: int, table: Ints, counts: _Counts) -> Ints:
        """The total of a table, made once where one number of blocks is recomputed on all stages."""
        if counts.given.ndim:
            return self.total(table, counts)
        key = name, in_flight, int(counts.given)
        if key not in self._totals:
            self._totals[key] = self.total(table, counts)
        return self._totals[key]

    def block(self, number: int) -> int | None:
        """The layer that is the block of a number, if it may be recomputed."""
        layer = int(np.append(np.flatnonzero(self.is_block), -1)[min(number, self.num_blocks)])
        return layer if layer >= 0 and self.tables.legal[self.rows[layer], self.recomputed[layer]] else None

    def strategies(self, start: int, end: int, count: int) -> Ints:
        """The strategies of the layers of a run with so many of its blocks recomputed."""
        found: Ints = self.plain[start:end].copy()
        blocks = np.flatnonzero(self.is_block[start:end])[:count]
        found[blocks] = self.recomputed[start:end][blocks]
        return found

    def transient_bytes(self, start: int, end: int, in_flight: int, count: int) -> int:
        """What a run takes beside static and saved bytes, with so many of its blocks recomputed."""
        key = in_flight, self.rows[start:end].tobytes(), count
        if key not in self._transient:
            strategies = self.strategies(start, end, count)
            types = self.tables.run_types(range(start, end))
            self._transient[key] = int(self.tables.transient_of(types, strategies, in_flight))
        return self._transient[key]

    def alike(self, start: int, end: int) -> Ints:
        """The first layers of all runs of the same layer types as this one."""
        windows = np.lib.stride_tricks.sliding_window_view(self.rows, end - start)
        return np.flatnonzero((windows == self.rows[start:end]).all(axis=1))


class _StageRuns:
    """The runs of one stage: what they take, and how many leading blocks are recomputed so that they may fit."""

    def __init__(self, runs: _Runs, stage: int, counts: _Counts, seconds: Floats, *, free: bool) -> None:
        self._runs, self._free, tables = runs, free, runs.tables
        self._in_flight = tables.pipeline.in_flight(stage)
        self._room = np.full(len(seconds), runs.rooms[stage], dtype=np.int64)
        if stage > 0 and tables.received is not None:
            received = tables.received.num_bytes(stage, self._in_flight)
            layouts = tables.layout_of[runs.plain]
            self._room[1:-1] -= received[layouts[:-1], layouts[1:]]
        self._held = runs.held(self._in_flight, counts)
        if free:
            less, _ = runs.freed(tables.held_bytes(self._in_flight))
            freed = np.maximum.accumulate(_sums(less[runs.is_block]))
            missing = self._held + runs.lower - self._room[:, None]
            enough = np.searchsorted(freed, freed[counts.first] + missing) - counts.first
            least = np.maximum(enough, runs.least_counts(counts))
            counts = runs.counts(np.clip(least, 0, counts.end - counts.first))
            self._held, seconds = runs.held(self._in_flight, counts), runs.seconds(counts)
        self._counts = counts.given
        fits = self._held + runs.lower <= self._room[:, None]
        self.seconds: Floats = np.where(fits, seconds + tables.received_s(stage), np.inf)
        if tables.least_layers(stage) > 1:
            self.seconds[np.eye(len(seconds), k=1, dtype=bool)] = np.inf

    def count(self, start: int, end: int) -> int:
        """How many blocks of a run are recomputed."""
        blocks = int(self._runs.before[end] - self._runs.before[start])
        return min(blocks, int(self._counts[start, end] if self._counts.ndim else self._counts))

    def strategies(self, start: int, end: int) -> list[int]:
        """The strategies of the layers of a run."""
        found: list[int] = self._runs.strategies(start, end, self.count(start, end)).tolist()
        return found

    def keeps(self, start: int, end: int) -> bool:
        """Whether a run fits; else it is struck, or recomputes one block more, with all that are like it."""
        runs, count, length = self._runs, self.count(start, end), end - start
        transient = runs.transient_bytes(start, end, self._in_flight, count)
        if self._held[start, end] + transient <= self._room[start]:
            return True
        starts = runs.alike(start, end)
        for first in starts[self._held[starts, starts + length] + transient > self._room[starts]].tolist():
            last = first + length
            if self.count(first, last) != count:
                continue
            layer = runs.block(int(runs.before[first]) + count)
            if not self._free or layer is None or layer >= last:
                self.seconds[first, last] = np.inf
                continue
            self._counts[first, last] += 1
            inside, as_last = runs.freed(runs.tables.held_bytes(self._in_flight))
            self._held[first, last] -= (as_last if layer == last - 1 else inside)[layer]
            self.seconds[first, last] += runs.more_s[runs.before[first] + count]
        return False


def _best(pairs: Sequence[_Runs], count: int, cutoff_s: float, *, free: bool = False) -> Solution | None:
    """The fastest plan that fits, of at most ``cutoff_s``, each stage of which has one of these pairs of strategies.

    ``count`` blocks of each stage are recomputed, or if that is ``free``, as few as fit.
    """
    tables = pairs[0].tables
    every = [(runs, counts, runs.seconds(counts)) for runs in pairs for counts in [runs.counts(np.array(count))]]
    alike: dict[tuple[object, ...], list[_StageRuns]] = {}
    stages = []
    for stage in range(tables.pipeline.num_stages):
        key = tables.likeness(stage), tables.least_layers(stage), stage == 0
        if key not in alike:
            alike[key] = [_StageRuns(runs, stage, counts, seconds, free=free) for runs, counts, seconds in every]
        stages.append(alike[key])
    least_s = min(runs.plain_s for runs in pairs) + tables.all_received_s
    while True:
        of_each = {id(each): np.minimum.reduce([runs.seconds for runs in each]) for each in alike.values()}
        cuts = _cheapest([of_each[id(each)] for each in stages], tables.num_passes, least_s, cutoff_s)
        if cuts is None:
            return None
        spans = list(itertools.pairwise(cuts))
        chosen = [min(each, key=lambda runs: runs.seconds[span]) for each, span in zip(stages, spans, strict=True)]
        if sum(each.keeps(*span) for each, span in zip(chosen, spans, strict=True)) == len(spans):
            found = [strategy for each, span in zip(chosen, spans, strict=True) for strategy in each.strategies(*span)]
            return evaluate(tables, cuts, found)


def _sums(values: NDArray[np.generic]) -> Ints:
    """[N + 1] sums of the first 0 to N values."""
    found: Ints = np.concatenate([np.zeros(1, dtype=np.asarray(values).dtype), np.cumsum(values)])
    return found


def _cheapest(stages: Sequence[Floats], passes: float, least_s: float, cutoff_s: float) -> tuple[int, ...] | None:
    """The cuts with the least sum of all stages and ``passes`` - 1 times the slowest; None where all are above the
    cutoff."""
    limit_s, best_s, best = _least_slowest_s(stages), cutoff_s * (1 + ROUNDING), None
    if passes == 1 and np.isfinite(limit_s):
        limit_s = float(max(each[np.isfinite(each)].max() for each in stages))
    while np.isfinite(limit_s) and least_s + (passes - 1) * limit_s <= best_s:
        total_s, cuts = _least_sum(stages, limit_s)
        slowest_s = max(each[span] for each, span in zip(stages, itertools.pairwise(cuts), strict=True))
        if total_s + (passes - 1) * slowest_s <= best_s:
            best_s, best = total_s + (passes - 1) * slowest_s, cuts
        most_s = (best_s - least_s) / (passes - 1) if passes > 1 else np.inf
        least_s = max(least_s, _least_sum(stages, most_s)[0])
        limit_s = min(float(each[each > limit_s].min(initial=np.inf)) for each in stages) if passes > 1 else np.inf
    return best


def _least_slowest_s(stages: Sequence[Floats]) -> float:
    """What the slowest stage takes at least; infinite where no cuts fit."""
    reached = np.full(len(stages[0]), np.inf)
    reached[0] = 0.0
    for each in stages:
        reached = np.maximum(reached[:, None], each).min(axis=0)
    return float(reached[-1])


def _least_sum(stages: Sequence[Floats], limit_s: float) -> tuple[float, tuple[int, ...]]:
    """The least sum of stages none of which takes more than ``limit_s``, and its cuts."""
    reached = np.full(len(stages[0]), np.inf)
    reached[0] = 0.0
    chosen = []
    for each in stages:
        sums = reached[:, None] + np.where(each <= limit_s, each, np.inf)
        chosen.append(sums.argmin(axis=0))
        reached = sums[chosen[-1], np.arange(len(reached))]
    cuts = [len(reached) - 1]
    for starts in reversed(chosen):
        cuts.append(int(starts[cuts[-1]]))
    return float(reached[-1]), tuple(reversed(cuts))
