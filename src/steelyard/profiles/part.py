"""What all parts of a profile share: immutable values, and quantities that grow with the samples."""

from typing import Annotated, overload

from pydantic import BaseModel, ConfigDict, Field

from steelyard.limits import MOST_QUANTITY, Quantity
from steelyard.units import Amount

Size = Annotated[float, Field(gt=0, le=MOST_QUANTITY, allow_inf_nan=False)]
"""Of a dim, for one sample: whole, or the mean of parts that differ."""


class ProfilePart(BaseModel):
    """Common to all parts of a profile: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Affine(ProfilePart):
    """A quantity of ``constant + per_sample × samples``."""

    constant: Quantity = 0.0
    per_sample: Quantity = 0.0

    @overload
    def at(self, samples: float) -> float: ...
    @overload
    def at(self, samples: Amount) -> Amount: ...
    def at(self, samples: Amount) -> Amount:
        """The quantity for this many samples on a rank."""
        return self.constant + self.per_sample * samples
