"""Blocks compiled by `torch.compile`, each as one function; identical ones are compiled once.

A compiled block saves less for its backward pass than autograd does, because PyTorch's partitioner recomputes
elementwise operations there. It also launches fewer kernels, which read and write fewer bytes, because operations
between matrix products, attention and collectives are fused. A trace includes both effects
(`steelyard.modules.levers.compiled_blocks`).

Embedding, head and optimizer are not compiled. Compilation takes seconds to a minute before the first step, which no
price includes.

Source: Ansel et al. 2024 (PyTorch 2), sections 4 and 5.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from steelyard.errors import UserError
from steelyard.hardware import DeviceType
from steelyard.levers.lever import Asked, Divided, Objection, Result, WordLever
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.small import without_dropout

OFF = "off"
_COMPILERS = ("g++", "clang++")
_DROPS = "torch.compile does not trace dropout in blocks that tp divides"


@dataclass(frozen=True, slots=True)
class CompiledBlocks(WordLever):
    """Parts of a model that are compiled."""

    word: str = OFF

    name: ClassVar[str] = "compile"
    values: ClassVar[tuple[str, ...]] = (OFF, "blocks")
    offers: ClassVar[tuple[str, ...]] = ("blocks",)
    help: ClassVar[str] = "torch.compile: off, or blocks (each Transformer block separately)."
    result: ClassVar[Result] = "rounding"
    takes_long: ClassVar[bool] = True

    def objections(self, asked: Asked) -> Iterator[Objection]:
        """Object to a module of the user's own, and to quantized weights."""
        if asked.chain.split.module:
            own = f"for {asked.chain.name}, your own module"
            yield own, "a transformers model", "leave --compile out"
        if "base" in asked.levers:
            whole = "unquantized weights, because dequantization kernels are not compiled"
            yield "together with --base", whole, "leave --compile or --base out"

    def check_host(self, device_type: DeviceType) -> None:
        """Raise `UserError` if this host has no compiler for the code that torch.compile generates."""
        if device_type == "cpu":
            own = os.environ.get("CXX")
            is_there, needed = any(map(shutil.which, [own] if own else _COMPILERS)), "a C++ compiler (g++ or clang++)"
        else:
            is_there, needed = importlib.util.find_spec("triton") is not None, "the package triton"
        if not is_there:
            raise UserError(
                field="--compile",
                found=f"no compiler on this host for torch.compile on a {device_type.upper()}",
                expected=needed,
                hint="install it, or plan without --compile",
            )

    def refusal(self, strategy: Divided) -> str | None:
        """Refuse cp and ep: attention to other ranks and exchanges between experts have untraced sizes."""
        if strategy.token_degree > 1:
            return f"no cp with --{self.name} {self}: attention over the tokens of other ranks is not compiled"
        if strategy.expert_degree > 1:
            return f"no ep with --{self.name} {self}: the all-to-all of tokens is not compiled"
        return None

    def weight_pass_refusal(self) -> str:
        """Refuse weight passes: the backward pass of a compiled block is one function."""
        return f"--{self.name} {self}: the backward pass of a compiled block is one function and cannot be split"

    def change(self, chain: ModelChain) -> ModelChain:
        """Return the model with compiled blocks, which tp cannot divide if they drop entries at random."""
        drops = without_dropout(chain.config) != chain.config
        drops |= any(each.without_chance != each for each in chain.changes)
        layer_types = tuple(
            replace(each, no_tp=each.no_tp or _DROPS) if drops and each.role is LayerRole.BLOCK else each
            for each in chain.layer_types
        )
        return replace(chain, layer_types=layer_types, changes=(*chain.changes, self))
