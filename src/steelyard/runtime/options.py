"""Options of a training run, as values, as arguments of `python -m steelyard.train`, and back."""

import argparse
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from steelyard.errors import UserError


def _option(default: Any, help_text: str, kind: type = float, *, least: float | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "kind": kind, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a plan is trained; what the plan decides (batch, precision, schedule) is not here.

    Raises `UserError` naming the option that is out of range.
    """

    steps: int = _option(100, "training steps", int, least=1)
    lr: float = _option(3e-4, "peak learning rate", least=0)
    warmup_steps: int = _option(10, "steps over which the learning rate rises from zero", int, least=0)
    weight_decay: float = _option(0.1, "weight decay of AdamW", least=0)
    max_grad_norm: float = _option(1.0, "gradients are scaled down to this global norm", least=0)
    seed: int = _option(0, "seed of the first weights and of the sample order", int, least=0)
    max_data_bytes: int = _option(64 * 2**20, "text read from --data at most, in bytes", int, least=1)
    timeout_s: float = _option(600.0, "seconds after which a process that waits for the others gives up", least=1)
    metrics: Path | None = _option(None, "file for one JSON line per step", Path)  # noqa: RUF009
    record: Path | None = _option(None, "file for the run record", Path)  # noqa: RUF009

    def __post_init__(self) -> None:
        for option in fields(self):
            least, value = option.metadata["least"], getattr(self, option.name)
            if least is not None and not value >= least:
                raise UserError(
                    field=flag(option), found=str(value), expected=f"{least} or more", hint="correct the option"
                )

    def arguments(self) -> list[str]:
        """The command-line arguments that `options_from` reads back to equal options."""
        given = ((flag(option), getattr(self, option.name)) for option in fields(self))
        return [part for name, value in given if value is not None for part in (name, str(value))]

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Self:
        """The options in the result of a parser that `add_train_options` prepared."""
        return cls(**{option.name: getattr(namespace, option.name) for option in fields(cls)})


def flag(option: Field[Any]) -> str:
    """The name of an option on the command line."""
    return "--" + option.name.replace("_", "-")


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Adds every field of `TrainOptions` to a parser."""
    for option in fields(TrainOptions):
        default = "" if option.default is None else f" (default {option.default})"
        parser.add_argument(
            flag(option),
            type=option.metadata["kind"],
            default=option.default,
            help=option.metadata["help"] + default,
            metavar=option.metadata["kind"].__name__.upper(),
        )


def options_from(arguments: Sequence[str]) -> TrainOptions:
    """The options that command-line arguments give."""
    parser = argparse.ArgumentParser()
    add_train_options(parser)
    return TrainOptions.from_namespace(parser.parse_args(arguments))
