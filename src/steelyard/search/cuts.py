r"""The best cuts of a pipeline whose strategies are given, up to how many leading blocks of each stage are recomputed.

A plan with one strategy for each layer type is its cuts $0 = c_0 < \dots < c_P = L$ and, with recomputation, the
number $n_i$ of leading blocks of stage $i$ that are recomputed. The search minimises $\sum_i t_i + (mv-1) \max_i t_i$
over stages that fit, where $t_i$ depends on $(c_{i-1}, c_i, n_i)$ alone. A dynamic program over stages finds the cuts
of minimum $\sum_i t_i$ for every bound $T$ on $\max_i t_i$:

$$f_i(b) = \min_{a < b,\ t_i(a, b) \le T} f_{i-1}(a) + t_i(a, b)$$

The smallest $T$ that has cuts comes from the same recursion with the maximum in place of the sum; larger ones are tried
as long as a smaller sum may pay for them.

The transient bytes of a run (`CostTables.transient_of`) are computed only for runs that the best cuts so far use; a
lower bound excludes most others. A run that turns out not to fit is excluded, or recomputes one more block, and the
cuts are searched again, so the result is exact.
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
from steelyard.limits import MOST_BYTES
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.layers import ROUNDING
from steelyard.search.partition import ConfigResult, assess_chain

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Leading(Enum):
    """Number of leading blocks of a stage that may be recomputed."""

    NONE = "none"
    SAME = "the same number on every stage"
    FREE = "any number on each stage"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """One strategy for every layer type of a configuration, and one for its recomputed blocks."""

    columns: Ints
    """[K] strategies"""
    recomputed: Ints
    """[K] strategies of leading blocks that are recomputed; equal to ``columns`` if nothing is"""
    leading: Leading
    others: tuple[tuple[Ints, Ints], ...] = ()
    """Alternative pairs of ``columns`` and ``recomputed`` that a stage may have if ``leading`` is free; they divide
    tensors as ``columns`` do, so that nothing is redistributed between two pairs."""
    least_s: float
    """Lower bound of the step time of its plans."""
    least_bytes: float
    """Lower bound of the bytes of the fullest device in any of its plans."""

    def of(self, tables: CostTables) -> CostTables:
        """Return the cost tables with this choice alone and as many blocks as possible recomputed."""
        legal = np.zeros_like(tables.legal)
        legal[np.arange(len(legal)), self.recomputed] = True
        return replace(tables, legal=legal & tables.legal)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceProspect:
    """A configuration restricted to given choices, before its search."""

    tables: CostTables
    choices: tuple[Choice, ...]
    """One or more choices, lowest bound first."""
    budget_bytes: int

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of the step time of all choices."""
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
            if best is not None and deadline is not None and time.process_time() > deadline:
                return ConfigResult(status="feasible", solution=best, lower_bound_s=self.lower_bound_s)
            best = best_cuts(self.tables, choice, self.budget_bytes, cutoff_s=limit_s) or best
        if best is not None:
            return ConfigResult(status="optimal", solution=best, lower_bound_s=best.step_s)
        if cutoff_s < np.inf:
            return ConfigResult(status="beaten", solution=None, lower_bound_s=cutoff_s)
        return ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf)

    def sketch(self) -> ConfigResult:
        """Return the plan of the first choice that has one that fits."""
        found = self.settle(deadline=-np.inf)
        return replace(found, status="beaten") if found.status == "feasible" else found

    def with_miss(self) -> ConfigResult:
        """Return an infeasible result with the miss of the choice that needs the least memory."""
        least = min(self.choices, key=lambda each: each.least_bytes)
        miss = assess_chain(replace(least.of(self.tables), cross_layer_inputs=()), self.budget_bytes).miss
        return ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf, miss=miss)


def best_cuts(tables: CostTables, choice: Choice, budget_bytes: int, *, cutoff_s: float = np.inf) -> Solution | None:
    """Return the fastest plan of a choice that fits and takes at most ``cutoff_s`` per step; None if there is none.

    If all stages recompute the same number of blocks, one more block is assumed to need no more memory.
    """
    pairs = ((choice.columns, choice.recomputed), *choice.others)
    runs, *others = (_Runs(tables, *pair, budget_bytes) for pair in pairs)
    if choice.leading is not Leading.SAME:
        is_free = choice.leading is Leading.FREE
        return _best((runs, *others), 0, cutoff_s, free=is_free) if not is_free or _may_fit((runs, *others)) else None
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
    """Return the smallest number up to ``most`` for which a monotone condition holds; None if there is none."""
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
    """Number of leading blocks that are recomputed in every run: one number, or a matrix of them."""

    given: Ints
    first: Ints
    """Number of the first block of a run, then (``middle``) of its first block that is not recomputed and (``end``) of
    the one past its last."""
    middle: Ints
    end: Ints


class _Runs:
    """All runs of layers that a stage may hold.

    Matrices are [L + 1, L + 1], by the first layer and one past the last.
    """

    def __init__(self, tables: CostTables, columns: Ints, recomputed: Ints, budget_bytes: int) -> None:
        self.tables = tables
        self.rows = np.array(tables.layers)
        self.lasts = np.array(tables.last_types or range(len(tables.layer_types)))[self.rows]
        self.plain, self.recomputed = columns[self.rows], recomputed[self.rows]
        self.is_block = self.plain != self.recomputed
        self.before = np.concatenate([[0], np.cumsum(self.is_block)])
        self.rooms = tables.rooms(budget_bytes)
        self._transient: dict[tuple[int, bytes, int], int] = {}
        self._totals: dict[tuple[str, int, int], Ints] = {}
        works = tables.transient_bytes
        least = np.minimum(works[self.lasts, self.plain], works[self.lasts, self.recomputed])
        self.lower = np.concatenate([[0], least])
        """[L + 1] lower bound of a run's transient bytes by its end."""
        more = tables.time_s[self.rows, self.recomputed] - tables.time_s[self.rows, self.plain]
        self.more_s = more[self.is_block]
        """[blocks] additional seconds of each if it is recomputed."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that may be recomputed."""
        return int(self.before[-1])

    @property
    def has_illegal(self) -> bool:
        """Whether some block must be recomputed, or must not be."""
        legal, rows = self.tables.legal, self.rows[self.is_block]
        return not (legal[rows, self.plain[self.is_block]] & legal[rows, self.recomputed[self.is_block]]).all()

    def are_all_recomputed(self, plan: Solution) -> bool:
        """Return whether all blocks of the plan are recomputed."""
        return bool((np.array(plan.strategies) == self.recomputed)[self.is_block].all())

    def bound_s(self, count: int) -> float:
        """Lower bound of the step time of plans in which every stage recomputes ``count`` blocks, or all it has."""
        stages = self.tables.pipeline.num_stages
        more = np.sort(self.more_s)[: min(self.num_blocks, count)].sum()
        total = self.plain_s + float(more) + self.tables.all_received_s
        return (total + (self.tables.num_passes - 1) * total / stages) * (1 - ROUNDING)

    @property
    def plain_s(self) -> float:
        """Seconds of all layers without recomputation."""
        return float(self._seconds[-1])

    @cached_property
    def _seconds(self) -> Floats:
        """[L + 1] seconds of the layers before each, without recomputation."""
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
        """Return these numbers of leading blocks with the block numbers that they end at."""
        first = self.before[:, None]
        end = np.maximum(self.before, first)
        return _Counts(given=given, first=first, middle=np.minimum(first + given, end), end=end)

    def seconds(self, counts: _Counts) -> Floats:
        """Return seconds of every run without receiving; infinite if a layer's strategy would be illegal."""
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
        """Return the number of leading blocks of every run up to its last block that must be recomputed."""
        not_plain = ~self.tables.legal[self.rows, self.plain][self.is_block]
        places = np.where(not_plain, np.arange(1, len(not_plain) + 1), 0)
        last = np.maximum.accumulate(np.concatenate([[0], places]))
        found: Ints = np.maximum(0, last[counts.end] - counts.first)
        return found

    def total(self, table: Ints, counts: _Counts) -> Ints:
        """Return the sum of a table [K, S] over the layers of every run."""
        own, last = table[self.rows, self.plain], table[self.lasts, self.plain]
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
        """Return [L] the decrease of a table [K, S] if a layer is recomputed: inside a stage, and as its last layer."""
        inside, last = (table[rows, self.plain] - table[rows, self.recomputed] for rows in (self.rows, self.lasts))
        return inside, last

    def held(self, in_flight: int, counts: _Counts) -> Ints:
        """Return the static bytes of every run plus those of ``in_flight`` microbatches."""
        tables = self.tables
        found = self._kept("static", 0, tables.static_bytes, counts)
        found = found + in_flight * self._kept("activation", 0, tables.activation_bytes, counts)
        if in_flight in tables.stage_bytes:
            found += self._kept("stage", in_flight, tables.stage_bytes[in_flight], counts)
        return found

    def _kept(self, name: str, in_flight: int, table: Ints, counts: _Counts) -> Ints:
        """Return the total of a table, cached if all stages recompute the same number of blocks."""
        if counts.given.ndim:
            return self.total(table, counts)
        key = name, in_flight, int(counts.given)
        if key not in self._totals:
            self._totals[key] = self.total(table, counts)
        return self._totals[key]

    def block(self, number: int) -> int | None:
        """Return the layer of a block's number; None if it may not be recomputed."""
        layer = int(np.append(np.flatnonzero(self.is_block), -1)[min(number, self.num_blocks)])
        return layer if layer >= 0 and self.tables.legal[self.rows[layer], self.recomputed[layer]] else None

    def strategies(self, start: int, end: int, count: int) -> Ints:
        """Return the strategies of the layers of a run with ``count`` of its blocks recomputed."""
        found: Ints = self.plain[start:end].copy()
        blocks = np.flatnonzero(self.is_block[start:end])[:count]
        found[blocks] = self.recomputed[start:end][blocks]
        return found

    def transient_bytes(self, start: int, end: int, in_flight: int, count: int) -> int:
        """Transient bytes of a run with ``count`` of its blocks recomputed."""
        key = in_flight, self.rows[start:end].tobytes(), count
        if key not in self._transient:
            strategies = self.strategies(start, end, count)
            types = self.tables.run_types(range(start, end))
            self._transient[key] = int(self.tables.transient_of(types, strategies, in_flight))
        return self._transient[key]

    def alike(self, start: int, end: int) -> Ints:
        """Return the first layers of all runs of the same layer types as this one."""
        windows = np.lib.stride_tricks.sliding_window_view(self.rows, end - start)
        return np.flatnonzero((windows == self.rows[start:end]).all(axis=1))


def _may_fit(pairs: Sequence[_Runs]) -> bool:
    """Return whether there are cuts that fit if every layer holds the least of all strategies of these pairs.

    A choice that has none has no plan; this takes a tenth of the time of `_best`.
    """
    runs, tables = pairs[0], pairs[0].tables
    offered = np.stack([each for own in pairs for each in (own.plain, own.recomputed)])
    is_legal = tables.legal[runs.rows, offered]
    lower = np.minimum.reduce([own.lower for own in pairs])[1:]
    layouts, layers = tables.layout_of[runs.plain], np.arange(len(runs.rows) + 1)
    lengths = layers[1:] - layers[:, None]
    reached = layers == 0
    for stage, room in enumerate(runs.rooms):
        in_flight = tables.pipeline.in_flight(stage)
        held = tables.held_bytes(in_flight)
        inside, last = (
            np.where(is_legal, held[rows, offered], MOST_BYTES).min(axis=0) for rows in (runs.rows, runs.lasts)
        )
        sums = _sums(inside)
        rooms = np.full(len(layers), room)
        if stage > 0 and tables.received is not None:
            rooms[1:-1] -= tables.received.num_bytes(stage, in_flight)[layouts[:-1], layouts[1:]]
        fits = sums[:-1] - sums[:, None] + (last + lower) <= rooms[:, None]
        reached = np.append(
            False, (reached[:, None] & fits & (lengths >= max(1, tables.least_layers(stage)))).any(axis=0)
        )
    return bool(reached[-1])


class _StageRuns:
    """The runs of one stage: their seconds and bytes, and the leading blocks to recompute so that they may fit."""

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
        for too_few in range(1, tables.least_layers(stage)):
            self.seconds[np.eye(len(seconds), k=too_few, dtype=bool)] = np.inf

    def count(self, start: int, end: int) -> int:
        """Number of blocks of a run that are recomputed."""
        blocks = int(self._runs.before[end] - self._runs.before[start])
        return min(blocks, int(self._counts[start, end] if self._counts.ndim else self._counts))

    def strategies(self, start: int, end: int) -> list[int]:
        """Return the strategies of the layers of a run."""
        found: list[int] = self._runs.strategies(start, end, self.count(start, end)).tolist()
        return found

    def keeps(self, start: int, end: int) -> bool:
        """Return whether a run fits; if not, exclude it and all runs like it, or recompute one more block in each."""
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
    """Return the fastest plan of at most ``cutoff_s`` that fits, with one of these pairs of strategies on each stage.

    ``count`` blocks of each stage are recomputed, or with ``free`` as few as fit.
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
    """Return [N + 1] sums of the first 0 to N values."""
    found: Ints = np.concatenate([np.zeros(1, dtype=np.asarray(values).dtype), np.cumsum(values)])
    return found


def _cheapest(stages: Sequence[Floats], passes: float, least_s: float, cutoff_s: float) -> tuple[int, ...] | None:
    """Return the cuts of minimum sum of all stages plus ``passes`` - 1 times the slowest; None if above the cutoff."""
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
    """Minimum seconds of the slowest stage; infinite if no cuts fit."""
    reached = np.full(len(stages[0]), np.inf)
    reached[0] = 0.0
    for each in stages:
        reached = np.maximum(reached[:, None], each).min(axis=0)
    return float(reached[-1])


def _least_sum(stages: Sequence[Floats], limit_s: float) -> tuple[float, tuple[int, ...]]:
    """Return the minimum sum of stages of at most ``limit_s`` each, and its cuts."""
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
