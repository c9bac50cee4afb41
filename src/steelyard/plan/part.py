"""What all parts of a plan file have in common."""

from pydantic import BaseModel, ConfigDict


class PlanPart(BaseModel):
    """Common to all parts of a plan file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
