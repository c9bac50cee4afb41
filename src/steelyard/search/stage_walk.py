r"""Strategies for the layers of a stage by what it holds as each of them works: close to the walk, one after another.

Within the bytes of `steelyard.cost.working` a stage takes $\max_l M_l$. With a price $\mu_l \ge 0$ of what it holds as
layer $l$ works, and $\mu = \sum_l \mu_l$, its layers take at least

$$\sum_j \min_s \Big(t + \mu h - f \sum_{l < j} \mu_l + \mu_j u + \mu_{j+1} a + \mu_{j-1} r\Big) - \mu B$$

seconds (weak duality; switches cost nothing or more). The prices are raised by subgradients. All moments have prices
at once, since a layer that takes much as it works is cheap wherever others alone are paid for.

A dynamic program then goes through the layers from the first to the last. With $H = \sum h$ of the layers so far, a
state has $H$, the fullest moment so far and that of the layers that wait for the next reduction, all with the layers
so far held, what is gathered ahead, the switch class of the last layer and the seconds. As layers are added, moments
before grow by what they keep, $h - f$. Of the unbeaten states as many as asked for are kept, those of the least bound
by the prices: a plan, and no proof that it is the best.

Source: as for `steelyard.search.layers`; Polyak 1969 for the steps. Not modelled: what `steelyard.cost.working` leaves
out, so the walk decides on the plans.
"""

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

AIM = 0.05
"""Bounds of a stage are sought up to so much above what it takes in another plan."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Options:
    """The strategies worth considering; twice as many kinds as the model has, the second half for last layers."""

    count: IntArray
    rows: IntArray
    """[2K, 9, O] strategy, switch class, the bytes held, freed, working, reducing, ahead and reduced, and of working
    what counts where a price is paid for the bytes ahead of the layer whatever it is: less if it is not sharded"""
    seconds: FloatArray
    table: IntArray


class StageWalks:
    """Tables of a pipeline setting with the bytes of their layers as they work."""

    def __init__(self, tables: CostTables, working: WorkingBytes) -> None:
        self.tables, self._working = tables, working
        self._table: OptionTable = option_table(tables)
        self._options: dict[tuple[int, int], _Options] = {}
        self._prices: dict[tuple[object, ...], tuple[FloatArray, float]] = {}

    def bound_s(self, budget_bytes: int, target_s: float) -> float:
        """A lower bound of the step time of plans of one stage; the prices are sought with ``target_s`` in view."""
        assert self.tables.pipeline.num_stages == 1, "the layers of one stage alone are known"
        passes = self.tables.pipeline.num_passes
        _, bound_s = self._priced(0, (0, len(self.tables.layers)), budget_bytes, target_s / passes)
        return passes * bound_s * (1 - ROUNDING)

    def solution(self, like: Solution, budget_bytes: int, width: int) -> Solution | None:
        """A fast plan with the cuts of another within the bytes, of ``width`` states a layer; None if there is none."""
        chosen: list[int] = []
        entry = self._table.switches.num_groups
        for stage, span in enumerate(pairwise(like.boundaries)):
            target_s = (1 + AIM) * like.stages[stage].time_s
            found = self._stage(stage, span, entry, budget_bytes, target_s, width)
            if found is None:
                return None
            chosen += found
            entry = int(self._table.switches.group[chosen[-1]])
        return evaluate(self.tables, like.boundaries, chosen)

    def _stage(
        self, stage: int, span: tuple[int, int], entry: int, budget_bytes: int, target_s: float, width: int
    ) -> list[int] | None:
        options, switches = self._options_of(stage), self._table.switches
        kinds, room = self._kinds(span), budget_bytes - self._working.overhead_bytes[stage]
        prices, _ = self._priced(stage, span, budget_bytes, target_s)
        rest = np.zeros((len(kinds) + 1, switches.num_groups + 1))
        again = self._working.reduces_again
        run = kinds, options.count, options.rows, options.seconds, again
        kernels.priced_rests(rest, *run, options.table, switches.seconds, prices)
        kept, held = _least(options, kinds)
        states, seconds = np.zeros((8, 1), dtype=np.int64), np.zeros(1)
        states[0], states[3], states[7] = entry, -NO_LIMIT_BYTES, -1
        passed = []
        for position, kind in enumerate(kinds.tolist()):
            size = states.shape[1] * int(options.count[kind])
            places, values = np.empty((8, size), dtype=np.int64), np.empty((2, size))
            switch = switches.seconds[options.table[kind]]
            own = options.count[kind], options.rows[kind], options.seconds[kind], again, switch
            behind = rest[position + 1], kept[position + 1], held[position + 1]
            found = kernels.working_candidates(
                states, seconds, *own, room, np.inf, prices, position, *behind, places, values
            )
            order = values[1, :found].argsort(kind="stable")
            if position + 1 < len(kinds):
                detour = switches.detour[options.table[kinds[position + 1]]]
            else:
                detour = np.zeros_like(switches.detour[0])
            order = order[: kernels.sweep_working(order, places, values[0], detour, width)]
            if len(order) == 0:
                return None
            states, seconds = places.take(order, axis=1), values[0, order]
            passed.append(states)
        place, chosen = int(np.argmin(seconds)), []
        for states in reversed(passed):
            chosen.append(int(states[6, place]))
            place = int(states[5, place])
        return chosen[::-1]

    def _priced(
        self, stage: int, span: tuple[int, int], budget_bytes: int, target_s: float
    ) -> tuple[FloatArray, float]:
        """Prices of a stage's moments and the bound that they give, within any budget begun from those known."""
        kinds, options = self._kinds(span), self._options_of(stage)
        key = (*self.tables.likeness(stage), kinds.tobytes())
        known = self._prices.get(key)
        room = budget_bytes - self._working.overhead_bytes[stage]
        prices = np.zeros(len(kinds)) if known is None else known[0].copy()
        bound_s = kernels.raise_prices(
            kinds,
            options.count,
            options.rows,
            options.seconds,
            self._working.reduces_again,
            room,
            target_s,
            ROUNDS,
            prices,
            np.empty(len(kinds)),
            np.empty(len(kinds)),
            np.empty(len(kinds), dtype=np.int64),
        )
        self._prices[key] = prices, bound_s
        return prices, bound_s

    def _kinds(self, span: tuple[int, int]) -> IntArray:
        kinds = np.array(self.tables.layers[slice(*span)], dtype=np.int64)
        kinds[-1] += len(self.tables.kinds)
        return kinds

    def _options_of(self, stage: int) -> _Options:
        key = self.tables.likeness(stage)[:2]
        if key not in self._options:
            self._options[key] = self._made(*key)
        return self._options[key]

    def _made(self, in_flight: int, pool: int) -> _Options:
        tables, working, columns = self.tables, self._working, self._table.columns[pool]
        held = working.held_bytes(in_flight)
        fields = (
            held,
            working.freed_bytes,
            working.working_bytes,
            working.reducing_bytes,
            working.ahead_bytes,
            working.reduced_bytes,
        )
        num_bytes = np.concatenate(np.stack([each[:, :, columns] for each in fields], axis=2))
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
