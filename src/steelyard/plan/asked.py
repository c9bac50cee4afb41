"""What the user decided before the search: kept with the plan, so that a search on its behalf can keep to it."""

from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from steelyard.limits import MOST_DEVICES, DeviceCount, Microbatches
from steelyard.plan.kinds import KINDS, variants
from steelyard.plan.part import PlanPart
from steelyard.plan.strategy import Remat
from steelyard.schedules.name import ScheduleName


def _keys_among(known: Callable[[], Collection[str]]) -> AfterValidator:
    def check(found: dict[str, Any]) -> dict[str, Any]:
        for key in found:
            if key not in known():
                raise ValueError(f"keys among {', '.join(known())}, not {key!r}")
        return found

    return AfterValidator(check)


Degree = Annotated[int, Field(ge=0, le=MOST_DEVICES)]
Variants = Annotated[dict[str, tuple[bool | Degree | str, ...]], _keys_among(variants)]


class Asked(PlanPart):
    """The user's decisions; what the search was free to choose is absent."""

    pins: tuple[str, ...] = ()
    """Each as it was written."""
    num_stages: DeviceCount | None = None
    num_microbatches: Microbatches | None = None
    schedules: tuple[ScheduleName, ...] | None = None
    remats: tuple[Remat, ...] | None = None
    variants: Variants | None = None
    """By the key of a variant of a kind, the values that may be used."""
    max_degrees: Annotated[dict[str, DeviceCount], _keys_among(lambda: KINDS)] | None = None
    """By the name of a kind."""
    space: Literal["paper"] | None = None
