r"""The optimizer: the update rule of a step, and the state that it keeps between steps.

| name       | kept, B a parameter      | moved, B | what                                                             |
|------------|--------------------------|----------|------------------------------------------------------------------|
| adamw      | 8                        | 28       | two moments in fp32                                              |
| adamw-8bit | $2 (1 + 4 / 256)$        | 16       | in 8 bits, each block of 256 with a scale; torchao's             |
| adamw-4bit | $2 (1/2 + 4 / 128)$      | 14       | in 4 bits, each block of 128 with a scale; torchao's             |
| sgd        | 0                        | 12       | the gradient alone, no momentum                                  |
| adafactor  | of $m \times n$: $4 (m + n)$ | 20   | a row and a column in the place of the second moment; torch's    |
| muon       | 4 of hidden matrices, else 8 | 54, else 28 | one momentum, made orthogonal; torch's; AdamW for all else |

A step reads and writes the fp32 parameter, reads its gradient (12 bytes), and reads and writes the kept state.
Adafactor reads the gradient twice more: for its row and column, and for the size of the update.

Moments of tensors with fewer than 4,096 entries on a rank stay in fp32, as in torchao. Every other moment has a table
of 256 or 16 values. If blocks do not divide its entries, smaller ones are used, down to 64 entries; if none divides, it
stays in fp32. `torch.optim.Adafactor` computes means over rows and columns and norms of whole tensors, so no rank may
hold a part of a tensor; its ``--lr`` bounds the step relative to the size of the parameter.

Muon updates the hidden matrices: two-dimensional weights in blocks that multiply tokens. AdamW updates everything else:
embeddings (also those in blocks), head, norms, biases, convolutions, routers and routed experts. Muon's step is scaled
by $0.2 \sqrt{\max(m, n)}$ (``match_rms_adamw``), so that ``--lr`` and ``--weight-decay`` are those of AdamW. A step of
a matrix of $m \times n$, $m \le n$, is five Newton-Schulz iterations of three products in bf16 ($X X^T$, $A A$, $B X$):

$$5 (2 m^2 n + 2 m^3 + 2 m^2 n) = 20 m^2 n + 10 m^3 \text{ FLOP}$$

with $8 m n + 4 m^2$ bytes at a time: the update in fp32, $X$ and the new one in bf16, $A$ and $B$. Each matrix is made
orthogonal on one of the ranks of dp, or of fsdp if it is sharded, which sends it to the others; nothing overlaps with
that. A part of a matrix has other singular vectors than the whole, so that under fsdp, where each rank has a part of
the momentum, updates are gathered in bf16 first. tp and ep are refused. Advice does not try muon: 8-bit moments save
more, also if sharded, and its time depends on shapes of matrices, which packaged traces leave out, so that the model is
traced.

A plan counts additional bytes per layer as `LAYER_BYTES`: ten tensors in fp32 that are just too small, or the rows and
columns of matrices with sides of 256 or more, which are 8 / 256 bytes per parameter on top.

Sources: Dettmers et al. 2022 (8-bit); Li et al. 2023 (4-bit); Shazeer and Stern 2018 (Adafactor); torchao 0.18
`torchao.optim`; Jordan et al. 2024 (Muon); Liu et al. 2025 (its scale); torch 2.13 `torch.optim`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.levers.lever import Asked, Divided, Effects, MatrixUpdate, Objection, Result, WordLever
from steelyard.model.chain import LayerRole

BLOCK = {"adamw-8bit": 256, "adamw-4bit": 128}
"""Number of entries that share a scale."""
LAYER_BYTES = {"adamw-8bit": 2**18, "adamw-4bit": 2**18, "adafactor": 2**19}
"""Upper bound of additional bytes per layer: an allowance, because a plan does not know the shapes of its tensors."""
_KEPT = {
    "adamw": 8.0,
    "adamw-8bit": 2 * (1 + 4 / BLOCK["adamw-8bit"]),
    "adamw-4bit": 2 * (1 / 2 + 4 / BLOCK["adamw-4bit"]),
    "sgd": 0.0,
    "adafactor": 8 / 256,
    "muon": 8.0,
}
_STEP_BYTES = 12
"""Bytes moved for a parameter and its gradient."""
_MUON = MatrixUpdate(
    state_bytes=4, update_bytes=54, flop=(20, 10), product_bytes=(50, 60), buffer_bytes=(8, 4), gathered_bytes=2
)
_WHOLE = {
    "adafactor": "adafactor averages over whole rows and columns of a matrix",
    "muon": "muon orthogonalizes whole matrices",
}
"""Reason why the optimizer needs whole matrices."""


@dataclass(frozen=True, slots=True)
class Optimizer(WordLever):
    """The optimizer, by name."""

    word: str = "adamw"

    name: ClassVar[str] = "optimizer"
    values: ClassVar[tuple[str, ...]] = tuple(_KEPT)
    offers: ClassVar[tuple[str, ...]] = ("adamw-8bit", "adamw-4bit", "adafactor")
    help: ClassVar[str] = "Optimizer: adamw (fp32 moments), adamw-8bit, adamw-4bit, adafactor, muon or sgd."
    result: ClassVar[Result] = "other updates"

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to muon if blocks are trained in part or not at all, and on a GPU without bf16."""
        if self.word != "muon":
            return
        freeze, types = asked.chain.freeze, enumerate(asked.chain.layers)
        blocks = [layer for layer, of in types if asked.chain.layer_types[of].role is LayerRole.BLOCK]
        if freeze is not None and all(map(freeze.is_whole, blocks)):
            blocks_to_train = "trained blocks, whose matrices muon orthogonalizes"
            yield "with every block frozen", blocks_to_train, "leave --optimizer out, or freeze fewer layers"
        if asked.chain.has_adapters or (freeze is not None and any(part.paths for part in freeze.parts)):
            part = f"with some layers of {asked.chain.name} trained in part"
            yield part, "layers that are fully trained or fully frozen", "leave --optimizer out, or freeze whole layers"
        for device in asked.devices:
            if not device.needs_profile and "bf16" not in device.peak_flop_per_s:
                on = f"on {device.name!r}, which has no matrix units for bf16"
                other = "write --optimizer adamw-8bit, or leave it out"
                yield on, "a device that multiplies matrices in bf16", other

    def refusal(self, strategy: Divided) -> str | None:
        """Refuse divided matrices for adafactor and muon; muon allows fsdp, because it gathers the shards."""
        if self.word in _WHOLE and max(strategy.tensor_degree, strategy.expert_degree) > 1:
            return f"{_WHOLE[self.word]}: no tp, no ep"
        return f"{_WHOLE[self.word]}: no fsdp" if self.word == "adafactor" and strategy.state_shards > 1 else None

    def effects(self, effects: Effects) -> Effects:
        """Return the effects with the optimizer's kept and moved bytes."""
        kept = _KEPT[self.word]
        moved = _STEP_BYTES + (8 if self.word == "adafactor" else 2 * kept)
        return replace(
            effects,
            optimizer=self.word,
            state_bytes=kept,
            layer_state_bytes=effects.layer_state_bytes + LAYER_BYTES.get(self.word, 0),
            update_bytes=moved,
            matrices=_MUON if self.word == "muon" else None,
        )
