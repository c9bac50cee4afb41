"""What a user asked of a plan, one demand at a time, so that a search can keep to some and say which it could not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from steelyard.plan.asked import Asked
from steelyard.plan.kinds import variants
from steelyard.planning.pins import parse_pin
from steelyard.planning.problem import PlanOptions

_FREE = PlanOptions()
_SAID = tuple(name for name in Asked.model_fields if name != "pins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One decision of the user."""

    text: str
    """As it was written on the command line: ``--stages 4``."""
    field: str
    """Of `PlanOptions`."""
    value: Any


def asked_in(options: PlanOptions) -> Asked | None:
    """What the options leave no choice about; None where they leave every one."""
    said = {name: getattr(options, name) for name in _SAID if getattr(options, name) != getattr(_FREE, name)}
    pins = tuple(pin.text for pin in options.pins)
    return Asked(pins=pins, **said) if pins or said else None


def demands_of(asked: Asked | None, *, num_layers: int) -> tuple[Demand, ...]:
    """The decisions of a user, each by itself; raises `UserError` for a pin that does not belong to the model."""
    if asked is None:
        return ()
    found = [
        Demand(text=f"--pin {text!r}", field="pins", value=(parse_pin(text, option="--pin", num_layers=num_layers),))
        for text in asked.pins
    ]
    for name in _SAID:
        value = getattr(asked, name)
        if isinstance(value, dict):
            found += [
                Demand(text=_option(name, key, each), field=name, value={key: each}) for key, each in value.items()
            ]
        elif value is not None:
            found.append(Demand(text=_option(name, name, value), field=name, value=value))
    return tuple(found)


def narrowed(options: PlanOptions, demands: Sequence[Demand]) -> PlanOptions:
    """The options with no choice but what is asked for; of choices that are both given, those in common."""
    for demand in demands:
        mine, value = getattr(options, demand.field), demand.value
        if demand.field == "pins":
            value = (*mine, *value)
        elif isinstance(value, tuple):
            value = tuple(each for each in mine if each in value)
        elif demand.field == "variants":
            value = mine | {key: tuple(x for x in mine.get(key, each) if x in each) for key, each in value.items()}
        elif isinstance(value, dict):
            value = mine | value
        elif mine not in (None, value, getattr(_FREE, demand.field)):
            value = mine
        options = replace(options, **{demand.field: value})
    return options


def _option(field: str, key: str, value: Any) -> str:
    values = value if isinstance(value, tuple) else (value,)
    if field == "variants":
        names = {each: text for text, each in variants()[key][1].pin.items()}
        values = tuple(names.get(each, each) for each in values)
    name = {"num_stages": "stages", "num_microbatches": "microbatches", "schedules": "schedule", "remats": "remat"}
    prefix = "max-" if field == "max_degrees" else ""
    return f"--{prefix}{name.get(key, key)} {','.join(str(each) for each in values)}"
