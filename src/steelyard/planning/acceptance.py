"""The fastest plans of a job that fit, as plans: the search within the memory of a device, and what it says of all.

The search adds up memory as a plan is predicted (`steelyard.cost.memory`), so what it finds fits as reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job
from steelyard.cost.tables import CostTables
from steelyard.plan.decisions import Partition
from steelyard.plan.plan import Plan
from steelyard.planning.plan_from_search import bare_plan
from steelyard.search import ConfigOutcome, OnDemand, SearchResult, nearest_miss, search
from steelyard.search.group_strategies import group_equal_strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A plan that fits, and the outcome of the search that it comes from."""

    outcome: ConfigOutcome
    plan: Plan

    @property
    def is_settled(self) -> bool:
        """Whether no plan of its configuration is faster."""
        return self.outcome.result.status == "optimal"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """The best plans of the configurations, fastest first, and what the search says of all configurations.

    Where there is none no plan takes less than ``floor_bytes``.
    """

    ranked: tuple[Accepted, ...]
    search: SearchResult
    bounds_s: tuple[float, ...]
    """What no plan of each configuration that fits is faster than, in the order given."""
    floor_bytes: int = 0

    def bounded(self) -> tuple[OnDemand, ...]:
        """The tables that were searched with their bounds, for further searches within no more memory."""
        pairs = zip(self.search.configs, self.bounds_s, strict=True)
        return tuple(each.given.bounded(bound_s) for each, bound_s in pairs)


def accept(
    job: Job,
    tables: Sequence[CostTables | OnDemand],
    *,
    num_exact: int = 1,
    num_alternatives: int = 4,
    partition: Partition = "exact",
    time_limit_s: float | None = None,
) -> Acceptance:
    """The fastest plans of a job that fit, of all configurations whose cost tables are given; arguments as of
    `search`."""
    room_bytes = usable_bytes(job)
    found = search(
        tables,
        room_bytes,
        num_exact=num_exact,
        num_alternatives=num_alternatives,
        partition=partition,
        time_limit_s=time_limit_s,
    )
    bounds = (max(each.result.lower_bound_s, each.given.least_s) for each in found.configs)
    made = [] if found.ranked else [each.tables for each in found.configs if each.given.is_made]
    least = [nearest_miss(each, 0) for each in made]
    return Acceptance(
        ranked=tuple(Accepted(outcome=each, plan=_plan(job, each, room_bytes)) for each in found.ranked),
        search=found,
        bounds_s=tuple(bounds),
        floor_bytes=min((miss.needed_bytes for miss in least if miss is not None), default=0),
    )


def _plan(job: Job, outcome: ConfigOutcome, room_bytes: int) -> Plan:
    return bare_plan(job, outcome.tables, group_equal_strategies(outcome.tables, outcome.solution, room_bytes))
