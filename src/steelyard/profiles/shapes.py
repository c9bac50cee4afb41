"""Parts of profiles: quantities that grow with the samples, and shapes of kernels.

A shape of a product or attention on one rank has the sizes for one sample and the dim that grows with the samples.
Identical calls are merged into one with a count to keep traces small.
"""

from typing import Annotated, Literal, overload

from pydantic import Field

from steelyard.files import FilePart
from steelyard.limits import MOST_QUANTITY, Count, Quantity
from steelyard.units import Amount

Size = Annotated[float, Field(gt=0, le=MOST_QUANTITY, allow_inf_nan=False)]
"""Size of a dim for one sample: an integer, or the mean of parts of different sizes."""


class Affine(FilePart):
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
        """Return the quantity for this number of samples on a rank."""
        return self.constant + self.per_sample * samples


Dim = Literal["groups", "m", "n", "k"]
DIMS: tuple[Dim, ...] = ("groups", "m", "n", "k")


class Product(FilePart):
    """Matrix products [m, k] × [k, n], ``groups`` of them in one kernel (experts, or a batch), ``count`` such calls.

    ``grows`` is the dim that is proportional to the samples, given for one sample; None if there is none. For experts,
    ``m`` (``k`` for a weight gradient) is the mean number of rows per expert.
    """

    m: Size
    n: Size
    k: Size
    groups: Size = 1.0
    count: Count = 1
    grows: Dim | None

    def flop(self, samples: float) -> float:
        """FLOP of all calls for this number of samples on a rank."""
        times = samples if self.grows else 1.0
        return 2 * self.count * self.groups * self.m * self.n * self.k * times

    def with_experts_over(self, degree: int) -> "Product":
        """Return the product with the same rows over 1 in ``degree`` experts; itself if the groups are not experts."""
        if self.groups == 1 or self.grows not in ("m", "k"):
            return self
        return self.model_copy(update={"groups": self.groups / degree, self.grows: getattr(self, self.grows) * degree})

    def between(self, other: "Product", place: float) -> "Product":
        """Interpolate sizes at ``place`` on the line that is this product at 1 and ``other`` at 2."""
        sizes: dict[str, float] = {
            dim: getattr(self, dim) + (place - 1) * (getattr(other, dim) - getattr(self, dim)) for dim in DIMS
        }
        return self.model_copy(update=sizes)


class AttentionCall(FilePart):
    """Fused attention with ``heads`` query heads per sample, ``count`` such calls.

    ``head_dim`` is the mean of the head dims of queries and values. ``masked``: the kernel reads a mask, for a sliding
    window or packed samples, and also computes the masked scores.
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
        """FLOP that the kernel executes: half of the square if causal; backward 2.5 times forward."""
        whole = 4 * self.count * self.heads * self.head_dim * self.queries * self.keys * samples
        return whole * (0.5 if self.is_causal else 1.0) * (2.5 if self.backward else 1.0)
