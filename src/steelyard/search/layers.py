r"""One strategy per layer of a run of layers inside one stage: the dynamic program on frontiers.

For layers $l = 1..n$ of a stage and an entry class $e$ (how the layer before the stage left its output), the program
keeps, for each class $c$ of the last strategy, the states $(e, c, M, u, t)$ that no other state of the same $e, c$
beats in all of $M, u, t$, where

$$M = \sum_l b(k_l, s_l), \quad u = \max_l u(k_l, s_l), \quad t = \sum_l \big(t(k_l, s_l) + r(k_l, c_{l-1}, s_l)\big)$$

so forward memory adds up, the transient peak is a maximum, and a state fits if $M + u$ is within the budget. Without
a budget one pass therefore answers every budget. With a budget $B$ and a limit $\theta$ on the stage time a state is
dropped as soon as no completion can fit, or can be fast enough: for every price $\lambda \ge 0$ of a byte,

$$t + H_\lambda(c) + \lambda\,(M + u - B) > \theta, \qquad
H_\lambda(c) = \min_{s_{l+1}..s_n} \sum (t + r + \lambda b)$$

proves so (weak duality), hence dropping never loses an optimum.

| symbol      | name           | unit   | meaning                                                        |
|-------------|----------------|--------|----------------------------------------------------------------|
| $b$         | `bytes`        | bytes  | `static_bytes` + microbatches in flight × `activation_bytes`   |
| $c$, $e$    | `group`        | –      | switch class: strategies from which every switch costs the same |
| $H_\lambda$ | `_completions` | s      | least priced cost of the layers still to come                  |
| $\theta$    | `limit_s`      | s      | stage times above it are of no use to the caller               |

Source: Miao et al. 2022, Eq. 1; Wang et al. 2023, section 4.1 (forward memory and backward peak); the bound is
Lagrangian duality as in Handler and Zang 1980 (constrained shortest paths).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import CostTables
from steelyard.search.frontier import FloatArray, IntArray, reduce_groups


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindOptions:
    """The strategies worth considering for one layer kind on one stage; arrays over these O options."""

    strategy: IntArray
    """[O] index into the strategies of the tables"""
    group: IntArray
    """[O] switch class"""
    bytes: IntArray
    transient: IntArray
    seconds: FloatArray
    switch: FloatArray
    """[C + 1, O] seconds from each switch class; the last row, all zeros, is for no layer before"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """What the layer kinds cost on a stage with a given number of microbatches in flight."""

    num_groups: int
    options: tuple[KindOptions, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerStates:
    """States of the dynamic program after one layer; ``parent`` indexes the states of the layer before."""

    entry: IntArray
    group: IntArray
    bytes: IntArray
    transient: IntArray
    seconds: FloatArray
    parent: IntArray
    strategy: IntArray

    def __len__(self) -> int:
        return len(self.entry)

    def select(self, index: IntArray) -> "LayerStates":
        """Only these states, in this order."""
        return LayerStates(
            entry=self.entry[index],
            group=self.group[index],
            bytes=self.bytes[index],
            transient=self.transient[index],
            seconds=self.seconds[index],
            parent=self.parent[index],
            strategy=self.strategy[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainFrontier:
    """The states after every layer of a run; the last ones are the answers."""

    per_layer: tuple[LayerStates, ...]

    @property
    def last(self) -> LayerStates:
        """The states after the last layer."""
        return self.per_layer[-1]

    def strategies(self, state: int) -> tuple[int, ...]:
        """The strategy of each layer that leads to this state of the last layer."""
        chosen: list[int] = []
        for states in reversed(self.per_layer):
            chosen.append(int(states.strategy[state]))
            state = int(states.parent[state])
        return tuple(reversed(chosen))


def switch_classes(tables: CostTables) -> IntArray:
    """[S] class of each strategy as the sender of an activation: equal where every legal receiver pays the same."""
    rows = np.where(tables.legal[:, None, :], tables.switch_s, 0.0).transpose(1, 0, 2)
    flat = np.ascontiguousarray(rows.reshape(len(tables.strategies), -1))
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in flat + 0.0], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionTable:
    """What every stage of one pipeline setting shares: switch classes and which strategies may beat which."""

    tables: CostTables
    group: IntArray
    num_groups: int
    may_beat: NDArray[np.bool_]
    """[K, S, S] the first is no worse than the second in all but the additive bytes, and both are legal"""

    def stage(self, in_flight: int) -> StageCosts:
        """The costs of a stage with this many microbatches in flight, beaten strategies left out."""
        num_bytes = self.tables.static_bytes + in_flight * self.tables.activation_bytes
        kinds = range(len(self.tables.kinds))
        return StageCosts(num_groups=self.num_groups, options=tuple(self._options(kind, num_bytes) for kind in kinds))

    def _options(self, kind: int, num_bytes: IntArray) -> KindOptions:
        tables, own = self.tables, num_bytes[kind]
        beats = self.may_beat[kind] & (own[:, None] <= own[None, :])
        mutual = beats & beats.T
        beaten = np.any(beats & (~mutual | np.triu(np.ones_like(beats), k=1)), axis=0)
        kept = np.flatnonzero(tables.legal[kind] & ~beaten)
        representatives = np.array([np.flatnonzero(self.group == group)[0] for group in range(self.num_groups)])
        switch = np.zeros((self.num_groups + 1, len(kept)))
        switch[:-1] = tables.switch_s[kind][np.ix_(representatives, kept)]
        return KindOptions(
            strategy=kept,
            group=self.group[kept],
            bytes=own[kept],
            transient=tables.transient_bytes[kind][kept],
            seconds=tables.time_s[kind][kept],
            switch=switch,
        )


def option_table(tables: CostTables) -> OptionTable:
    """Switch classes and pairwise dominance of the strategies, for all stages of a setting."""
    group = switch_classes(tables)
    num_groups = int(group.max()) + 1
    senders = np.flatnonzero(tables.legal.any(axis=0))
    may_beat = np.empty((len(tables.kinds), len(group), len(group)), dtype=bool)
    for kind, legal in enumerate(tables.legal):
        seconds, transient = tables.time_s[kind], tables.transient_bytes[kind]
        received = tables.switch_s[kind][senders]
        may_beat[kind] = (
            (group[:, None] == group[None, :])
            & (seconds[:, None] <= seconds[None, :])
            & (transient[:, None] <= transient[None, :])
            & np.all(received[:, :, None] <= received[:, None, :], axis=0)
            & legal[:, None]
            & legal[None, :]
        )
        np.fill_diagonal(may_beat[kind], False)
    return OptionTable(tables=tables, group=group, num_groups=num_groups, may_beat=may_beat)


class TimeIsUpError(Exception):
    """The deadline passed inside a search; callers turn it into a result with a gap."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pruning:
    """When a state of the dynamic program may be dropped.

    ``budget_bytes`` is what the stage may hold and ``limit_s`` the longest time of use. ``prices`` (seconds per byte)
    bound the completions; any values are valid, good ones drop more. ``width`` keeps only so many states after each
    layer, the most promising by the bound: the answer is then a plan, but no longer proven best.
    """

    budget_bytes: int
    limit_s: float
    prices: FloatArray
    width: int | None = None
    deadline: float | None = None
    """`time.monotonic` value after which `TimeIsUpError` is raised"""


def chain_frontier(
    costs: StageCosts, kinds: Sequence[int], *, entries: IntArray | None = None, pruning: Pruning | None = None
) -> ChainFrontier:
    """The frontier of a run of layers of these kinds; see the module.

    ``entries`` are the switch classes that the layer before may have left (None: there is no layer before).
    """
    entries = np.array([costs.num_groups]) if entries is None else entries
    floor = max(int(costs.options[kind].transient.min(initial=2**48)) for kind in kinds)
    guide = _guide(costs, kinds, entries, floor, pruning) if pruning else None
    states = _start(entries, floor)
    per_layer = []
    for position, kind in enumerate(kinds):
        if pruning and pruning.deadline is not None and time.monotonic() > pruning.deadline:
            raise TimeIsUpError
        states = _extend(states, costs.options[kind], costs.num_groups, guide, position + 1)
        per_layer.append(states)
    return ChainFrontier(per_layer=tuple(per_layer))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Guide:
    """Bounds on what the layers still to come will add; position p is before layer p of the run."""

    pruning: Pruning
    prices: FloatArray
    completions: list[FloatArray]
    """per position, [prices, C + 1] seconds"""
    threshold: IntArray
    """[R] transient peaks worth allowing, rising, the first one reached by every choice"""
    rest_bytes: IntArray
    """[n + 1, R] least bytes within the threshold"""
    rest_peak: IntArray
    """[n + 1, R] least sum of bytes and threshold, above this threshold"""

    def bound_s(
        self, position: int, group: IntArray, num_bytes: IntArray, transient: IntArray, seconds: FloatArray
    ) -> FloatArray:
        """Lower bound of the time of any completion of these states within the budget."""
        excess = (num_bytes + transient - self.pruning.budget_bytes).astype(np.float64)
        bound = np.full(seconds.shape, -np.inf)
        for price, completion in zip(self.prices, self.completions[position], strict=True):
            np.maximum(bound, completion[group] + price * excess, out=bound)
        return bound + seconds

    def fits(self, position: int, num_bytes: IntArray, transient: IntArray) -> NDArray[np.bool_]:
        """Whether some completion fits: at the transient reached so far, or at a higher threshold."""
        reached = np.searchsorted(self.threshold, transient, side="right") - 1
        need = np.minimum(self.rest_bytes[position][reached] + transient, self.rest_peak[position][reached])
        return np.asarray(num_bytes + need <= self.pruning.budget_bytes)


def _guide(costs: StageCosts, kinds: Sequence[int], entries: IntArray, floor: int, pruning: Pruning) -> _Guide:
    """Completion bounds at price 0 and at the three of the prices that bound the whole run best."""
    completions = _completions(costs, kinds, pruning.prices)
    whole = completions[0][:, entries].min(axis=1) + pruning.prices * (floor - pruning.budget_bytes)
    best = np.union1d(np.argsort(-whole)[:3], np.argmin(pruning.prices))
    least = {kind: least_bytes(costs.options[kind].bytes, costs.options[kind].transient) for kind in set(kinds)}
    threshold = np.unique(np.concatenate([[floor], *(peaks[peaks > floor] for peaks, _ in least.values())]))
    within = {
        kind: sizes[np.searchsorted(peaks, threshold, side="right") - 1] for kind, (peaks, sizes) in least.items()
    }
    rest = np.zeros((len(kinds) + 1, len(threshold)), dtype=np.int64)
    rest[:-1] = np.cumsum([within[kind] for kind in reversed(kinds)], axis=0)[::-1]
    above = np.full_like(rest, 2**60)
    above[:, :-1] = (rest + threshold)[:, 1:]
    return _Guide(
        pruning=pruning,
        prices=pruning.prices[best],
        completions=[each[best] for each in completions],
        threshold=threshold,
        rest_bytes=rest,
        rest_peak=np.minimum.accumulate(above[:, ::-1], axis=1)[:, ::-1],
    )


def least_bytes(num_bytes: IntArray, transient: IntArray) -> tuple[IntArray, IntArray]:
    """Transient peaks worth allowing, rising, and the least bytes within each (falling)."""
    order = np.lexsort((num_bytes, transient))
    sizes = num_bytes[order]
    gains = np.flatnonzero(np.diff(np.minimum.accumulate(sizes), prepend=sizes[:1] + 1))
    return transient[order][gains], sizes[gains]


def _extend(
    states: LayerStates, options: KindOptions, num_groups: int, guide: _Guide | None, position: int
) -> LayerStates:
    """The unbeaten states after one more layer."""
    seconds = states.seconds[:, None] + (options.switch[states.group] + options.seconds)
    num_bytes = states.bytes[:, None] + options.bytes
    transient = np.maximum(states.transient[:, None], options.transient)
    if guide is None:
        parent, choice = (each.ravel() for each in np.indices(seconds.shape))
    else:
        bound = guide.bound_s(position, options.group, num_bytes, transient, seconds)
        parent, choice = np.nonzero(bound <= guide.pruning.limit_s)
        fits = guide.fits(position, num_bytes[parent, choice], transient[parent, choice])
        parent, choice = parent[fits], choice[fits]
    extended = LayerStates(
        entry=states.entry[parent],
        group=options.group[choice],
        bytes=num_bytes[parent, choice],
        transient=transient[parent, choice],
        seconds=seconds[parent, choice],
        parent=parent,
        strategy=options.strategy[choice],
    )
    key = extended.entry * (num_groups + 1) + extended.group
    kept = reduce_groups(key, extended.bytes, extended.transient, extended.seconds)
    if guide is not None and guide.pruning.width is not None and len(kept) > guide.pruning.width:
        found = extended.select(kept)
        bound = guide.bound_s(position, found.group, found.bytes, found.transient, found.seconds)
        kept = kept[np.sort(np.argsort(bound, kind="stable")[: guide.pruning.width])]
    return extended.select(kept)


def _start(entries: IntArray, floor: int) -> LayerStates:
    """The empty run, once per entry class; its transient is what any choice will reach."""
    size = len(entries)
    none = np.full(size, -1, dtype=np.int64)
    return LayerStates(
        entry=entries,
        group=entries,
        bytes=np.zeros(size, dtype=np.int64),
        transient=np.full(size, floor, dtype=np.int64),
        seconds=np.zeros(size),
        parent=none,
        strategy=none,
    )


def _completions(costs: StageCosts, kinds: Sequence[int], prices: FloatArray) -> list[FloatArray]:
    """For each position 0..n, [prices, C + 1] the least priced cost of the layers from there on, per class before."""
    rest = np.zeros((len(prices), costs.num_groups + 1))
    found = [rest]
    for kind in reversed(kinds):
        options = costs.options[kind]
        priced = options.seconds + prices[:, None] * options.bytes + rest[:, options.group]
        rest = np.min(options.switch[None, :, :] + priced[:, None, :], axis=2, initial=np.inf)
        found.append(rest)
    return found[::-1]
