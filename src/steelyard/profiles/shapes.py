"""The parts that profiles are made of: immutable values, quantities that grow with the samples, shapes of kernels.

The shapes of a layer's products and attention on one rank are sizes of one sample, and which of them grows. Equal calls
are folded into one with a count, so that a trace stays small.
"""

from typing import Annotated, Literal, overload

from pydantic import BaseModel, ConfigDict, Field

from steelyard.limits import MOST_QUANTITY, Count, Quantity
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

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(constant=self.constant + other.constant, per_sample=self.per_sample + other.per_sample)

    def __mul__(self, factor: float) -> "Affine":
        return Affine(constant=self.constant * factor, per_sample=self.per_sample * factor)

    @overload
    def at(self, samples: float) -> float: ...
    @overload
    def at(self, samples: Amount) -> Amount: ...
    def at(self, samples: Amount) -> Amount:
        """The quantity for this many samples on a rank."""
        return self.constant + self.per_sample * samples


Dim = Literal["groups", "m", "n", "k"]
DIMS: tuple[Dim, ...] = ("groups", "m", "n", "k")


class Product(ProfilePart):
    """Matrix products [m, k] × [k, n], ``groups`` of them in one kernel (experts, or a batch), ``count`` such calls.

    ``grows`` is the dim that is proportional to the samples, which is stated for one; None where none is. Of experts
    ``m`` (``k`` of a weight's gradient) are the mean rows of one.
    """

    m: Size
    n: Size
    k: Size
    groups: Size = 1.0
    count: Count = 1
    grows: Dim | None

    def flop(self, samples: float) -> float:
        """FLOP of all calls for so many samples on a rank."""
        times = samples if self.grows else 1.0
        return 2 * self.count * self.groups * self.m * self.n * self.k * times

    def with_experts_over(self, degree: int) -> "Product":
        """The same pairs on a rank with one in ``degree`` of the experts; as it is where groups are no experts."""
        if self.groups == 1 or self.grows not in ("m", "k"):
            return self
        return self.model_copy(update={"groups": self.groups / degree, self.grows: getattr(self, self.grows) * degree})

    def between(self, other: "Product", place: float) -> "Product":
        """The product of sizes at ``place`` on the line that is this one at 1 and ``other`` at 2."""
        sizes: dict[str, float] = {
            dim: getattr(self, dim) + (place - 1) * (getattr(other, dim) - getattr(self, dim)) for dim in DIMS
        }
        return self.model_copy(update=sizes)


class AttentionCall(ProfilePart):
    """Fused attention of ``heads`` query heads for each sample, ``count`` such calls.

    ``head_dim`` is the mean of what queries and values have; ``masked`` says that a kernel reads a mask, of a window or
    of packed samples, and computes what it hides.
    """

    heads: Size
    head_dim: Size
    queries: Size
    keys: Size
    is_causal: bool
    masked: bool = False
    backward: bool = False
    count: Count = 1

    def flop(self, samples: Amount) -> Amount:
        """FLOP that the kernel executes: half of the square where it is causal; backward 2.5 times those forward."""
        whole = 4 * self.count * self.heads * self.head_dim * self.queries * self.keys * samples
        return whole * (0.5 if self.is_causal else 1.0) * (2.5 if self.backward else 1.0)
