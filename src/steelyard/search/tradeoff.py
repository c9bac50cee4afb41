r"""Trade-off of time against memory: all plans that are worth having instead of one.

*Profiling*: the minimum step time as a function of the budget is a falling staircase. A bounded number of searches is
spent where two known neighbours leave the largest gap, so that the steps found are spread over the whole staircase.
Each step is exact, and between two neighbours the time lies between theirs. Two steps are adjacent if a budget one byte
below the peak of the fast one gives the slow one.

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 5. Its other two objectives: *mini-time* is `search`
itself, *mini-parallelism* is `search` on the smallest number of devices that holds a plan (`steelyard.planning`).
"""

import heapq
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from steelyard.cost.tables import CostTables
from steelyard.search.runs import AnyBudget, smallest_peak_bytes
from steelyard.search.solve import ConfigOutcome, search

UNLIMITED_BYTES = 2**62
"""Budget that never binds."""
LEAST_S = 1e-12
"""Time in seconds that replaces a time of zero in comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TradeOff:
    """The fastest plan within ``peak_bytes``; no plan of fewer bytes is as fast."""

    peak_bytes: int
    score_s: float
    outcome: ConfigOutcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledFrontier:
    """Steps of time against memory, most memory and shortest time first."""

    steps: tuple[TradeOff, ...]
    is_complete: bool
    """Whether no step is missing between the first and the last."""


def sampled_frontier(
    tables: Iterable[CostTables],
    *,
    samples: Sequence[int] | None = None,
    most_bytes: int = UNLIMITED_BYTES,
    max_searches: int,
    time_limit_s: float | None = None,
) -> SampledFrontier:
    """Return steps of time against memory from ``most_bytes`` down to the smallest budget that holds a plan.

    Every step is the result of `search` within its ``peak_bytes``; there are none if nothing fits into ``most_bytes``.
    After ``time_limit_s`` no search begins, and the current one returns its best plan so far; steps may then be
    missing.
    """
    given = tuple(tables)
    weights = tuple(samples) if samples is not None else (1,) * len(given)
    least_bytes = smallest_peak_bytes(map(AnyBudget, given))
    if least_bytes is None or least_bytes > most_bytes:
        return SampledFrontier(steps=(), is_complete=True)
    everything = tuple(range(len(given)))
    deadline = None if time_limit_s is None else time.process_time() + time_limit_s
    fastest = _found(given, weights, everything, most_bytes, deadline)
    smallest = _found(given, weights, everything, least_bytes, deadline)
    gaps = [_Gap(slow=smallest.step, explored_bytes=least_bytes, fast=fastest)]
    is_proven = fastest.is_proven and smallest.is_proven
    for _ in range(max_searches - 2):
        if not any(gap.is_open for gap in gaps) or (deadline is not None and time.process_time() > deadline):
            break
        gap = heapq.heappop(gaps)
        middle = _found(given, weights, gap.configs(weights), gap.next_budget, deadline)
        is_proven = is_proven and middle.is_proven
        for each in gap.divided(middle, gap.next_budget):
            heapq.heappush(gaps, each)
    ordered = sorted(gaps, key=lambda gap: -gap.fast.step.peak_bytes)
    steps = [gap.fast.step for gap in ordered] + [ordered[-1].slow]
    kept = [step for step, after in itertools.pairwise(steps) if step.score_s < after.score_s] + [steps[-1]]
    return SampledFrontier(steps=tuple(kept), is_complete=is_proven and not any(gap.is_open for gap in ordered))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """A step with a lower bound of each configuration's step time within the budget of the step and below it."""

    step: TradeOff
    bounds_s: dict[int, float]
    is_proven: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gap:
    """Two neighbouring steps. Budgets up to ``explored_bytes`` give the slow one; those above it are unknown."""

    slow: TradeOff
    explored_bytes: int
    fast: _Found
    was_flat: bool = False
    """Whether the last search in this gap gave the slow step again."""

    @property
    def is_open(self) -> bool:
        return self.slow.score_s > self.fast.step.score_s and self.explored_bytes < self.fast.step.peak_bytes - 1

    @property
    def next_budget(self) -> int:
        """Middle on a logarithmic scale; just below the fast step if the lower part has turned out flat."""
        highest = self.fast.step.peak_bytes - 1
        if self.was_flat:
            return highest
        middle = math.isqrt(max(self.explored_bytes, 1) * max(highest, 1))
        return min(max(middle, self.explored_bytes + 1), highest)

    def configs(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the configurations that may be as fast as the slow step within a budget below the fast one."""
        reach = self.slow.score_s * (1 + 1e-9)
        return tuple(index for index, bound in self.fast.bounds_s.items() if bound / samples[index] <= reach)

    def divided(self, middle: _Found, budget: int) -> tuple["_Gap", ...]:
        """Return the remaining gaps once the step within ``budget`` is known."""
        if middle.step.score_s >= self.slow.score_s:
            return (replace(self, explored_bytes=budget, was_flat=True),)
        lower = _Gap(slow=self.slow, explored_bytes=self.explored_bytes, fast=middle)
        if middle.step.score_s <= self.fast.step.score_s:
            return (lower,)
        return lower, _Gap(slow=middle.step, explored_bytes=budget, fast=self.fast)

    def __lt__(self, other: "_Gap") -> bool:
        """Order open gaps first, the widest first."""
        return self._room > other._room

    @property
    def _room(self) -> float:
        if not self.is_open:
            return -1.0
        bytes_ratio = (self.fast.step.peak_bytes - 1) / max(self.explored_bytes, 1)
        return math.log(bytes_ratio) * (self.slow.score_s / max(self.fast.step.score_s, LEAST_S) - 1)


def _found(
    tables: Sequence[CostTables],
    samples: Sequence[int],
    configs: Sequence[int],
    budget_bytes: int,
    deadline: float | None,
) -> _Found:
    """Search these configurations within a budget that holds a plan."""
    result = search(
        [tables[index] for index in configs],
        budget_bytes,
        samples=[samples[index] for index in configs],
        num_alternatives=0,
        time_limit_s=None if deadline is None else max(0.0, deadline - time.process_time()),
    )
    assert result.best is not None, "the least bytes that hold something were asked for"
    best = replace(result.best, index=configs[result.best.index])
    step = TradeOff(peak_bytes=best.solution.peak_bytes, score_s=best.score_s, outcome=best)
    bounds = {
        configs[each.index]: each.result.lower_bound_s for each in result.configs if each.result.status != "infeasible"
    }
    return _Found(step=step, bounds_s=bounds, is_proven=result.status == "optimal")
