"""Samples of a batch as a rank reads them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Some samples: what enters the first layer and what the last one compares with, the sample first in both."""

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, read: "Tensor | Samples") -> "Samples":
        """Samples as they are, or those of next-token prediction in token ids [N, S + 1]."""
        return cls(inputs=read[:, :-1], labels=read[:, 1:]) if isinstance(read, Tensor) else read
