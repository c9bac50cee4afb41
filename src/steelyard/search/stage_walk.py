r"""Strategies for the layers of a stage by what it holds as each of them works: close to the walk, one after another.

Within the bytes of `steelyard.cost.working` a stage takes $\max_l M_l$. With a price $\mu_l \ge 0$ of what it holds as
layer $l$ works, and $\mu = \sum_l \mu_l$, its layers take at least

$$\sum_j \min_s \Big(t + \mu h - f \sum_{l < j} \mu_l + \mu_j u + \mu_{j+1} a + \mu_{j-1} r\Big) - \mu B$$

seconds (weak duality; switches cost nothing or more). The prices are raised by subgradients. All moments have prices
at once, since a layer that takes much as it works is cheap wherever others alone are paid for.

That bound mixes strategies: a layer that takes much beside its neighbours counts in part. So a second one minimises
the same sum over strategies of which each fits beside its neighbours, with the least that all other layers hold as it
works. It knows what the layer before has gathered ahead and how much the next reduction may take, by levels, and is
known from each position on: what is left of a plan takes at least so much. More so where the layers before hold more
than the least.

A dynamic program then goes through the layers from the first to the last. With $H = \sum h$ of the layers so far, a
state has $H$, the fullest moment so far and that of the layers that wait for the next reduction, all with the layers
so far held, what is gathered ahead, the switch class of the last layer and the seconds. As layers are added, moments
before grow by what they keep, $h - f$. Of the unbeaten states as many as asked for are kept, those of the least bound
by the prices: a plan, and no proof that it is the best. Where all that may be within a limit are kept it is.

Source: as for `steelyard.search.layers`; Polyak 1969 for the steps. Not modelled: what `steelyard.cost.working` leaves
out, so the walk decides on the plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.cost.working import WorkingBytes
from steelyard.search import kernels
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.frontier import FloatArray, IntArray
from steelyard.search.layers import NO_LIMIT_BYTES, ROUNDING, OptionTable, option_table

BoolArray = NDArray[np.bool_]

ROUNDS = 400
"""Steps by which prices are raised, at most."""

LINKED_ROUNDS = 20
"""Steps by which they are raised further where neighbours have to fit together."""

LINKED_REACH = 0.8
"""By how much steps get shorter where one did not raise the bound."""

AIM = 0.05
"""Bounds of a stage are sought up to so much above what it takes in another plan."""

QUICK_WIDTH = 100
"""States of a layer that are kept where a plan is sought that the fastest is no slower than."""

SORTED = 4
"""So many times as many candidates as states are kept are sorted at first."""

MOST_LEVELS = 16
"""Levels of what is gathered ahead, and of what is reduced, that the bound by neighbours tells apart."""

NUM_BEYOND = 12
"""Numbers of bytes beyond the least by which the bound of what is left is told apart."""

MOST_CELLS = 2**21
"""Of such a table: with more, fewer levels are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Options:
    """The strategies worth considering; twice as many kinds as the model has, the second half for last layers."""

    count: IntArray
    rows: IntArray
    """[2K, 9, O] strategy, switch class, the bytes held, freed, working, reducing, ahead and reduced, and of working
    what counts where a price is paid for the bytes ahead of the layer whatever it is: less if it is not sharded"""
    seconds: FloatArray
    table: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Levels:
    """Bytes that layers gather ahead and reduce, by levels."""

    links: IntArray
    """[2K, 2, O] those of options"""
    num_bytes: IntArray
    """[2, A] rising from 0"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """The layers of a stage, and what they may hold."""

    stage: int
    kinds: IntArray
    options: _Options
    room: int
    entry: int
    """The switch class before."""
    kept: IntArray
    held: IntArray
    """[n + 1] both: the bytes that the layers from each position on keep and hold at least."""

    @property
    def rooms(self) -> IntArray:
        """[n] what each layer may hold and work with besides the least that all others hold then."""
        found: IntArray = self.room - (self.held[0] - self.held[:-1]) - self.kept[1:]
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rests:
    """What the layers behind each position take at least."""

    seconds: FloatArray
    """[E, n + 1, A, R, C + 1] as `kernels.working_candidates` has them at a position"""
    beyond: IntArray
    levels: IntArray


class StageWalks:
    """Tables of a pipeline setting with the bytes of their layers as they work."""

    def __init__(self, tables: CostTables, working: WorkingBytes) -> None:
        self.tables, self._working = tables, working
        self._table: OptionTable = option_table(tables)
        self._entry_s = np.ascontiguousarray(self._table.switches.seconds.transpose(0, 2, 1))
        self._bytes: dict[tuple[int, int], IntArray] = {}
        self._options: dict[tuple[int, int], _Options] = {}
        self._prices: dict[tuple[object, ...], tuple[FloatArray, float]] = {}
        self._least_bytes: dict[tuple[object, ...], int] = {}

    def bound_s(self, budget_bytes: int, target_s: float) -> float:
        """A lower bound of the step time of plans of one stage; the prices are sought with ``target_s`` in view."""
        run, passes = self._only_run(budget_bytes), self.tables.pipeline.num_passes
        return passes * self._priced(run, target_s / passes)[1] * (1 - ROUNDING)

    def solution(self, like: Solution, budget_bytes: int, width: int) -> Solution | None:
        """A fast plan with the cuts of another within the bytes, of ``width`` states a layer; None if there is none."""
        chosen: list[int] = []
        entry = self._table.switches.num_groups
        for stage, span in enumerate(pairwise(like.boundaries)):
            target_s = (1 + AIM) * like.stages[stage].time_s
            run = self._run(stage, span, entry, budget_bytes)
            prices, _ = self._priced(run, target_s)
            found = self._states(run, prices, self._unlinked(run, prices), np.inf, width)
            if not found:
                return None
            chosen += _traced(found)
            entry = int(self._table.switches.group[chosen[-1]])
        return evaluate(self.tables, like.boundaries, chosen)

    def fastest(self, budget_bytes: int, limit_s: float, most: int) -> tuple[Solution | None, float]:
        """The fastest plan of one stage within the bytes, if it takes no more than the limit, and a bound of all.

        Where it takes more, or more than ``most`` states of a layer would have to be told apart, a fast plan if one is
        found, and what is known of all.
        """
        run, passes = self._only_run(budget_bytes), self.tables.pipeline.num_passes
        levels = self._levels(run.options)
        prices, least_s = self._linked(run, levels, limit_s / passes)
        bound_s = passes * least_s * (1 - ROUNDING)
        rests, within_s = self._all_linked(run, levels, prices), limit_s / passes
        quick = self._states(run, prices, rests, np.inf, min(QUICK_WIDTH, most))
        if quick:
            within_s = min(within_s, float(quick[-1][1].min()))
        found = self._states(run, prices, rests, within_s * (1 + ROUNDING), most + 1, is_exact=True)
        is_whole = not found or found[-1][0].shape[1] <= most
        best = found if found and is_whole else quick
        solution = evaluate(self.tables, (0, len(run.kinds)), _traced(best)) if best else None
        if is_whole:
            bound_s = min(limit_s, solution.step_s) if found and solution else max(bound_s, limit_s)
        return solution, bound_s

    def least_bytes(self, boundaries: Sequence[int], strategies: Sequence[int]) -> int:
        """What the fullest stage of a plan holds at least: the walk of it takes no less."""
        found = []
        for stage, span in enumerate(pairwise(boundaries)):
            own = tuple(strategies[slice(*span)])
            key = stage, span[0], own
            if key not in self._least_bytes:
                self._least_bytes[key] = self._stage_bytes(stage, span, own)
            found.append(self._least_bytes[key])
        return max(found)

    def _stage_bytes(self, stage: int, span: tuple[int, int], strategies: Sequence[int]) -> int:
        kinds, places = self._kinds(span), np.arange(span[1] - span[0])
        own = self._bytes_of(stage)[kinds, :, list(strategies)]
        held, freed, working, reducing, ahead, reduced = own.T
        is_sharded = reduced >= 0
        before = np.maximum.accumulate(np.where(is_sharded, places, -1))
        behind = np.minimum.accumulate(np.where(is_sharded, places, len(places))[::-1])[::-1]
        again = reduced[behind[0]] if self._working.reduces_again and is_sharded.any() else 0
        gathered = np.append(0, np.where(before < 0, 0, ahead[before])[:-1])
        waiting = np.append(np.append(reduced, again)[behind[1:]], again)
        taken = np.maximum(working + waiting, reducing) + np.where(is_sharded, gathered, 0)
        return self._working.overhead_bytes[stage] + int((held.sum() - freed.sum() + freed.cumsum() + taken).max())

    def _only_run(self, budget_bytes: int) -> _Run:
        assert self.tables.pipeline.num_stages == 1, "the layers of one stage alone are known"
        return self._run(0, (0, len(self.tables.layers)), self._table.switches.num_groups, budget_bytes)

    def _run(self, stage: int, span: tuple[int, int], entry: int, budget_bytes: int) -> _Run:
        kinds = self._kinds(span)
        options, room = self._options_of(stage), budget_bytes - self._working.overhead_bytes[stage]
        kept, held = _least(options, kinds)
        return _Run(stage=stage, kinds=kinds, options=options, room=room, entry=entry, kept=kept, held=held)

    def _kinds(self, span: tuple[int, int]) -> IntArray:
        """Of the layers of a stage, the last one as such."""
        kinds = np.array(self.tables.layers[slice(*span)], dtype=np.int64)
        kinds[-1] += len(self.tables.kinds)
        return kinds

    def _states(
        self, run: _Run, prices: FloatArray, rests: _Rests, limit_s: float, width: int, *, is_exact: bool = False
    ) -> list[tuple[IntArray, FloatArray]]:
        """States and their seconds after each layer of a run; none where none are left.

        If they are to be exact it ends behind the first layer with ``width`` of them.
        """
        switches, options, again = self._table.switches, run.options, self._working.reduces_again
        states, seconds = np.zeros((8, 1), dtype=np.int64), np.zeros(1)
        states[0], states[3], states[7] = run.entry, -NO_LIMIT_BYTES, -1
        passed: list[tuple[IntArray, FloatArray]] = []
        charges = np.empty(5)
        for position, kind in enumerate(run.kinds.tolist()):
            rows, own_s, switch = options.rows[kind], options.seconds[kind], switches.seconds[options.table[kind]]
            behind = run.held[0] - run.held[position + 1], run.kept[position + 1], run.held[position + 1]
            guide = np.ascontiguousarray(rests.seconds[:, position + 1]), rests.beyond, rests.levels
            place = again, switch, run.room, limit_s, prices, position
            usable, soonest = np.empty(len(own_s), dtype=np.int64), np.empty(len(own_s))
            cheapest = np.empty((2, len(switch)))
            number = kernels.working_options(
                states,
                seconds,
                options.count[kind],
                rows,
                own_s,
                *place,
                *guide,
                *behind,
                charges,
                cheapest,
                usable,
                soonest,
            )
            size = states.shape[1] * number
            places, values = np.empty((8, size), dtype=np.int64), np.empty((2, size))
            ends_again = again and position + 1 == len(run.kinds)
            given = usable[:number], soonest, rows, own_s, charges, ends_again, switch, run.room, limit_s
            found = kernels.working_candidates(states, seconds, *given, *guide, *behind, places, values)
            if position + 1 < len(run.kinds):
                detour = switches.detour[options.table[run.kinds[position + 1]]]
            else:
                detour = np.zeros_like(switches.detour[0])
            order = _unbeaten_states(places, values[:, :found], detour, width)
            if len(order) == 0:
                return []
            states, seconds = places.take(order, axis=1), values[0, order]
            passed.append((states, seconds))
            if len(order) == width and is_exact:
                break
        return passed

    def _unlinked(self, run: _Run, prices: FloatArray) -> _Rests:
        """What the layers from each position on take at least, whatever lies beside them."""
        switches, options = self._table.switches, run.options
        rest = np.zeros((len(run.kinds) + 1, switches.num_groups + 1))
        given = run.kinds, options.count, options.rows, options.seconds, self._working.reduces_again, options.table
        kernels.priced_rests(rest, *given, switches.seconds, prices)
        nothing = np.zeros((2, 1), dtype=np.int64)
        return _Rests(seconds=rest[None, :, None, None], beyond=nothing[0], levels=nothing)

    def _all_linked(self, run: _Run, levels: _Levels, prices: FloatArray) -> _Rests:
        """The same where neighbours have to fit together, the more the layers before hold."""
        spare, steps = max(0, int(run.rooms.min())), np.arange(NUM_BEYOND) / NUM_BEYOND
        beyond = (spare * steps**2).astype(np.int64)
        seconds = np.stack([self._rests(run, levels, prices, more)[0] for more in beyond.tolist()])
        return _Rests(seconds=seconds, beyond=beyond, levels=levels.num_bytes)

    def _rests(self, run: _Run, levels: _Levels, prices: FloatArray, more_bytes: int) -> tuple[FloatArray, IntArray]:
        """What the layers from each position on take at least where those before hold so much more than the least."""
        switches, options, num_levels = self._table.switches, run.options, levels.num_bytes.shape[1]
        shape = (len(run.kinds) + 1, num_levels, num_levels, switches.num_groups + 1)
        rest, chosen = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        given = run.kinds, options.count, options.rows, options.seconds, self._working.reduces_again, options.table
        limits = run.rooms - more_bytes, levels.links, levels.num_bytes
        work = np.empty(shape[-1]), np.empty(num_levels)
        kernels.linked_rests(rest, chosen, *given, self._entry_s, prices, *limits, *work)
        return rest, chosen

    def _linked(self, run: _Run, levels: _Levels, target_s: float) -> tuple[FloatArray, float]:
        """Prices of a run that bound layers that fit beside their neighbours well, and that bound."""
        options, again = run.options, self._working.reduces_again
        tried, best_s = self._priced(run, target_s)
        chosen, excess = np.zeros(len(run.kinds), dtype=np.int64), np.zeros(len(run.kinds))
        best, reach = tried, 1.0
        for _ in range(LINKED_ROUNDS):
            rest, choice = self._rests(run, levels, tried, 0)
            value_s = float(rest[0, 0, -1, run.entry] - tried.sum() * run.room)
            if value_s > best_s:
                best, best_s = tried, value_s
            else:
                reach *= LINKED_REACH
            if value_s == np.inf:
                break
            limits = run.rooms, levels.links, levels.num_bytes, run.entry, run.room
            kernels.linked_excess(choice, run.kinds, options.rows, again, *limits, chosen, excess)
            norm = float((excess[(tried > 0) | (excess > 0)] ** 2).sum())
            if norm == 0 or value_s >= target_s:
                break
            tried = np.maximum(0.0, tried + reach * (target_s - value_s) / norm * excess)
        return best, best_s

    def _key(self, run: _Run) -> tuple[object, ...]:
        return (*self.tables.likeness(run.stage), run.kinds.tobytes())

    def _priced(self, run: _Run, target_s: float) -> tuple[FloatArray, float]:
        """Prices of a run's moments and the bound that they give, within any budget begun from those known."""
        known, options = self._prices.get(self._key(run)), run.options
        prices = np.zeros(len(run.kinds)) if known is None else known[0].copy()
        bound_s = kernels.raise_prices(
            run.kinds,
            options.count,
            options.rows,
            options.seconds,
            self._working.reduces_again,
            run.room,
            target_s,
            ROUNDS,
            prices,
            np.empty(len(run.kinds)),
            np.empty(len(run.kinds)),
            np.empty(len(run.kinds), dtype=np.int64),
        )
        self._prices[self._key(run)] = prices, bound_s
        return prices, bound_s

    def _bytes_of(self, stage: int) -> IntArray:
        """[2K, 6, S] the bytes held, freed, working, reducing, ahead and reduced."""
        key, working = self.tables.likeness(stage)[:2], self._working
        if key not in self._bytes:
            fields = (
                working.held_bytes(self.tables.pipeline.in_flight(stage)),
                working.freed_bytes,
                working.working_bytes,
                working.reducing_bytes,
                working.ahead_bytes,
                working.reduced_bytes,
            )
            self._bytes[key] = np.concatenate(np.stack(fields, axis=2))
        return self._bytes[key]

    def _options_of(self, stage: int) -> _Options:
        key = self.tables.likeness(stage)[:2]
        if key not in self._options:
            self._options[key] = self._made(self._bytes_of(stage), self.tables.pool_of(stage))
        return self._options[key]

    def _made(self, num_bytes: IntArray, pool: int) -> _Options:
        tables, columns = self.tables, self._table.columns[pool]
        num_bytes = num_bytes[:, :, columns]
        time_s = np.tile(tables.time_s[:, columns], (2, 1))
        legal = np.tile(tables.legal[:, columns], (2, 1))
        table = np.tile(self._table.switches.table, 2)
        group, less = self._table.switches.group[columns], self._table.receives_less[pool]
        cells = zip(legal, time_s, num_bytes, table.tolist(), strict=True)
        kept = np.stack([_unbeaten(mine, own_s, own, group, less[which]) for mine, own_s, own, which in cells])
        count = kept.sum(axis=1)
        order = np.argsort(~kept, axis=1, kind="stable")[:, : max(int(count.max()), 1)]
        num_bytes = np.take_along_axis(num_bytes, order[:, None, :], axis=2)
        priced = num_bytes[:, 2] - np.where(num_bytes[:, 5] < 0, num_bytes[:, 4].max(initial=0), 0)
        rows = np.concatenate([np.stack([columns[order], group[order]], axis=1), num_bytes, priced[:, None]], axis=1)
        seconds = np.take_along_axis(time_s, order, axis=1)
        return _Options(count=count, rows=np.ascontiguousarray(rows), seconds=seconds, table=table)

    def _levels(self, options: _Options) -> _Levels:
        """Of all options; some stand for those above them."""
        num_bytes, count = options.rows[:, 6:8], options.count
        cells = NUM_BEYOND * (len(self.tables.layers) + 1) * (self._table.switches.num_groups + 1)
        most = max(1, min(MOST_LEVELS, int((MOST_CELLS // cells) ** 0.5)))
        real = np.arange(num_bytes.shape[2]) < count[:, None]
        links, levels = np.zeros(num_bytes.shape, dtype=np.int64), np.full((2, most), NO_LIMIT_BYTES)
        for which in range(2):
            values = np.unique(np.append(np.maximum(num_bytes[:, which][real], 0), 0))
            values = values[np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(np.int64)]
            levels[which, : len(values)] = values
            links[:, which] = np.maximum(np.searchsorted(values, num_bytes[:, which], side="right") - 1, 0)
        return _Levels(links=links, num_bytes=levels)


def _unbeaten_states(places: IntArray, values: FloatArray, detour: FloatArray, width: int) -> IntArray:
    """The first ``width`` unbeaten of `kernels.working_candidates` in the order of their bounds.

    Most are found among the least bounds, which take less time to sort than all.
    """
    found, order = values.shape[1], np.zeros(0, dtype=np.int64)
    kept, spent = np.empty((6, min(width, found)), dtype=np.int64), np.empty(min(width, found))
    for most in (SORTED * width, found):
        if most < found:
            least = np.flatnonzero(values[1] <= np.partition(values[1], most)[most])
            order = least[values[1, least].argsort(kind="stable")]
        else:
            order = values[1].argsort(kind="stable")
        num_sorted = len(order)
        order = order[: kernels.sweep_working(order, places, values[0], detour, width, kept, spent)]
        if len(order) == width or num_sorted == found:
            break
    return order


def _traced(passed: list[tuple[IntArray, FloatArray]]) -> list[int]:
    """The strategies of the fastest of the last states."""
    place, chosen = int(np.argmin(passed[-1][1])), []
    for states, _ in reversed(passed):
        chosen.append(int(states[6, place]))
        place = int(states[5, place])
    return chosen[::-1]


def _unbeaten(
    legal: BoolArray, time_s: FloatArray, num_bytes: IntArray, group: IntArray, receives_less: BoolArray
) -> BoolArray:
    """[S] the legal options of a kind than which no other of their class is better, or equal and first."""
    held, freed, working, reducing, ahead, reduced = num_bytes
    measures = (held, held - freed, held + working, held + reducing, held + ahead, reduced, time_s)
    no_worse = (group[:, None] == group) & ((reduced >= 0)[:, None] == (reduced >= 0)) & receives_less
    no_worse &= legal[:, None] & legal
    for each in measures:
        no_worse &= each[:, None] <= each
    first = np.arange(len(legal))[:, None] < np.arange(len(legal))
    beaten = no_worse & (~no_worse.T | first)
    np.fill_diagonal(beaten, False)
    found: BoolArray = legal & ~beaten.any(axis=0)
    return found


def _least(options: _Options, kinds: IntArray) -> tuple[IntArray, IntArray]:
    """[n + 1] twice: the bytes that layers from each position on keep and hold at least."""
    real = np.arange(options.rows.shape[2]) < options.count[:, None]
    rows = []
    for num_bytes in (options.rows[:, 2] - options.rows[:, 3], options.rows[:, 2]):
        least = np.where(real, num_bytes, 2**60 // max(len(kinds), 1)).min(axis=1)[kinds]
        rows.append(np.append(np.cumsum(least[::-1])[::-1], 0))
    return rows[0], rows[1]
