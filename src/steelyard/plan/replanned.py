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
    notice: str = ""
    """What it costs, for people; nothing where the plan is the one that was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanner:
    """How plans for other devices are found."""

    replan: Callable[[Plan, Sequence[int], Path], Replanned]
    """From a plan, the processes of each host and the folder of the plan's file to the plan for them.

    Raises `UserError` where there is none."""
    ahead: str
    """The module that is run with the paths of a plan and of a file to write, and the processes of each host: writes
    the plan with those for the likeliest next losses among its spares."""
