r"""Time against memory, and time against devices: not one plan but all that are worth having.

*Profiling*: the least step time as a function of the budget is a falling staircase. Starting without a limit, the
search is repeated with a budget one byte below the peak of the plan it found last, so every step of the staircase is
met and nothing between two steps is missed. *Mini-time* is `search` itself, and *mini-parallelism* takes the smallest
device count for which something fits, then the least time.

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 5, for the three objectives.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from steelyard.cost.tables import CostTables
from steelyard.search.solve import SearchResult, SettingOutcome, search

UNLIMITED_BYTES = 2**62
"""A budget that never binds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TradeOff:
    """The fastest plan of all that take at most ``peak_bytes``; none takes fewer bytes and no more time."""

    peak_bytes: int
    score_s: float
    outcome: SettingOutcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceOption:
    """What a number of devices can do within the budget per device."""

    num_devices: int
    result: SearchResult


def memory_frontier(
    tables: Iterable[CostTables],
    *,
    samples: Sequence[int] | None = None,
    most_bytes: int = UNLIMITED_BYTES,
    max_points: int | None = None,
) -> tuple[TradeOff, ...]:
    """Every step of time against memory, least memory last; with ``max_points``, only the first so many steps.

    Steps are found from ``most_bytes`` downwards, so a limited frontier holds the fastest plans.
    """
    found: list[TradeOff] = []
    for step in _descend(tuple(tables), samples, most_bytes):
        if found and step.score_s <= found[-1].score_s:
            found.pop()
        elif max_points is not None and len(found) == max_points:
            break
        found.append(step)
    return tuple(found)


def _descend(tables: Sequence[CostTables], samples: Sequence[int] | None, budget_bytes: int) -> Iterator[TradeOff]:
    while True:
        best = search(tables, budget_bytes, samples=samples, num_alternatives=0).best
        if best is None:
            return
        peak = best.solution.peak_bytes
        yield TradeOff(peak_bytes=peak, score_s=best.score_s, outcome=best)
        budget_bytes = peak - 1


def device_frontier(
    tables_for: Callable[[int], Iterable[CostTables]], counts: Iterable[int], budget_bytes: int
) -> tuple[DeviceOption, ...]:
    """The search result for each device count, fewest devices first; ``tables_for`` gives the settings of a count."""
    return tuple(
        DeviceOption(num_devices=count, result=search(tables_for(count), budget_bytes)) for count in sorted(set(counts))
    )


def fewest_devices(
    tables_for: Callable[[int], Iterable[CostTables]], counts: Iterable[int], budget_bytes: int
) -> tuple[DeviceOption, ...]:
    """Device counts from the fewest up to the first for which something fits (the last entry), with their results.

    If even the most devices do not suffice, the last entry is infeasible too, and its nearest miss says by how much.
    """
    tried: list[DeviceOption] = []
    for count in sorted(set(counts)):
        tried.append(DeviceOption(num_devices=count, result=search(tables_for(count), budget_bytes)))
        if tried[-1].result.best is not None:
            break
    return tuple(tried)
