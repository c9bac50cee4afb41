"""Pydantic type for the name of a schedule in a file."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from steelyard.errors import nearest
from steelyard.schedules import SCHEDULES


def _known(name: object) -> str:
    if not isinstance(name, str) or name not in SCHEDULES:
        *others, last = (repr(each) for each in SCHEDULES)
        raise PydanticCustomError(
            "unknown_schedule",
            "Input should be {expected}",
            {"expected": f"{', '.join(others)} or {last}", "hint": nearest(str(name), SCHEDULES)},
        )
    return name


def _list_names(schema: dict[str, Any]) -> None:
    schema["enum"] = list(SCHEDULES)


ScheduleName = Annotated[str, BeforeValidator(_known), Field(json_schema_extra=_list_names)]
"""Name of a known schedule. An unknown name is an error that suggests the nearest known one."""
