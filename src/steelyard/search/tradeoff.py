r"""Time against memory: not one plan but all that are worth having.

*Profiling*: the least step time as a function of the budget is a falling staircase. The searches, a bounded number of
them, look where the two known neighbours leave most room, so that the steps found are spread over the whole staircase:
each is exact, and between two neighbours the time lies between theirs. Two steps are next to each other once a budget
one byte below the peak of the fast one gives the slow one.

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 5. Of its other two objectives *mini-time* is `search`
itself, and *mini-parallelism* is that on the smallest number of devices that holds a plan (`steelyard.planning`).
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
"""A budget that never binds."""
LEAST_S = 1e-12
"""A time that any other is compared with instead of one of zero."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TradeOff:
    """The fastest plan of all that take at most ``peak_bytes``; none takes fewer bytes and no more time."""

    peak_bytes: int
    score_s: float
    outcome: ConfigOutcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledFrontier:
    """Steps of time against memory, most memory and least time first."""

    steps: tuple[TradeOff, ...]
    is_complete: bool
    """No step is missing between the first and the last."""


def sampled_frontier(
    tables: Iterable[CostTables],
    *,
    samples: Sequence[int] | None = None,
    most_bytes: int = UNLIMITED_BYTES,
    max_searches: int,
    time_limit_s: float | None = None,
) -> SampledFrontier:
    """Steps of time against memory from ``most_bytes`` down to the least that holds anything, by so many searches.

    After ``time_limit_s`` no search begins, and the one under way takes the best so far: then steps may be missing.

    Every step is what `search` finds within its ``peak_bytes``. No steps where nothing fits into ``most_bytes``.
    """
    given = tuple(tables)
    weights = tuple(samples) if samples is not None else (1,) * len(given)
    least_bytes = smallest_peak_bytes(map(AnyBudget, given))
    if least_bytes is None or least_bytes > most_bytes:
        return SampledFrontier(steps=(), is_complete=True)
    everything = tuple(range(len(given)))
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    fastest = _found(given, weights, everything, most_bytes, deadline)
    smallest = _found(given, weights, everything, least_bytes, deadline)
    gaps = [_Gap(slow=smallest.step, explored_bytes=least_bytes, fast=fastest)]
    is_proven = fastest.is_proven and smallest.is_proven
    for _ in range(max_searches - 2):
        if not any(gap.is_open for gap in gaps) or (deadline is not None and time.monotonic() > deadline):
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
    """A step with, for each configuration, a lower bound of its score within the budget of the step and below it."""

    step: TradeOff
    bounds_s: dict[int, float]
    is_proven: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gap:
    """Two neighbouring steps. Budgets up to ``explored_bytes`` give the slow one; above lies what is not known."""

    slow: TradeOff
    explored_bytes: int
    fast: _Found
    was_flat: bool = False
    """The last search in this gap gave the slow step again."""

    @property
    def is_open(self) -> bool:
        return self.slow.score_s > self.fast.step.score_s and self.explored_bytes < self.fast.step.peak_bytes - 1

    @property
    def next_budget(self) -> int:
        """The middle on a logarithmic scale; just below the fast step where the lower part has turned out flat."""
        highest = self.fast.step.peak_bytes - 1
        if self.was_flat:
            return highest
        middle = math.isqrt(max(self.explored_bytes, 1) * max(highest, 1))
        return min(max(middle, self.explored_bytes + 1), highest)

    def configs(self, samples: Sequence[int]) -> tuple[int, ...]:
        """The configurations that may be as fast as the slow step within a budget below the fast one."""
        reach = self.slow.score_s * (1 + 1e-9)
        return tuple(index for index, bound in self.fast.bounds_s.items() if bound / samples[index] <= reach)

    def divided(self, middle: _Found, budget: int) -> tuple["_Gap", ...]:
        """What is left of the gap once the step within ``budget`` is known."""
        if middle.step.score_s >= self.slow.score_s:
            return (replace(self, explored_bytes=budget, was_flat=True),)
        lower = _Gap(slow=self.slow, explored_bytes=self.explored_bytes, fast=middle)
        if middle.step.score_s <= self.fast.step.score_s:
            return (lower,)
        return lower, _Gap(slow=middle.step, explored_bytes=budget, fast=self.fast)

    def __lt__(self, other: "_Gap") -> bool:
        """Open gaps first, and of these the one that leaves most room."""
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
    """What `search` finds among these configurations within the budget, which holds something."""
    result = search(
        [tables[index] for index in configs],
        budget_bytes,
        samples=[samples[index] for index in configs],
        num_alternatives=0,
        time_limit_s=None if deadline is None else max(0.0, deadline - time.monotonic()),
    )
    assert result.best is not None, "the least bytes that hold something were asked for"
    best = replace(result.best, index=configs[result.best.index])
    step = TradeOff(peak_bytes=best.solution.peak_bytes, score_s=best.score_s, outcome=best)
    bounds = {
        configs[each.index]: each.result.lower_bound_s for each in result.configs if each.result.status != "infeasible"
    }
    return _Found(step=step, bounds_s=bounds, is_proven=result.status == "optimal")
