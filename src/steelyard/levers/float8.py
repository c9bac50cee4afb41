r"""8-bit matrix products in linear layers of blocks, by torchao: operands are cast before each product, with scales.

| word       | a scale for           | products   | recipe                                          |
|------------|-----------------------|------------|-------------------------------------------------|
| tensorwise | each tensor           | e4m3, e5m2 | torchao.float8, Micikevicius et al. 2022        |
| rowwise    | each row              | e4m3       | torchao.float8, scales are powers of two        |
| mxfp8      | 32 entries of a row   | e4m3       | OCP Microscaling formats (MX) 1.0, on Blackwell |

All three products of a layer (output, gradients of input and weight) have 8-bit operands and results in compute
precision. Parameters, gradients and saved tensors stay in compute precision. Scales are dynamic: an operand is read for
its largest entry and again for its cast. A trace counts both, one by one or as fused by ``--compile blocks``; unfused,
casts cost more than the products gain. FLOP of 8-bit products are counted separately, and priced at the fraction of the
fp8 peak that other products reach of the bf16 peak. In four layers of torchao's pull request 2185 on an H100 the
speed-up was 1.1 to 1.7 with casts, which means 1.8 to 2.3 for the products.

Layers are not converted if a dimension of their part on a rank is not divisible by 16; embedding, head, routers and
experts never are. fsdp and tp gather in compute precision; under tp each rank has scales of its own part.
torchtitan gathers hidden states for sp in 8 bits if a tensor has one scale, as closed forms do.

A CPU computes the same numbers (`torch._scaled_mm`), slowly. MXFP8 is priced in closed form, for an engine that has it.

Not modelled: 8-bit gathers of fsdp; slower kernels for reductions over columns and writes of columns (0.6 to 0.7 TB/s
on an H100 where rows reach 2.0 to 2.2: pytorch issue 149982, torch 2.8), which scales of rows need in a backward pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.levers.compiled_blocks import CompiledBlocks
from steelyard.levers.lever import Asked, Divided, Effects, LowPrecision, Objection, Result, WordLever
from steelyard.model.chain import ModelChain

NONE = "none"
MXFP8 = "mxfp8"
_PRODUCTS: Mapping[str, LowPrecision] = {
    "tensorwise": LowPrecision(
        peak="fp8", forward=((5, 2), (5, 2)), backward=((8, 2), (5, 2), (6, 2)), before_gather=True
    ),
    "rowwise": LowPrecision(peak="fp8", forward=((1, 0), (3, 1)), backward=((8, 2), (9, 3), (6, 2))),
    MXFP8: LowPrecision(peak="mxfp8", forward=((3, 1), (3, 1)), backward=((3, 1), (3, 1), (6, 2))),
}


@dataclass(frozen=True, slots=True)
class Float8(WordLever):
    """Scales of 8-bit operands."""

    word: str = NONE

    name: ClassVar[str] = "float8"
    values: ClassVar[tuple[str, ...]] = (NONE, *_PRODUCTS)
    offers: ClassVar[tuple[str, ...]] = ("tensorwise", "rowwise")
    help: ClassVar[str] = (
        "8-bit matrix products of linear layers: none, tensorwise, rowwise (one scale per tensor or row), or mxfp8."
    )
    result: ClassVar[Result] = "rounding"
    takes_long: ClassVar[bool] = True
    offered_with: ClassVar[Mapping[str, str]] = {CompiledBlocks.name: "blocks"}
    tolerances: ClassVar[tuple[float, float]] = (1e-3, 0.25)
    precisions: ClassVar[tuple[str, ...]] = ("fp8", "mxfp8")

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to adapters, to a module of the user's own, and to a device without fp8."""
        if asked.chain.has_adapters or "train" in asked.levers:
            yield "together with adapters", "trained linear layers", "leave --float8 or --train out"
        if asked.chain.split.module:
            own = f"for {asked.chain.name}, your own module"
            before = "convert the module with torchao.float8.convert_to_float8_training first, or leave --float8 out"
            yield own, "a transformers model", before
        peak = _PRODUCTS[self.word].peak
        for device in asked.devices:
            if device.is_gpu and peak not in device.peak_flop_per_s:
                yield (
                    f"on {device.name!r}, whose {peak} rate is unknown",
                    f"a device with a known {peak} rate",
                    f"leave --float8 out, or add {peak} to peak_TFLOPs of the device in the cluster file",
                )

    def refusal(self, strategy: Divided) -> str | None:
        """Refuse ep: layers of divided experts are not traced with it."""
        if strategy.expert_degree > 1:
            return f"no ep with --{self.name} {self}: sharded experts are not converted"
        return None

    def change(self, chain: ModelChain) -> ModelChain:
        """Return the model with 8-bit products in its blocks; an untraced recipe is priced only in closed form."""
        return chain if self.word == MXFP8 else replace(chain, changes=(*chain.changes, self))

    def effects(self, effects: Effects) -> Effects:
        """Return the effects with 8-bit products."""
        return replace(effects, low_precision=_PRODUCTS[self.word])
