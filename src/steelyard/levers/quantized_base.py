r"""Quantized frozen base of adapters (QLoRA).

| name | B a parameter          | what                                                                    |
|------|------------------------|-------------------------------------------------------------------------|
| nf4  | $1/2 + 1/64 + 4/16384$ | 4 bits, quantiles of a normal distribution, with a scale for each 64 in |
|      |                        | 8 bits, and 256 of these with one in fp32                               |
| int8 | $1 + 4/256$            | 8 bits, each block of 256 with a scale in fp32                          |

All linear layers except the head are quantized, with ``+experts`` also the stacked matrices of routed experts. Each is
dequantized to compute precision for its forward or backward pass, and freed after it. The weights are those of
bitsandbytes. They are not trained, every rank has all of them (fsdp shards only the other parameters), and a layer with
quantized weights is not divided by tp.

``--train qlora:…`` means adapters and nf4. Magnitudes of DoRA are norms of weights dequantized to bf16, as in peft.

Source: Dettmers et al. 2023 (QLoRA), bitsandbytes 0.50.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.levers.lever import Asked, Divided, Effects, Objection, Result, WordLever
from steelyard.model.chain import ModelChain

FULL = "full"
_EXPERTS = "+experts"


@dataclass(frozen=True, slots=True)
class QuantizedBase(WordLever):
    """Type of the frozen weights of linear layers."""

    word: str = FULL

    name: ClassVar[str] = "base"
    values: ClassVar[tuple[str, ...]] = (FULL, "nf4", "int8", f"nf4{_EXPERTS}", f"int8{_EXPERTS}")
    help: ClassVar[str] = (
        "Storage of the frozen base of adapters: full (compute precision), nf4, int8; nf4+experts and int8+experts "
        "also quantize routed experts."
    )
    result: ClassVar[Result] = "rounding"
    offered_with: ClassVar[Mapping[str, str]] = {"train": "lora:r=16"}

    @property
    def bits(self) -> str:
        """Type of quantized weights."""
        return self.word.removesuffix(_EXPERTS)

    @property
    def has_experts(self) -> bool:
        """Whether routed experts are quantized too."""
        return self.word.endswith(_EXPERTS)

    @classmethod
    def offered_for(cls, chain: ModelChain) -> tuple[str, ...]:
        """Return 4 bits for adapters that the model has, and quantized experts; ``--train qlora`` offers the rest."""
        return (*(["nf4"] if chain.has_adapters else []), *([f"nf4{_EXPERTS}"] if chain.has_experts else []))

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to a base that is trained itself."""
        if "train" not in asked.levers:
            found = f"with all of {asked.chain.name} trained"
            adapters = "adapters, with a frozen base"
            yield found, adapters, "add --train lora:r=16, or leave --base out"
        if self.has_experts and not asked.chain.has_experts:
            yield f"for {asked.chain.name}, which has no routed experts", "nf4 or int8", f"use --base {self.bits}"

    def refusal(self, strategy: Divided) -> str | None:
        """Refuse ep with quantized experts, which every rank has whole."""
        if self.has_experts and strategy.expert_degree > 1:
            return f"no ep with --{self.name} {self}: quantized experts are not divided"
        return None

    def effects(self, effects: Effects) -> Effects:
        """Return the effects without adapters: there is no closed form for quantized weights."""
        return replace(effects, adapters=None)

    def change(self, chain: ModelChain) -> ModelChain:
        """Return the model with quantized linear layers."""
        reason = "quantized weights are not divided"
        layer_types = tuple(replace(each, no_tp=each.no_tp or reason) for each in chain.layer_types)
        return replace(chain, changes=(*chain.changes, self), layer_types=layer_types)

    def warning(self, chain: ModelChain) -> str:
        """Return a warning if the model has routed experts that are not quantized."""
        if chain.has_experts and not self.has_experts:
            return f"routed experts are not in {self}: --base {self}{_EXPERTS} also quantizes these"
        return ""
