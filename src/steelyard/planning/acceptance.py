"""The fastest plans of a job that fit, as plans: the search within the memory of a device, and what it says of all.

The search adds up memory as a plan is predicted (`steelyard.cost.memory`), so what it finds fits as reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.pools import AnyJob, usable_of
from steelyard.cost.tables import CostTables
from steelyard.plan.decisions import Partition
from steelyard.plan.plan import Plan
from steelyard.planning.plan_from_search import bare_plan
from steelyard.search import OnDemand, SearchResult, SettingOutcome, nearest_miss, search
from steelyard.search.group_strategies import group_equal_strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A plan that fits, and the outcome of the search that it comes from."""

    outcome: SettingOutcome
    plan: Plan

    @property
    def is_settled(self) -> bool:
        """Whether no plan of its setting is faster."""
        return self.outcome.result.status == "optimal"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """The best plans of the settings, fastest first, and what the search says of all settings.

    Where there is none no plan takes less than ``floor_bytes``.
    """

    ranked: tuple[Accepted, ...]
    search: SearchResult
    bounds_s: tuple[float, ...]
    """What no plan of each setting that fits is faster than, in the order given."""
    floor_bytes: int = 0

    def bounded(self, tables: Sequence[OnDemand]) -> tuple[OnDemand, ...]:
        """The tables that were searched with their bounds, for further searches within no more memory."""
        return tuple(each.bounded(bound_s) for each, bound_s in zip(tables, self.bounds_s, strict=True))


def accept(
    job: AnyJob,
    tables: Sequence[CostTables | OnDemand],
    *,
    num_exact: int = 1,
    num_alternatives: int = 4,
    partition: Partition = "exact",
    time_limit_s: float | None = None,
    cutoff_s: float = np.inf,
) -> Acceptance:
    """The fastest plans of a job that fit, of all settings whose cost tables are given; arguments as of `search`."""
    given = [OnDemand.of(each) for each in tables]
    room_bytes = usable_of(job)
    found = search(
        given,
        room_bytes,
        num_exact=num_exact,
        num_alternatives=num_alternatives,
        partition=partition,
        time_limit_s=time_limit_s,
        cutoff_s=cutoff_s,
    )
    bounds = (max(each.result.lower_bound_s, given[each.index].least_s) for each in found.settings)
    is_told = bool(found.ranked) or cutoff_s < np.inf
    least = [] if is_told else [nearest_miss(each.tables, 0) for each in given if each.is_made]
    return Acceptance(
        ranked=tuple(Accepted(outcome=each, plan=_plan(job, each, room_bytes)) for each in found.ranked),
        search=found,
        bounds_s=tuple(bounds),
        floor_bytes=min((miss.needed_bytes for miss in least if miss is not None), default=0),
    )


def _plan(job: AnyJob, outcome: SettingOutcome, room_bytes: int) -> Plan:
    return bare_plan(job, outcome.tables, group_equal_strategies(outcome.tables, outcome.solution, room_bytes))
