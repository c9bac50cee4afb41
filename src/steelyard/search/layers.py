r"""Dynamic program on frontiers: one strategy per layer of a run of layers inside one stage.

The program keeps states for layers $l = 1..n$ of a stage and an entry class $e$ (the layout in which the layer before
the stage left its output). For each class $c$ of the last strategy and largest buffers $\beta$ so far, these are the
states $(e, c, \beta, A, u, t)$ that no other state of the same $e, c, \beta$ beats in all of $A, u, t$, where

$$A = \beta + \sum_l h_l, \quad u \leftarrow \max(u - f_l,\; u_l), \quad \beta = \max_l \beta_l, \quad
t = \sum_l \big(t(k_l, s_l) + r(k_l, c_{l-1}, s_l)\big)$$

as in `steelyard.cost.memory`; the memory of the stage is $A + u$ after the last layer. One pass without a budget
therefore answers every budget. Before the last layer a state is also dropped for a smaller one of another class $c'$
that is faster by at least $\max_s (r(k_{l+1}, c', s) - r(k_{l+1}, c, s))$, so that no next layer can make up for it.

With a budget $B$ and a limit $\theta$ on the stage time a state is dropped as soon as no completion can fit or be fast
enough. For every level $\tau$ that the transient peak may end on there must not be a price $\lambda \ge 0$ with

$$t + H_{\lambda,\tau}(c) + \lambda\,(A + \max(u - F, \tau) - B) > \theta, \qquad
H_{\lambda,\tau}(c) = \min_{s_{l+1}..s_n:\, u(k, s) - F \le \tau} \sum (t + r + \lambda h)$$

(weak duality), where $F$ is the maximum that later layers free; hence dropping never loses an optimum. If there are
many different peaks, neighbours share a level: the choice is then taken from its upper edge and the price paid for its
lower one.

$F$ is what later layers free at most, each with the strategy that frees most, so levels say little of long runs. The
memory of a stage is also at least any weighted mean of its moments, with $\omega \ge 0$ and $\sum_l \omega_l = 1$, and
its buffers $\beta$ at least any weighted mean of those of its layers, with weights $\phi$. A state after layer $p$ is
therefore also dropped if for some price $\lambda$ and weights

$$t + G_{\lambda,\omega}(c) + \lambda\,(A - (1 - \Phi_p)\,\beta + \Omega_p u - B) > \theta, \qquad
G_{\lambda,\omega}(c) = \min_{s_{p+1}..s_n} \sum_{l>p} \big(t + r + \lambda\,(h + \omega_l u + \phi_l \beta_l
- \Omega_{l-1} f)\big)$$

with the sums $\Omega_l$ and $\Phi_l$ of the weights up to layer $l$. Here each strategy pays for its own working memory
and is paid for what it frees itself.

| symbol             | name         | unit  | meaning                                                             |
|--------------------|--------------|-------|---------------------------------------------------------------------|
| $h$                | `bytes`      | bytes | `static_bytes` + microbatches in flight × `activation_bytes`        |
| $f$                | `freed`      | bytes | freed once the layer has worked                                     |
| $u$                | `transient`  | bytes | working memory of the layer                                         |
| $\beta$            | `buffers`    | bytes | gathered ahead of layers, and left by them while others work        |
| $c$, $e$           | `group`      | –     | switch class: strategies from which every resharding costs the same |
| $H_{\lambda,\tau}$ | `completion` | s     | minimum priced cost of the layers still to come                     |
| $\tau$             | `levels`     | bytes | possible transient peak at the end of the run                       |
| $\Omega$, $\Phi$   | `weights`    | –     | weights of the moments and of the buffers of the layers so far      |
| $\theta$           | `limit_s`    | s     | upper limit of useful stage times                                   |

Source: Miao et al. 2022, Eq. 1; Wang et al. 2023, section 4.1 (forward memory and backward peak); the bound is
Lagrangian duality as in Handler and Zang 1980 (constrained shortest paths).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.search import kernels
from steelyard.search.kernels import FloatArray, IntArray, Number

MAX_LEVELS = 8
"""Number of transient peaks distinguished in the bounds; more are grouped, which only weakens the bounds."""

MAX_PRICES_PER_LEVEL = 4
"""Prices of memory tried for each level while states are extended: the best ones for the whole run, and 0."""

HIGH_PRICES = np.array([4.0, 16.0])
"""Prices tried in addition, in multiples of the highest one."""

MEAN_MOMENTS = (0, 4)
"""Numbers of layers before the last one of a run whose mean moment bounds its memory; 0 is the last one itself."""

MAX_CANDIDATES = 2_000_000
"""Maximum of states times options of one layer; more take seconds and hundreds of megabytes."""

FEW_CANDIDATES = 250_000
"""Target of states times options beyond that maximum: states that others nearly beat are dropped until it is met."""

SLACK_PRECISION = 1.6
"""Maximum ratio of the slack with which states are dropped to a slack that leaves too many."""

MANY_TIES = 256
"""Number of candidates of equal bytes above which they are sorted before `kernels.sweep`, which sorts by insertion."""

NO_LIMIT_BYTES = 2**60
NOTHING_BYTES = -(2**50)
"""Transient bytes before the first layer of a run."""

ROUNDING = 1e-9
"""Fraction by which bounds are relaxed, so that rounding in sums never drops an optimum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Switches:
    """Cost of redistribution by switch class, once for every different table of the layer types."""

    group: IntArray
    """[S] switch class of each strategy as the sender"""
    num_groups: int
    table: IntArray
    """[K] index of a layer type's table, of T"""
    sender: IntArray
    """[C] a strategy of each switch class"""
    seconds: FloatArray
    """[T, C + 1, S] from each switch class; the last row, all zeros, is for no layer before"""
    entry: IntArray
    """[T, S] entry number of each strategy; strategies with equal costs from every class share one"""
    entry_s: FloatArray
    """[T, C + 1, D] ``seconds`` by entry number; zeros for numbers that a table does not have"""
    detour: FloatArray
    """[T, C + 1, C + 1] maximum additional cost of a receiver from the first class instead of the second"""


class _Row:
    """A named part of ``rows``."""

    def __init__(self, place: int | tuple[slice, int]) -> None:
        self._place = place

    def __get__(self, owner: Any, owner_type: type | None = None) -> IntArray:
        row: IntArray = owner.rows[self._place]
        return row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Costs of the layer types on a stage with a given number of microbatches in flight.

    Arrays are [K, O] over the options worth considering: the first ``count`` of a layer type, then padding.
    """

    switches: Switches
    count: IntArray
    rows: IntArray
    """[K, 7, O] strategy, switch class, bytes, transient bytes, freed bytes, place in ``buffers``, and bytes of these
    buffers that a stage has until it ends"""
    seconds: FloatArray
    buffers: IntArray
    """[B, 3] buffers of `CostTables` that layers have, and the maxima of several of them; first all zero"""
    joined: IntArray
    """[B, B] place of a stage's largest buffers so far, by the place of those before and of a layer's"""
    repeats: bool
    """`CostTables.repeats`"""
    lasts: IntArray
    """[K] `CostTables.last_types`"""

    @property
    def num_groups(self) -> int:
        """Number of switch classes."""
        return self.switches.num_groups

    strategy = _Row((slice(None), 0))
    group = _Row((slice(None), 1))
    bytes = _Row((slice(None), 2))
    transient = _Row((slice(None), 3))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is freed and there are no buffers, so that the peak of a run is that of one of its layers."""
        return len(self.buffers) == 1 and not self.rows[:, 4].any()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerStates:
    """States of the dynamic program after one layer, in order of bytes."""

    rows: IntArray
    """[8, N] entry class, own class, bytes, transient, index of the state before, strategy, level of the transient, and
    place of the largest buffers"""
    seconds: FloatArray

    def __len__(self) -> int:
        return len(self.seconds)

    entry = _Row(0)
    group = _Row(1)
    bytes = _Row(2)
    transient = _Row(3)
    parent = _Row(4)
    strategy = _Row(5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainFrontier:
    """The states after every layer of a run; the last ones are the answers."""

    per_layer: tuple[LayerStates, ...]
    missed_s: float = 0.0
    """Maximum excess in seconds over the time of a state that was dropped because others nearly beat it."""

    @property
    def last(self) -> LayerStates:
        """States after the last layer."""
        return self.per_layer[-1]

    def strategies(self, state: int) -> tuple[int, ...]:
        """Return the strategy of each layer that leads to this state of the last layer."""
        chosen: list[int] = []
        for states in reversed(self.per_layer):
            chosen.append(int(states.strategy[state]))
            state = int(states.parent[state])
        return tuple(reversed(chosen))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionTable:
    """Options that all stages of one pipeline configuration share."""

    tables: CostTables
    switches: Switches
    columns: tuple[IntArray, ...]
    """Strategies that a stage may use, by its pool."""
    receives_less: NDArray[np.bool_]
    """[T, D, D] whether the first entry number receives for no more than the second, from any class"""

    def stage(self, stage: int) -> StageCosts:
        """Return the costs of a stage with its microbatches in flight, without beaten strategies."""
        return self.costs([self.tables.pipeline.in_flight(stage)], self.tables.pool_of(stage))[0]

    def costs(self, flights: Sequence[int], pool: int = 0) -> list[StageCosts]:
        """Return the costs of a stage of a pool for each of these numbers of microbatches in flight."""
        tables, columns, group = self.tables, self.columns[pool], self.switches.group
        num_bytes = np.stack([tables.held_bytes(in_flight) for in_flight in flights])
        freed = np.stack([tables.freed_of(in_flight) for in_flight in flights])
        sizes = tables.buffers_of.reshape(3, -1).T * tables.legal.reshape(-1, 1)
        buffers, buffer = np.unique(np.concatenate([np.zeros((1, 3), np.int64), sizes]), axis=0, return_inverse=True)
        buffer = buffer[1:].reshape(tables.legal.shape)
        more = buffers[:, None] - buffers
        apart = np.where(more[..., 0] <= 0, np.maximum(more[..., 1:], 0).sum(axis=2), -1)
        apart[(buffers[:, None, 2] == 0) & (buffers[:, 2] > 0)] = -1  # depends on the last layer's own buffers
        held = np.where(tables.are_last[:, None], 0, (sizes[:, 1] + tables.repeats * sizes[:, 2]).reshape(buffer.shape))
        legal = np.take(tables.legal, columns, axis=1)
        kept = np.repeat(legal[None], len(flights), axis=0)
        kernels.drop_beaten(
            np.take(tables.time_s, columns, axis=1),
            np.take(num_bytes, columns, axis=2),
            np.take(num_bytes - freed, columns, axis=2),
            np.take(tables.transient_bytes, columns, axis=1),
            np.take(buffer, columns, axis=1),
            apart,
            group[columns],
            self.switches.table,
            self.receives_less,
            np.take(self.switches.entry, columns, axis=1),
            legal,
            kept,
        )
        count = kept.sum(axis=2)
        strategy = columns[np.argsort(~kept, axis=2, kind="stable")[:, :, : max(int(count.max()), 1)]]
        layer_types = np.arange(len(tables.layer_types))[:, None]
        used = [{*row[columns[some]].tolist()} for row, some in zip(buffer, np.any(kept, axis=0), strict=True)]
        inner = set[int]().union(*(used[layer_type] for layer_type in {*tables.layers[1:]}))
        joined = _joined(buffers, used[tables.layers[0]], inner)
        parts = [np.broadcast_to(each, num_bytes.shape) for each in (tables.transient_bytes, freed, buffer, held)]
        chosen = [np.take_along_axis(each, strategy, axis=2) for each in (num_bytes, *parts)]
        rows = np.stack([strategy, group[strategy], *chosen], axis=2)
        return [
            StageCosts(
                switches=self.switches,
                count=own,
                rows=np.ascontiguousarray(each),
                seconds=seconds,
                **joined,
                repeats=tables.repeats,
                lasts=np.array(tables.last_types or range(len(tables.layer_types)), dtype=np.int64),
            )
            for own, each, seconds in zip(count, rows, tables.time_s[layer_types, strategy], strict=True)
        ]


def _joined(buffers: IntArray, first: set[int], inner: set[int]) -> dict[str, IntArray]:
    """Return the buffer fields of `StageCosts` for all buffers that runs reach.

    ``first`` and ``inner`` are the places of the buffers of first and of other layers.
    """
    values = list(map(tuple, buffers.tolist()))
    places, pairs = {value: place for place, value in enumerate(values)}, dict[tuple[int, int], int]()
    waiting, seen = [0], {0}
    while waiting:
        before = waiting.pop()
        for own in inner if before else first | inner:
            value = values[own][0], *map(max, values[before][1:], values[own][1:])
            if value not in places:
                places[value] = len(values)
                values.append(value)
            pairs[before, own] = place = places[value]
            if place not in seen:
                seen.add(place)
                waiting.append(place)
    found, joined = np.array(values), np.zeros((len(values), len(buffers)), dtype=np.int64)
    for pair, place in pairs.items():
        joined[pair] = place
    return {"buffers": found, "joined": joined}


def option_table(tables: CostTables) -> OptionTable:
    """Return the switch classes of the strategies and the order of their entries for all stages of a configuration."""
    first, table = _different_tables(tables)
    usable = tables.legal.any(axis=0)
    used = np.flatnonzero(usable if usable.any() else ~usable)
    legal, switch, layout = tables.legal[first], np.stack([tables.switch_s[row] for row in first]), tables.layout_of
    places, first_used = np.unique(layout[used], return_index=True)
    of_layouts = np.zeros((len(first), switch.shape[-1]), dtype=bool)
    for own, each in zip(of_layouts, legal, strict=True):
        own[layout[each]] = True
    told = of_layouts, switch
    if tables.received is not None:
        told = tables.received.told_apart(*told)
    order, classes = places[np.argsort(first_used)], np.zeros(switch.shape[-1], dtype=np.int64)
    paid = np.where(told[0][:, None, order], told[1][:, order][:, :, order], 0.0)  # by the used layouts
    classes[order] = _different_columns(paid.transpose(0, 2, 1).reshape(-1, len(order)))[1]
    senders = order[np.unique(classes[order], return_index=True)[1]]
    num_groups, group, sender = len(senders), classes[layout], used[first_used[np.searchsorted(places, senders)]]
    seconds = np.zeros((len(first), num_groups + 1, len(group)))
    seconds[:, :num_groups] = switch[:, senders][:, :, layout]
    entries, entry = zip(*(_different_columns(each) for each in seconds), strict=True)
    entry_s = np.zeros((len(first), num_groups + 1, max(each.shape[1] for each in entries)))
    for own, each in zip(entry_s, entries, strict=True):
        own[:, : each.shape[1]] = each
    detours = []
    for own, paid, of in zip(legal, entries, entry, strict=True):
        by_class = paid[:, distinct(of[own])]
        detours.append((by_class[:, None, :] - by_class[None, :, :]).max(axis=2, initial=0.0))
    switches = Switches(
        group=group,
        num_groups=num_groups,
        sender=sender,
        table=table,
        seconds=seconds,
        entry=np.stack(entry),
        entry_s=entry_s,
        detour=np.stack(detours),
    )
    columns: tuple[IntArray, ...] = (used,)
    if tables.pools is not None:
        of = tables.pools.of_strategies
        columns = tuple(np.flatnonzero(of == pool) for pool in range(max(tables.pools.of_stages) + 1))
    less = [_no_larger(each) for each in entries]
    receives_less = np.zeros((len(less), *(max(len(each) for each in less),) * 2), dtype=bool)
    for own, each in zip(receives_less, less, strict=True):
        own[: len(each), : len(each)] = each
    return OptionTable(tables=tables, switches=switches, columns=columns, receives_less=receives_less)


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Return the distinct values of an array, rising: `np.unique` in a third of the time and without `numpy.ma`."""
    rising = np.sort(values, axis=None)
    is_new = np.ones(len(rising), dtype=bool)
    is_new[1:] = rising[1:] != rising[:-1]
    return rising[is_new]


def columns_no_larger(table: FloatArray) -> NDArray[np.bool_]:
    """Return [S, S] whether the first column of a table [R, S] is nowhere larger than the second."""
    columns, which = _different_columns(table)
    return np.asarray(_no_larger(columns)[np.ix_(which, which)])


def _no_larger(columns: FloatArray) -> NDArray[np.bool_]:
    no_larger = np.ones((columns.shape[1],) * 2, dtype=bool)
    for row in columns:
        no_larger &= row[:, None] <= row[None, :]
    return no_larger


def _different_columns(table: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return [R, D] the distinct columns of a table [R, S], in order of first occurrence, and [S] the index of each."""
    seen: dict[bytes, int] = {}
    plain = np.ascontiguousarray(table.T + 0.0)  # without negative zeros
    which = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in plain], dtype=np.int64)
    return table[:, np.unique(which, return_index=True)[1]], which


def _different_tables(tables: CostTables) -> tuple[list[int], IntArray]:
    """Return the first layer type of each combination of switch table and legal strategies, and [K] the index of each
    layer type's combination."""
    seen: dict[tuple[object, bytes], int] = {}
    first: list[int] = []
    which: list[int] = []
    for layer_type, legal in enumerate(tables.legal):
        switch = tables.switch_s[layer_type]
        content: object = switch.tobytes() if tables.switch_s.strides[0] else "shared"
        number = seen.setdefault((content, legal.tobytes()), len(seen))
        if number == len(first):
            first.append(layer_type)
        which.append(number)
    return first, np.array(which, dtype=np.int64)


class TimeIsUpError(Exception):
    """The deadline passed inside a search; callers turn it into a result with a gap."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pruning:
    """Limits that allow a state of the dynamic program to be dropped.

    ``budget_bytes`` is the memory of the stage and ``limit_s`` the longest useful time. ``prices`` (seconds per byte)
    bound the completions; any values are valid, good ones drop more. ``width`` is the number of states kept after each
    layer, the most promising by the bound: the answer is then a plan, but not proven best.
    """

    budget_bytes: int
    limit_s: float
    prices: FloatArray
    width: int | None = None
    deadline: float | None = None
    """`time.process_time` value after which `TimeIsUpError` is raised"""


NO_PRUNING = Pruning(budget_bytes=NO_LIMIT_BYTES, limit_s=np.inf, prices=np.zeros(1))


def chain_frontier(
    costs: StageCosts,
    layer_types: Sequence[int],
    *,
    entries: IntArray | None = None,
    pruning: Pruning = NO_PRUNING,
    received: IntArray | None = None,
    is_last: bool = False,
) -> ChainFrontier:
    """Return the frontier of a run of layers of these types on a stage; see the module.

    ``entries`` are the possible switch classes of the layer before (None: there is no layer before); ``received``
    [C + 1, S] the bytes that the first layer receives by that class and its strategy; ``is_last``: no layer follows, so
    that classes may beat each other after the last layer too.
    """
    entries = np.array([costs.num_groups]) if entries is None else entries
    rows = np.full((8, len(entries)), -1, dtype=np.int64)
    rows[0] = rows[1] = entries
    rows[2], rows[3], rows[6:] = 0, NOTHING_BYTES, 0
    states = LayerStates(rows=rows, seconds=np.zeros(len(entries)))
    guide = _guide(costs, layer_types, entries, pruning)
    room, work = (np.empty((8, 0), dtype=np.int64), np.empty((2, 0))), _work_of(costs, len(guide.upper))
    per_layer, missed_s, dropped_s = [], 0.0, pruning.limit_s
    for position, layer_type in enumerate(layer_types):
        if pruning.deadline is not None and time.process_time() > pruning.deadline:
            raise TimeIsUpError
        if position + 1 < len(layer_types):
            detour = costs.switches.detour[costs.switches.table[layer_types[position + 1]]]
        else:
            detour = guide.nothing_follows if is_last else guide.anything_follows
        needed, have = len(states) * int(costs.count[layer_type]), room[0].shape[1]
        if needed > have:  # else reuse the arrays: the system allocates new pages slowly
            size = max(needed, min(2 * have, MAX_CANDIDATES))
            room = np.empty((8, size), dtype=np.int64), np.empty((2, size))
        num_next = max(1, int(costs.count[list(layer_types[position + 1 : position + 2])].sum()))
        few, most = FEW_CANDIDATES // num_next, (2 * FEW_CANDIDATES if missed_s else MAX_CANDIDATES) // num_next
        found = _NOTHING if received is None else received
        extended = _extend(states, costs, layer_type, detour, guide, position + 1, room, work, found, few, most)
        states, slack_s, least_s = extended
        received = None
        missed_s, dropped_s = missed_s + slack_s, min(dropped_s, least_s)
        per_layer.append(states)
    return ChainFrontier(
        per_layer=tuple(per_layer), missed_s=min(missed_s, pruning.limit_s - dropped_s) if missed_s else 0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Guide:
    """Bounds on the cost of the layers still to come; position p is before layer p of the run."""

    pruning: Pruning
    lower: IntArray
    upper: IntArray
    """[J] edges of the levels of transient peak"""
    weights: FloatArray
    """[n + 1, V, 3] weights, in V means, of the moments and of the two lasting buffers of the layers before"""
    prices: FloatArray
    """[J + V, Q]"""
    completion: FloatArray
    """[n + 1, J + V, Q, C + 1] seconds"""
    rest_bytes: IntArray
    """[n + 1, J + V] minimum bytes within the level"""
    others: IntArray
    """[n + 1, 3] maximum freed and minimum kept bytes of the layers still to come, and minimum transient of the last"""
    nothing_follows: FloatArray = field(repr=False)
    anything_follows: FloatArray = field(repr=False)
    """[C + 1, C + 1] detours after the last layer of the model, and of the run"""


def peak_levels(peaks: IntArray, least: int | None = None, most: int = MAX_LEVELS) -> tuple[IntArray, IntArray]:
    """Return lower and upper edges of at most ``most`` levels that contain these transient peaks.

    With ``least`` they contain all peaks of at least that size.
    """
    different = distinct(peaks)
    if len(different) <= most:
        lower, upper = different, different
    else:
        ends = distinct(np.linspace(0, len(different), most + 1).round().astype(np.int64))
        lower, upper = different[ends[:-1]], different[ends[1:] - 1]
    if least is None:
        return lower, upper
    upper = np.append(upper[upper >= least][:-1], NO_LIMIT_BYTES)
    return np.append(least, upper[:-1] + 1), upper


def _levels(costs: StageCosts, layer_types: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return lower and upper edges of the levels of the transient peak for the search of a run."""
    of_types = {each: costs.transient[each, : costs.count[each]] for each in layer_types}
    peaks = np.concatenate(list(of_types.values()))
    if costs.is_plain:
        return peak_levels(np.maximum(peaks, max(int(each.min(initial=2**48)) for each in of_types.values())))
    return peak_levels(peaks, int(of_types[layer_types[-1]].min(initial=2**48)))


def _guide(costs: StageCosts, layer_types: Sequence[int], entries: IntArray, pruning: Pruning) -> _Guide:
    """Return completion bounds for every level and mean at price 0 and at the prices that bound the whole run best."""
    prices = np.append(pruning.prices, pruning.prices.max() * HIGH_PRICES)
    (lower, upper), weights = _levels(costs, layer_types), _weights(costs, len(layer_types))
    rows = len(lower) + weights.shape[1]
    completion = np.zeros((len(layer_types) + 1, rows, len(prices), costs.num_groups + 1))
    rest_bytes, others = (
        np.zeros((len(layer_types) + 1, rows), dtype=np.int64),
        np.zeros((2, len(layer_types) + 1), np.int64),
    )
    last = costs.transient[layer_types[-1], : costs.count[layer_types[-1]]].min(initial=NO_LIMIT_BYTES)
    kernels.completions(
        completion,
        rest_bytes,
        others,
        np.array(layer_types, dtype=np.int64),
        costs.count,
        costs.rows,
        costs.seconds,
        costs.buffers,
        weights,
        costs.switches.table,
        costs.switches.entry,
        costs.switches.entry_s,
        prices,
        np.append(upper, np.full(weights.shape[1], NO_LIMIT_BYTES)),
        np.empty(costs.rows.shape[2]),
        np.empty(costs.switches.entry_s.shape[2]),
    )
    excess = np.append(lower, np.zeros(weights.shape[1])) - pruning.budget_bytes
    whole = completion[0][:, :, entries].min(axis=2) + prices * excess[:, None]
    best = np.sort(np.argsort(-whole, axis=1, kind="stable")[:, : MAX_PRICES_PER_LEVEL - 1], axis=1)
    best = np.concatenate([np.full((rows, 1), np.argmin(prices)), best], axis=1)
    classes = costs.num_groups + 1
    return _Guide(
        pruning=pruning,
        lower=lower,
        upper=upper,
        weights=weights,
        prices=prices[best],
        completion=np.take_along_axis(completion, best[None, :, :, None], axis=2),
        rest_bytes=rest_bytes,
        others=np.ascontiguousarray(np.stack([*others, np.full(len(layer_types) + 1, last)], axis=1)),
        nothing_follows=np.zeros((classes, classes)),
        anything_follows=np.where(np.eye(classes, dtype=bool), 0.0, np.inf),
    )


def _weights(costs: StageCosts, num_layers: int) -> FloatArray:
    """Return the weights of `_Guide`: of the moment of the last layer, and means of those of layers before it.

    The weights of buffers are equal for all layers before the last one, or 1 for what the layers so far have. None if
    levels of the transient peak are enough.
    """
    if costs.is_plain or num_layers == 1:
        return np.zeros((num_layers + 1, 0, 3))
    places, inner = np.arange(num_layers + 1.0), num_layers - 1
    spread, found = np.minimum(places / inner, 1.0), []
    for count in sorted({min(count, inner) for count in MEAN_MOMENTS}):
        worked = np.clip((places - inner + count) / count, 0.0, 1.0) if count else (places > inner).astype(float)
        has_left = costs.repeats or count > 0
        found += [[worked, kept, kept * has_left] for kept in (spread, np.ones_like(spread))]
    return np.ascontiguousarray(np.array(found).transpose(2, 0, 1))


_Room = tuple[IntArray, FloatArray]
"""[8, N] and [2, N] for `kernels.candidates` to fill in."""

_Work = tuple[FloatArray, FloatArray, IntArray, IntArray]
"""Work space of `kernels.sweep`."""

_NOTHING = np.zeros((0, 0), dtype=np.int64)


def _work_of(costs: StageCosts, num_levels: int) -> _Work:
    classes, sizes = costs.num_groups + 1, len(costs.buffers)
    shape = classes * sizes, classes, num_levels
    known, seen = (np.empty(each, dtype=np.int64) for each in ((2, *shape), (shape[0], classes + 1)))
    return np.empty(shape), np.empty(shape), known, seen


def _extend(
    states: LayerStates,
    costs: StageCosts,
    layer_type: int,
    detour: FloatArray,
    guide: _Guide,
    position: int,
    room: _Room,
    work: _Work,
    received: IntArray,
    few: int,
    most: int,
) -> tuple[LayerStates, float, float]:
    """Return the unbeaten states after one more layer, in order of bytes, the slack with which others were dropped, and
    the least bound of these.

    The slack is 0 unless there would be more than ``most`` states; then at most ``few`` are kept.
    """
    (places, values), width = room, guide.pruning.width
    found = kernels.candidates(
        states.rows,
        states.seconds,
        costs.count[layer_type],
        costs.rows[layer_type],
        costs.seconds[layer_type],
        costs.switches.seconds[costs.switches.table[layer_type]],
        received,
        costs.buffers,
        costs.joined,
        costs.repeats,
        position + 1 == len(guide.rest_bytes),
        guide.lower,
        guide.upper,
        guide.pruning.budget_bytes,
        guide.pruning.limit_s,
        guide.prices,
        guide.completion[position],
        guide.weights[position],
        guide.rest_bytes[position],
        guide.others[position],
        width is not None or len(states) * int(costs.count[layer_type]) > most,
        work[0],
        work[2],
        places,
        values,
    )
    order = places[2, :found].argsort(kind="stable")
    if found > MANY_TIES:
        borders = np.flatnonzero(np.diff(places[2, order], prepend=-1, append=-1))
        for place in np.flatnonzero(np.diff(borders) > MANY_TIES).tolist():
            tied = order[borders[place] : borders[place + 1]]
            tied[:] = tied[np.lexsort((places[3, tied], values[0, tied]))]

    def unbeaten(order: IntArray, slack_s: float) -> IntArray:
        return order[: kernels.sweep(order, places, values[0], len(costs.buffers), detour, slack_s, *work)]

    kept, slack_s, least_s = unbeaten(order, 0.0), 0.0, np.inf
    if len(kept) > most:
        exact, span_s = kept, float(np.ptp(values[0, kept]))
        too_small_s, slack_s = span_s / len(kept), 2 * span_s
        kept = unbeaten(exact.copy(), slack_s)
        while slack_s > SLACK_PRECISION * too_small_s:
            middle_s = math.sqrt(too_small_s * slack_s)
            found_then = unbeaten(exact.copy(), middle_s)
            if len(found_then) > few:
                too_small_s = middle_s
            else:
                kept, slack_s = found_then, middle_s
        least_s = float(values[1, np.setdiff1d(exact, kept)].min(initial=np.inf))
    if width is not None and len(kept) > width:
        kept = kept[np.sort(np.argsort(values[1, kept], kind="stable")[:width])]
    return LayerStates(rows=places.take(kept, axis=1), seconds=values[0, kept]), slack_s, least_s
