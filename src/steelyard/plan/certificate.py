"""What is proven of a plan: a status and a gap. The words that people read are made from them here alone."""

from typing import Literal, Self

from pydantic import Field, model_validator

from steelyard.errors import InvalidPlanError
from steelyard.limits import MOST_STEPS, Seconds
from steelyard.plan.part import PlanPart
from steelyard.units import format_seconds

TOLERANCE = 1e-4
"""A gap that solvers of integer programs by custom leave (HiGHS and Gurobi: ``mip_rel_gap``, ``MIPGap``)."""
Status = Literal["optimal", "gap", "simulated", "priced"]


class Certificate(PlanPart):
    """How sure the planner is that no plan is faster.

    ``optimal``: none is, by the cost tables. ``gap``: it is the best that was found, in the time that
    there was or of those that fit; optimal to so much where that is within `TOLERANCE`. ``simulated``: the
    fastest in simulation of several that the search found. ``priced``: given, not searched.
    """

    status: Status
    gap: float | None = Field(default=None, ge=0, le=1)
    """The part of the plan's step by the cost tables that `Prediction.lower_bound_s` does not prove necessary; absent
    where nothing is proven."""
    time_limit_s: Seconds | None = None
    """What the search might take, where that ended it before it proved its plan; absent where it ended by itself."""
    num_simulated: int | None = Field(default=None, ge=2, le=MOST_STEPS)
    """Plans among which the simulator chose; absent where it confirmed the search's best."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field, needed_by in (("gap", "gap"), ("num_simulated", "simulated")):
            if self.status == needed_by and getattr(self, field) is None:
                raise InvalidPlanError(
                    field=f"certificate.{field}",
                    found="nothing",
                    expected=f"a number, since the status is {self.status}",
                    hint="plan again",
                )
        return self

    @property
    def is_optimal(self) -> bool:
        """Whether no plan that was searched is faster, by the cost tables."""
        return self.status == "optimal"

    @property
    def _is_within_tolerance(self) -> bool:
        return self.gap is not None and self.gap <= TOLERANCE

    @property
    def brief(self) -> tuple[str, str]:
        """A word or two, and what they mean."""
        match self.status:
            case "optimal":
                return "optimal", "none that was searched is faster"
            case "gap" if self._is_within_tolerance:
                return f"optimal to {TOLERANCE:.2%}", "no plan that fits is faster by more"
            case "gap":
                ended = (
                    "left when the time was up"
                    if self.time_limit_s is not None
                    else "no plan that fits is faster by more"
                )
                return f"gap {self.gap:.2%}", ended
            case "simulated":
                return "simulated", "the fastest of the search's best"
            case "priced":
                return "none", "priced as given, not searched"

    def __str__(self) -> str:
        match self.status:
            case "optimal":
                return "optimal for the cost tables"
            case "gap" if self._is_within_tolerance:
                return f"optimal for the cost tables to {TOLERANCE:.2%}: no plan that fits is faster by more"
            case "gap":
                if self.time_limit_s is not None:
                    limit = format_seconds(self.time_limit_s)
                    return f"best so far, gap {self.gap:.2%}: the search ended at its limit of {limit}"
                return f"best found, gap {self.gap:.2%}: no plan that fits is faster by more"
            case "simulated":
                return (
                    f"fastest in simulation among the search's best {self.num_simulated}; in its closed form another is"
                )
            case "priced":
                return "priced as given, not searched"
