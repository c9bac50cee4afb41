r"""Trade-off of time against memory: all plans that are worth having instead of one.

*Profiling*: the minimum step time as a function of the budget is a falling staircase. A bounded number of searches is
spent where two known neighbours leave the largest gap, so that the steps found are spread over the whole staircase.
Each step is exact, and between two neighbours the time lies between theirs. Two steps are adjacent if a budget one byte
below the peak of the fast one gives the slow one.

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 5. Its other two objectives: *mini-time* is `search`
itself, *mini-parallelism* is `search` on the smallest number of devices that holds a plan (`steelyard.planning`).
"""

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    max_searches: int,
    time_limit_s: float | None = None,
) -> SampledFrontier:
    """Return steps of time against memory down to the smallest budget that holds a plan.

    Every step is the result of `search` within its ``peak_bytes``. After ``time_limit_s`` no search begins, and the
    current one returns its best plan so far; steps may then be missing.
    """
    given = tuple(tables)
    least_bytes = smallest_peak_bytes(map(AnyBudget, given))
    if least_bytes is None:
        return SampledFrontier(steps=(), is_complete=True)
    deadline = math.inf if time_limit_s is None else time.process_time() + time_limit_s
    found: dict[int, TradeOff] = {}
    budgets, is_proven = [UNLIMITED_BYTES, least_bytes], True
    while budgets and len(found) < max_searches and (len(found) < 2 or time.process_time() <= deadline):
        budget = budgets.pop(0)
        left_s = None if time_limit_s is None else max(0.0, deadline - time.process_time())
        result = search(given, budget, samples=samples, num_alternatives=0, time_limit_s=left_s)
        assert result.best is not None, "the least bytes that hold something were asked for"
        is_proven = is_proven and result.status == "optimal"
        peak_bytes = result.best.solution.peak_bytes
        found[budget] = TradeOff(peak_bytes=peak_bytes, score_s=result.best.score_s, outcome=result.best)
        budgets = budgets or _in_widest_gap(found)
    steps: list[TradeOff] = []
    for _, step in sorted(found.items()):
        if not steps or step.score_s < steps[-1].score_s:
            steps.append(step)
    return SampledFrontier(steps=tuple(reversed(steps)), is_complete=is_proven and not budgets)


def _in_widest_gap(found: Mapping[int, TradeOff]) -> list[int]:
    """Return the next budget, in the gap with the widest ratio of bytes times the gain in time; empty if none is open.

    It is the middle on a logarithmic scale, or just below the fast step if the lower part of the gap has turned out
    flat: its last search gave the slow step again.
    """
    widest, budgets, before_s = 0.0, list[int](), math.inf
    ordered = sorted(found.items())
    for (explored, slow), (_, fast) in itertools.pairwise(ordered):
        highest = fast.peak_bytes - 1
        gain = slow.score_s / max(fast.score_s, LEAST_S) - 1
        room = math.log(highest / max(explored, 1)) * gain if explored < highest else 0.0
        if slow.score_s > fast.score_s and room > widest:
            middle = math.isqrt(max(explored, 1) * highest)
            was_flat = slow.score_s >= before_s
            widest, budgets = room, [highest if was_flat else min(max(middle, explored + 1), highest)]
        before_s = slow.score_s
    return budgets
