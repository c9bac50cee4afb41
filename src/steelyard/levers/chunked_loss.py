"""The loss in chunks of tokens: the logits of a sample are never whole.

The head computes logits and loss of one chunk after another, and repeats this in the backward pass (activation
checkpointing), so that only one chunk of the logits [tokens, vocabulary] exists at a time, in the types and copies that
the loss needs. This costs one additional matrix product of the head.

The lever applies to next-token prediction. Under sequence parallelism with tp the head's ranks hold parts of the
sequence, and the loss stays whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from steelyard.errors import UserError
from steelyard.levers.lever import Asked, Lever, Objection
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task

_USUAL = 8
_MOST = 1024


@dataclass(frozen=True, slots=True)
class ChunkedLoss(Lever):
    """Number of chunks in which the loss of a sample is computed."""

    chunks: int = 1

    name: ClassVar[str] = "loss"
    offers: ClassVar[tuple[str, ...]] = ("chunked",)
    help: ClassVar[str] = (
        f"Computation of the loss: whole, or chunked (chunked:{_USUAL}), which never holds all logits."
    )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the number of chunks. Raise `UserError` for an invalid text."""
        kind, _, count = text.partition(":")
        if text == "whole":
            return cls()
        if kind != "chunked" or (count and not (count.isdigit() and 2 <= int(count) <= _MOST)) or text.endswith(":"):
            raise UserError(
                field="--loss",
                found=repr(text),
                expected=f"whole, chunked, or chunked:N with N chunks, 2 to {_MOST}",
                hint=f"write for example chunked:{_USUAL}",
            )
        return cls(int(count or _USUAL))

    def __str__(self) -> str:
        return "whole" if self.is_default else f"chunked:{self.chunks}"

    @property
    def is_default(self) -> bool:
        """Whether the loss is computed whole."""
        return self.chunks == 1

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to a model whose task is not next-token prediction."""
        if asked.chain.family.task is not Task.CAUSAL_LM:
            yield f"for {asked.chain.name}", "a model that predicts the next token", "leave it out"

    def change(self, chain: ModelChain) -> ModelChain:
        """Return the model with the chunked loss in its head."""
        return replace(chain, changes=(*chain.changes, self))
