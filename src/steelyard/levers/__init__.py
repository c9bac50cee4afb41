"""The levers, one file each.

To add one: its file here, where it is run its twin in `steelyard.modules.levers`, and a line below.
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
"""By name, in the order in which they are written. A test may add one of its own."""


@dataclass(frozen=True)
class Levers:
    """The levers of a job, at most one value of each; those that change nothing are left out."""

    chosen: tuple[Lever, ...] = ()

    @classmethod
    def of(cls, texts: Mapping[str, str | None]) -> "Levers":
        """Those that these texts say, by the names of the levers; raises `UserError` for one that says none."""
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
        """What a plan file says of them."""
        return {lever.name: str(lever) for lever in self.chosen}

    def value(self, lever: type[Value]) -> Value:
        """The value of a lever: the default one where none was chosen."""
        return next((each for each in self.chosen if isinstance(each, lever)), lever())

    @cached_property
    def effects(self) -> Effects:
        """What training keeps and moves beside the work of layers."""
        return reduce(lambda found, lever: lever.effects(found), self.chosen, Effects())

    def change(self, chain: ModelChain) -> ModelChain:
        """What they make of a model."""
        return reduce(lambda found, lever: lever.change(found), self.chosen, chain)

    def check(self, asked: Asked) -> None:
        """Raises `UserError` for the first that cannot be had for this."""
        for lever in self.chosen:
            lever.check(asked)

    def check_host(self, device_type: DeviceType) -> None:
        """Raises `UserError` for the first that this host cannot run on its devices of this type."""
        for lever in self.chosen:
            lever.check_host(device_type)

    def refusal(self, strategy: Divided) -> str | None:
        """Why no layer may be trained so, None where it may."""
        return next((reason for lever in self.chosen if (reason := lever.refusal(strategy))), None)

    def weight_pass_refusal(self) -> str | None:
        """Why gradients of weights have no passes of their own, None where they may."""
        return next((reason for lever in self.chosen if (reason := lever.weight_pass_refusal())), None)


NO_LEVERS = Levers()

__all__ = ["LEVERS", "NO_LEVERS", "Asked", "Effects", "Lever", "Levers"]
