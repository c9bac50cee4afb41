r"""The fastest plan of a pipeline of unlike stages under the published objective, cuts and strategies together.

The published step time is the sum over the stages of what each takes by itself, so with the least time $w(i, j)$ of a
stage of layers $i..j-1$ within its memory the best cuts are a shortest path. Most of these times are never needed:
the path is sought with a lower bound in place of each time not yet known, the stages on it are solved by our search,
and this is repeated until all stages on the best path are solved. The bound prices memory at $\lambda$,

$$w(i, j) \ge \max_{\lambda \ge 0} \sum_{l=i}^{j-1} \min_s \big(t(k_l, s) + \lambda\, b(k_l, s)\big) - \lambda M,$$

which is piecewise linear in $\lambda$, with corners where two strategies of a layer type cost the same.

| symbol | meaning                                                            |
|--------|--------------------------------------------------------------------|
| $t, b$ | seconds and bytes of a layer of type $k$ under a strategy $s$      |
| $M$    | budget of the stage, less what it holds besides its layers         |

Source: shortest paths in stages (Bellman 1957); the bound is Lagrangian duality as in `steelyard.search.layers`.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.rules import MB, Point, other_mb
from galvatron.tables import Space, stage_tables
from steelyard.plan.strategy import Strategy
from steelyard.search import partition_exact

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Strategies per stage for one global batch, and what a step takes."""

    batch: int
    num_stages: int
    stages: tuple[tuple[Strategy, ...], ...]
    step_s: float
    peak_mb: int

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.step_s


class StageTimes:
    """Exact least times of stages of one point within a budget; each is solved once for all stages that are alike."""

    def __init__(self, point: Point, space: Space, budget_mb: int) -> None:
        self.point, self.space, self.budget_mb = point, space, budget_mb
        self.held = other_mb(point)
        self.found: dict[tuple[float, tuple[str, ...]], tuple[float, int, tuple[Strategy, ...]]] = {}

    def solve(self, stage: int, first: int, end: int) -> tuple[float, int, tuple[Strategy, ...]]:
        """Least seconds, MB and strategies of a stage of these layers; no strategies where nothing fits."""
        layers, held = self.point.inputs.layers[first:end], self.held[stage]
        key = (held, tuple(layer.name for layer in layers))
        if key not in self.found:
            tables = stage_tables(self.point, layers, held, self.space)
            best = partition_exact(tables, self.budget_mb * MB).solution
            self.found[key] = (
                (np.inf, 0, ())
                if best is None
                else (best.step_s, best.peak_bytes // MB, tuple(tables.strategies[each] for each in best.strategies))
            )
        return self.found[key]

    def plan_with(self, cuts: Sequence[int]) -> Plan | None:
        """The fastest plan with these cuts, or None if a stage does not fit."""
        solved = [self.solve(stage, *span) for stage, span in enumerate(itertools.pairwise(cuts))]
        if not all(strategies for _, _, strategies in solved):
            return None
        return Plan(
            batch=self.point.batch,
            num_stages=self.point.num_stages,
            stages=tuple(strategies for _, _, strategies in solved),
            step_s=sum(seconds for seconds, _, _ in solved),
            peak_mb=max(peak for _, peak, _ in solved),
        )


class CutSearch:
    """The best cuts of one point within a budget, from bounds that become exact where it matters."""

    def __init__(self, point: Point, space: Space, budget_mb: int) -> None:
        self.point = point
        self.times = StageTimes(point, space, budget_mb)
        size = len(point.inputs.layers) + 1
        self.is_solved: NDArray[np.bool_] = np.zeros((point.num_stages, size, size), dtype=bool)
        bounds = {held: self._bounds(held) for held in set(self.times.held)}
        self.seconds = np.stack([bounds[held] for held in self.times.held])
        """[stage, first layer, end] lower bound, exact where solved, infinite where nothing fits"""

    def best_cuts(self) -> tuple[float, tuple[int, ...]]:
        """Least bound of the step time and the cuts that have it; infinite if no cuts fit."""
        reached, before = self.seconds[0][0], []
        for seconds in self.seconds[1:]:
            through = reached[:, None] + seconds
            before.append(through.argmin(axis=0))
            reached = through.min(axis=0)
        cuts = [len(self.point.inputs.layers)]
        for best in reversed(before):
            cuts.append(int(best[cuts[-1]]))
        return float(reached[-1]), (0, *reversed(cuts))

    def plan(self, slowest_s: float = np.inf) -> Plan | None:
        """The fastest plan, or None if nothing fits or nothing can be faster than the given step time."""
        while True:
            bound, cuts = self.best_cuts()
            if not bound < slowest_s:
                return None
            spans = enumerate(itertools.pairwise(cuts))
            unsolved = [(stage, span) for stage, span in spans if not self.is_solved[stage][span]]
            if not unsolved:
                return self.times.plan_with(cuts)
            for stage, span in unsolved:
                self.seconds[stage][span] = self.times.solve(stage, *span)[0]
                self.is_solved[stage][span] = True

    def _bounds(self, held_mb: float) -> FloatArray:
        """[first layer, end] lower bounds for a stage that holds so much besides its layers."""
        layers = self.point.inputs.layers
        tables = stage_tables(self.point, layers, held_mb, self.times.space)
        options = [
            (
                tables.time_s[layer_type][tables.legal[layer_type]],
                tables.static_bytes[layer_type][tables.legal[layer_type]] / MB,
            )
            for layer_type in range(len(tables.layer_types))
        ]
        room = self.times.budget_mb - tables.overhead_bytes / MB
        least = _sums(np.array([options[layer_type][1].min() for layer_type in tables.layers]))
        bounds = np.zeros_like(least)
        for price in _corners(options):
            priced = [float(np.min(seconds + price * size)) for seconds, size in options]
            np.maximum(
                bounds, _sums(np.array([priced[layer_type] for layer_type in tables.layers])) - price * room, out=bounds
            )
        return np.where((least > 0) & (least <= room), bounds * (1 - 1e-12), np.inf)


def _sums(values: FloatArray) -> FloatArray:
    """[first, end] sums of consecutive values; 0 where the end does not lie behind the first."""
    prefix = np.concatenate(([0.0], np.cumsum(values)))
    return np.triu(prefix - prefix[:, None], k=1)


def _corners(options: Iterable[tuple[FloatArray, FloatArray]]) -> list[float]:
    """Prices at which two strategies of one type cost the same, and 0."""
    corners = {0.0}
    for seconds, size in options:
        for a, b in itertools.permutations(range(len(seconds)), 2):
            if seconds[a] < seconds[b] and size[a] > size[b]:
                corners.add(float((seconds[b] - seconds[a]) / (size[a] - size[b])))
    return sorted(corners)
