"""The user's decisions: choices withheld from the search, stored with the plan so that a later search respects them."""

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from steelyard.errors import UserError
from steelyard.files import FilePart, first_error
from steelyard.limits import MOST_DEVICES, DeviceCount, Microbatches
from steelyard.plan.dimensions import DIMENSIONS, modes
from steelyard.plan.strategy import Remat
from steelyard.schedules import SCHEDULES
from steelyard.schedules.name import ScheduleName

Space = Literal["full", "paper"]
Partition = Literal["exact", "bmw", "even", "memory-balanced"]
"""Method of cutting layers into stages: ``exact`` also chooses strategies, the others are for comparison."""


def _keys_among(known: Callable[[], Collection[str]]) -> AfterValidator:
    def check(found: dict[str, Any]) -> dict[str, Any]:
        for key in found:
            if key not in known():
                raise ValueError(f"keys among {', '.join(known())}, not {key!r}")
        return found

    return AfterValidator(check)


Degree = Annotated[int, Field(ge=0, le=MOST_DEVICES)]
Modes = Annotated[dict[str, tuple[bool | Degree | str, ...]], _keys_among(modes)]

_PINNED_SCHEDULE = re.compile(r"\bschedule\s*=\s*([\w-]+)")
_OPTIONS = {
    **{"num_stages": "stages", "most_stages": "max-stages", "num_microbatches": "microbatches"},
    **{"schedules": "schedule", "remats": "remat"},
}
"""Command-line options whose names differ from the fields."""


class Decisions(FilePart):
    """Decisions taken before the search; a field that is None leaves the choice to the search."""

    pins: tuple[str, ...] = ()
    """Requirements on layers, as written; `steelyard.planning.pins` reads them."""
    num_stages: DeviceCount | None = None
    most_stages: DeviceCount | None = None
    num_microbatches: Microbatches | None = None
    schedules: tuple[ScheduleName, ...] | None = None
    remats: tuple[Remat, ...] | None = None
    modes: Modes | None = None
    """Allowed values of each mode of a parallelism dimension, by the mode's key."""
    max_degrees: Annotated[dict[str, Degree], _keys_among(lambda: DIMENSIONS)] | None = None
    """Largest degree of each parallelism dimension, by name; 0 for no level of it, not even one of degree 1."""
    space: Space | None = None
    """All dimensions, or only those of the papers and never two that divide samples in one layer."""
    partition: Partition | None = None
    uniform: Literal[True] | None = None
    """One strategy for all layers and one remat choice for all blocks, as without a planner."""

    if not TYPE_CHECKING:  # type checkers read the fields

        def __init__(self, **given: Any) -> None:
            """Raise `UserError` that names the field for a wrong value."""
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise first_error(error, type(self), UserError) from error

        __init__.__pydantic_base_init__ = True  # a plan file is validated as one, with the place of its mistake

    @property
    def allowed_schedules(self) -> tuple[str, ...]:
        """Schedules that the search may choose, by name: of those that are allowed, the ones that pins name, if any."""
        allowed = tuple(SCHEDULES) if self.schedules is None else self.schedules
        pinned = {name for pin in self.pins for name in _PINNED_SCHEDULE.findall(pin)}
        return tuple(name for name in allowed if not pinned or name in pinned)

    def allows_stages(self, count: int) -> bool:
        """Return whether a pipeline may have this number of stages."""
        return self.num_stages in (None, count) and (self.most_stages is None or count <= self.most_stages)

    @property
    def stage_partition(self) -> Partition:
        """Method of cutting the layers into stages."""
        return self.partition or "exact"

    @property
    def is_free(self) -> bool:
        """Whether every choice is left to the search."""
        return self == FREE

    def with_also(self, *others: "Decisions") -> "Decisions":
        """Return the combination of these decisions with others: the values in common where both decide."""
        found = self
        for other in others:
            found = found.model_copy(update={name: _both(name, getattr(found, name), value) for name, value in other})
        return found

    def one_by_one(self) -> dict[str, "Decisions"]:
        """Return each decision alone, keyed by its command-line text."""
        found = {pin_option(text): Decisions(pins=(text,)) for text in self.pins}
        for name, value in self:
            if value is None or name == "pins":
                continue
            if isinstance(value, dict):
                found |= {
                    _option(name, key, each): Decisions.model_validate({name: {key: each}})
                    for key, each in value.items()
                }
            else:
                found[_option(name, name, value)] = Decisions.model_validate({name: value})
        return found


FREE = Decisions()
"""No decisions: every choice is left to the search."""


def pin_option(pin: str) -> str:
    """Return the command-line text of a pin: ``--tp 4`` for ``tp=4``, ``--pin 'blocks: tp=4'``."""
    name, _, degree = pin.partition("=")
    return f"--{name} {degree}" if name in DIMENSIONS else f"--pin {pin!r}"


def _both(name: str, mine: Any, other: Any) -> Any:
    if mine is None or other is None:
        return other if mine is None else mine
    if name == "most_stages":
        return min(mine, other)
    if isinstance(mine, tuple):
        joined = (*mine, *(text for text in other if text not in mine))
        return joined if name == "pins" else tuple(each for each in mine if each in other)
    if name == "modes":
        return mine | {key: tuple(x for x in mine.get(key, each) if x in each) for key, each in other.items()}
    if name == "max_degrees":
        return mine | {key: min(degree, mine.get(key, degree)) for key, degree in other.items()}
    if mine != other:
        raise UserError(
            field=_option(name, name, mine),
            found=_option(name, name, other),
            expected="decisions that do not contradict each other",
            hint="leave one out",
        )
    return mine


def _option(field: str, key: str, value: Any) -> str:
    values = value if isinstance(value, tuple) else (value,)
    if field == "modes":
        names = {each: text for text, each in modes()[key][1].pin.items()}
        values = tuple(names.get(each, each) for each in values)
    prefix = "max-" if field == "max_degrees" else ""
    text = f"--{prefix}{_OPTIONS.get(key, key)}"
    return text if value is True else f"{text} {','.join(str(each) for each in values)}"
