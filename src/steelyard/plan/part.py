"""The base class of all parts of a plan file."""

from importlib import import_module

from pydantic import BaseModel, ConfigDict


class PlanPart(BaseModel):
    """Base class of all parts of a plan file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def notebook_html(value: object) -> str:
    """Return the notebook HTML of a value. It loads `steelyard.report`, a layer above this one, only when called."""
    text: str = import_module("steelyard.report.html.notebook").fragment(value)
    return text
