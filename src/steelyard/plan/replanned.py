"""The plan for what is there of a cluster, as the search gives it to the runtime of an elastic run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A plan, and the processes that follow it."""

    plan: Plan
    taken: tuple[int, ...]
    """Of each host the processes that take part, the first ones."""
    notice: str = ""
    """What it costs, for people; nothing where the plan is the one that was given."""


Replan = Callable[[Plan, Sequence[int], Path], Replanned]
"""From a plan, the processes of each host and the folder of the plan's file to the plan for them; raises `UserError`
where there is none."""
