"""The interface through which the runtime of an elastic run asks the search for a new plan, without importing it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A plan, and the processes that follow it."""

    plan: Plan
    taken: tuple[int, ...]
    """Number of participating processes of each host, the first ones."""
    order: tuple[int, ...] = ()
    """Indices of the hosts in rank order, pool by pool as in the plan; empty if the hosts are already in rank order."""
    notice: str = ""
    """Cost of the change, for people; empty if the plan is the given one."""


Replan = Callable[[Plan, Sequence[int], Path, Sequence[str]], Replanned]
"""Function from a plan, the processes of each host, the folder of the plan's file and, if given, the pool of each host,
to the plan for them. Raises `UserError` if there is none."""
