"""Days and money for a whole training, from the time of a step."""

from pydantic import Field

from steelyard.plan.part import PlanPart
from steelyard.units import MOST_COUNT, format_count, format_days, format_money

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


class Training(PlanPart):
    """What it takes to train on so many tokens at the predicted step time.

    Not counted: what no step contains, such as start-up, evaluation, checkpoints, and devices that wait or fail.
    """

    tokens: int = Field(ge=1, le=MOST_COUNT)
    steps: int = Field(ge=1, le=MOST_COUNT)
    days: float = Field(ge=0)
    device_hours: float = Field(ge=0)
    price_per_device_hour: float | None = Field(default=None, ge=0)
    """In dollars; absent where none was given."""
    cost: float | None = Field(default=None, ge=0)
    """Dollars of all device-hours; absent where no price was given."""

    @property
    def brief(self) -> tuple[str, str]:
        """The time in words, and what it takes: ``61.2 days``, ``1.17 M device-hours, $2.94 M``."""
        money = "" if self.cost is None else f", {format_money(self.cost)}"
        return format_days(self.days), f"{format_count(self.device_hours)} device-hours{money}"

    def __str__(self) -> str:
        return f"{format_count(self.tokens)} tokens: {', '.join(self.brief)}"
