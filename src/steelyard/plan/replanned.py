"""What the runtime of an elastic run asks of the search, which it does not know."""

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
    order: tuple[int, ...] = ()
    """The places of the hosts in the order of their ranks, where that is not their own: pools come as in the plan."""
    notice: str = ""
    """What it costs, for people; nothing where the plan is the one that was given."""


Replan = Callable[[Plan, Sequence[int], Path, Sequence[str]], Replanned]
"""From a plan, the processes of each host, the folder of the plan's file and, where any is said, the pool of each host
to the plan for them; raises `UserError` where there is none."""
