"""Duration and cost of a whole training, from the step time."""

from pydantic import Field

from steelyard.plan.part import PlanPart
from steelyard.units import MOST_COUNT, format_count, format_days, format_money

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


class Training(PlanPart):
    """Duration and cost of training on a number of tokens at the predicted step time.

    Time outside steps is not counted: start-up, evaluation, checkpoints, and devices that wait or fail.
    """

    tokens: int = Field(ge=1, le=MOST_COUNT)
    steps: int = Field(ge=1, le=MOST_COUNT)
    days: float = Field(ge=0)
    device_hours: float = Field(ge=0)
    price_per_device_hour: float | None = Field(default=None, ge=0)
    """Price in dollars; absent if none was given."""
    cost: float | None = Field(default=None, ge=0)
    """Cost of all device-hours in dollars; absent if no price was given."""

    @property
    def brief(self) -> tuple[str, str]:
        """Duration, and device-hours with their cost, in words: ``61.2 days``, ``1.17 M device-hours, $2.94 M``."""
        money = "" if self.cost is None else f", {format_money(self.cost)}"
        return format_days(self.days), f"{format_count(self.device_hours)} device-hours{money}"

    def __str__(self) -> str:
        return f"{format_count(self.tokens)} tokens: {', '.join(self.brief)}"
