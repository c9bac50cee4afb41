r"""The optimizer: how a step makes new parameters of gradients, and what it keeps of them from step to step.

| name       | kept, B a parameter      | moved, B | what                                                             |
|------------|--------------------------|----------|------------------------------------------------------------------|
| adamw      | 8                        | 28       | two moments in fp32                                              |
| adamw-8bit | $2 (1 + 4 / 256)$        | 16       | in 8 bits, each block of 256 with a scale; torchao's             |
| adamw-4bit | $2 (1/2 + 4 / 128)$      | 14       | in 4 bits, each block of 128 with a scale; torchao's             |
| sgd        | 0                        | 12       | the gradient alone, no momentum                                  |
| adafactor  | of $m \times n$: $4 (m + n)$ | 20   | a row and a column in the place of the second moment; torch's    |

A step reads and writes the fp32 parameter, reads its gradient (12 bytes), and reads and writes what is kept. Adafactor
also reads the gradient twice more: for its row and column, and for the size of the update.

Moments of tensors with fewer than 4,096 entries on a rank stay in fp32, as in torchao. Every other moment has a table
of 256 or 16 values. Where blocks do not divide its entries, smaller ones do, down to 64 entries; else it stays in fp32.
`torch.optim.Adafactor` takes means over rows and columns and norms of whole tensors, so that no rank may hold a part of
one; its ``--lr`` bounds the step relative to the size of the parameter.

A plan counts what a layer keeps besides as `LAYER_BYTES`, which is of ten tensors in fp32 that are just too small, or
of the rows and columns of matrices with sides of 256 or more: 8 / 256 bytes a parameter on top.

Sources: Dettmers et al. 2022 (8-bit); Li et al. 2023 (4-bit); Shazeer and Stern 2018 (Adafactor); torchao 0.18
`torchao.optim`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from steelyard.errors import UserError, nearest
from steelyard.levers.lever import Divided, Effects, Lever, Result

BLOCK = {"adamw-8bit": 256, "adamw-4bit": 128}
"""Entries that share a scale."""
LAYER_BYTES = {"adamw-8bit": 2**18, "adamw-4bit": 2**18, "adafactor": 2**19}
"""What is kept of a layer besides, at most: an allowance, since a plan does not know the shapes of its tensors."""
_KEPT = {
    "adamw": 8.0,
    "adamw-8bit": 2 * (1 + 4 / BLOCK["adamw-8bit"]),
    "adamw-4bit": 2 * (1 / 2 + 4 / BLOCK["adamw-4bit"]),
    "sgd": 0.0,
    "adafactor": 8 / 256,
}
_STEP_BYTES = 12
"""Of the parameter and its gradient."""


@dataclass(frozen=True, slots=True)
class Optimizer(Lever):
    """The optimizer of a name."""

    word: str = "adamw"

    name: ClassVar[str] = "optimizer"
    values: ClassVar[tuple[str, ...]] = tuple(_KEPT)
    offers: ClassVar[tuple[str, ...]] = ("adamw-8bit", "adamw-4bit", "adafactor")
    help: ClassVar[str] = "What updates parameters: adamw (fp32 moments), adamw-8bit, adamw-4bit, adafactor or sgd."
    result: ClassVar[Result] = "other updates"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The optimizer of this name; raises `UserError` for an unknown one."""
        if text not in _KEPT:
            raise UserError(
                field="--optimizer",
                found=repr(text),
                expected="one of " + ", ".join(_KEPT),
                hint=nearest(text, _KEPT),
            )
        return cls(text)

    def __str__(self) -> str:
        return self.word

    @property
    def is_default(self) -> bool:
        """Whether it is AdamW in fp32."""
        return self.word == "adamw"

    def refusal(self, strategy: Divided) -> str | None:
        """Adafactor needs whole matrices."""
        if self.word == "adafactor" and max(strategy.state_shards, strategy.tensor_degree, strategy.expert_degree) > 1:
            return "adafactor takes means over whole rows and columns of a matrix: no fsdp, no tp, no ep"
        return None

    def effects(self, effects: Effects) -> Effects:
        """What it keeps and moves."""
        kept = _KEPT[self.word]
        moved = _STEP_BYTES + (8 if self.word == "adafactor" else 2 * kept)
        return replace(
            effects,
            state_bytes=kept,
            layer_state_bytes=effects.layer_state_bytes + LAYER_BYTES.get(self.word, 0),
            update_bytes=moved,
        )
