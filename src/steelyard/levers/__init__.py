"""The levers, one file each.

To add one, write its file here and, if the runtime supports it, its implementation in `steelyard.modules.levers`, and
add a line below.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TypeVar

from steelyard.errors import UserError, nearest
from steelyard.hardware import DeviceType
from steelyard.levers.chunked_loss import ChunkedLoss
from steelyard.levers.compiled_blocks import CompiledBlocks
from steelyard.levers.float8 import Float8
from steelyard.levers.lever import Asked, Divided, Effects, Lever
from steelyard.levers.offload import Offload
from steelyard.levers.optimizer import Optimizer
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.levers.train import Train
from steelyard.levers.weights import Weights
from steelyard.model.chain import ModelChain

Value = TypeVar("Value", bound=Lever)

LEVERS: dict[str, type[Lever]] = {
    lever.name: lever
    for lever in (Train, QuantizedBase, Optimizer, Weights, Offload, ChunkedLoss, Float8, CompiledBlocks)
}
"""Levers by name, in the order in which they are written. A test may add one."""


@dataclass(frozen=True)
class Levers:
    """Levers of a job, at most one value of each; those that change nothing are left out."""

    chosen: tuple[Lever, ...] = ()

    @classmethod
    def of(cls, texts: Mapping[str, str | None]) -> "Levers":
        """Parse texts keyed by lever name. Raise `UserError` for an unknown name or an invalid text."""
        for name in texts:
            if name not in LEVERS:
                raise UserError(
                    field=f"levers.{name}",
                    found=name,
                    expected="one of " + ", ".join(LEVERS),
                    hint=nearest(name, LEVERS),
                )
        said: dict[str, str] = {}
        for name, text in texts.items():
            every = LEVERS[name].said(text) if text is not None else {}
            said |= {each: own for each, own in every.items() if each == name or texts.get(each) is None}
        found = (LEVERS[name].parse(said[name]) for name in LEVERS if name in said)
        return cls(tuple(lever for lever in found if not lever.is_default))

    def __iter__(self) -> Iterator[Lever]:
        return iter(self.chosen)

    def __bool__(self) -> bool:
        return bool(self.chosen)

    def __str__(self) -> str:
        return ", ".join(f"{lever.name} {lever}" for lever in self.chosen)

    @property
    def texts(self) -> dict[str, str]:
        """Text of each chosen lever, as in a plan file."""
        return {lever.name: str(lever) for lever in self.chosen}

    def value(self, lever: type[Value]) -> Value:
        """Return the value of a lever, by default its default value."""
        return next((each for each in self.chosen if isinstance(each, lever)), lever())

    @cached_property
    def effects(self) -> Effects:
        """Memory and traffic of training outside the work of layers."""
        return reduce(lambda found, lever: lever.effects(found), self.chosen, Effects())

    def change(self, chain: ModelChain) -> ModelChain:
        """Return the model as changed by the levers."""
        return reduce(lambda found, lever: lever.change(found), self.chosen, chain)

    def check(self, asked: Asked) -> None:
        """Raise `UserError` for the first lever that is not possible in this context."""
        for lever in self.chosen:
            lever.check(asked)

    def check_host(self, device_type: DeviceType) -> None:
        """Raise `UserError` for the first lever that this host cannot run on its devices of this type."""
        for lever in self.chosen:
            lever.check_host(device_type)

    def refusal(self, strategy: Divided) -> str | None:
        """Return why no layer can be trained with these levers under a strategy; None if they can."""
        return next((reason for lever in self.chosen if (reason := lever.refusal(strategy))), None)

    def weight_pass_refusal(self) -> str | None:
        """Return why weight passes are not possible with these levers; None if they are."""
        return next((reason for lever in self.chosen if (reason := lever.weight_pass_refusal())), None)


NO_LEVERS = Levers()

__all__ = ["LEVERS", "NO_LEVERS", "Asked", "Effects", "Lever", "Levers"]
