r"""Linear layers of blocks that multiply in 8 bits, by torchao: operands are cast before each product, with scales.

| word       | a scale for                    | products     | source                              |
|------------|--------------------------------|--------------|-------------------------------------|
| tensorwise | each tensor                    | e4m3, e5m2   | Micikevicius et al. 2022            |
| rowwise    | each row, a power of two       | e4m3         | torchao's recipe of this name       |

All three products of a layer (output, gradients of input and weight) take operands in 8 bits and return the precision
that computes, in which parameters, gradients and what is saved stay. Scales are those of the moment, so that each
operand is read for its largest entry and again for its cast. A trace counts both, one by one or as ``--compile blocks``
fuses them: without it casts usually cost more than the products gain. Of the products themselves the FLOP are counted
apart, at the device's rate of fp8.

Layers whose part on a rank has a dim that 16 does not divide stay as they are, as do embedding, head, routers and
experts, which have no linear layers. fsdp gathers weights in the precision that computes, tp activations.

A CPU computes the same numbers (`torch._scaled_mm`), slowly.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.errors import UserError
from steelyard.levers.lever import Asked, Divided, Effects, Lever, LowPrecision, Result, WordLever
from steelyard.model.chain import ModelChain

NONE = "none"
MXFP8 = "mxfp8"
_PRODUCTS = {
    "tensorwise": LowPrecision(peak="fp8", share=0.93, forward=((5, 2), (5, 2)), backward=((5, 2), (5, 2), (6, 2))),
    "rowwise": LowPrecision(peak="fp8", share=0.93, forward=((1, 0), (3, 1)), backward=((5, 2), (9, 3), (6, 2))),
    MXFP8: LowPrecision(peak="mxfp8", share=0.93, forward=((3, 1), (3, 1)), backward=((3, 1), (3, 1), (6, 2))),
}


@dataclass(frozen=True, slots=True)
class Float8(WordLever):
    """The scales of operands in 8 bits."""

    word: str = NONE

    name: ClassVar[str] = "float8"
    values: ClassVar[tuple[str, ...]] = (NONE, *_PRODUCTS)
    offers: ClassVar[tuple[str, ...]] = ("tensorwise", "rowwise")
    help: ClassVar[str] = (
        "What linear layers of blocks multiply in 8 bits: none, tensorwise or rowwise (a scale for a tensor or a row)."
    )
    result: ClassVar[Result] = "rounding"

    def check(self, asked: Asked) -> None:
        """Raises `UserError` for adapters, for a module of the user's own, and for a device without fp8."""
        Lever.check(self, asked)
        if asked.chain.has_adapters or "train" in asked.levers:
            raise UserError(
                field="--float8",
                found=f"{self} beside adapters",
                expected="linear layers that are trained themselves",
                hint="leave --float8 or --train out",
            )
        if asked.chain.split.module:
            raise UserError(
                field="--float8",
                found=f"{self} for {asked.chain.name}, a module of your own",
                expected="a model of transformers",
                hint="convert the module by torchao.float8.convert_to_float8_training before, or leave --float8 out",
            )
        for device in asked.devices:
            peak = _PRODUCTS[self.word].peak
            if device.is_gpu and peak not in device.peak_flop_per_s:
                raise UserError(
                    field="--float8",
                    found=f"{self} on {device.name!r}, which has no known rate in {peak}",
                    expected=f"a device that multiplies in {peak}, or whose cluster file says its rate",
                    hint=f"leave --float8 out, or add {peak} to peak_TFLOPs of the device in the cluster file",
                )

    def refusal(self, strategy: Divided) -> str | None:
        """Layers of which ranks divide experts are not traced with it."""
        if strategy.expert_degree > 1:
            return f"no ep with --{self.name} {self}: layers of divided experts are not converted"
        return None

    def change(self, chain: ModelChain) -> ModelChain:
        """The model whose blocks multiply so; what is not traced is priced in closed form alone."""
        return chain if self.word == MXFP8 else replace(chain, changes=(*chain.changes, self))

    def effects(self, effects: Effects) -> Effects:
        """The rate of its products."""
        return replace(effects, low_precision=_PRODUCTS[self.word])
