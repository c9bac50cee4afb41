"""What all parts of a plan file have in common."""

from importlib import import_module

from pydantic import BaseModel, ConfigDict


class PlanPart(BaseModel):
    """Common to all parts of a plan file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def notebook_html(value: object) -> str:
    """Return a value as a notebook shows it: by `steelyard.report`, a layer above this one that is loaded only then."""
    text: str = import_module("steelyard.report.html.notebook").fragment(value)
    return text
