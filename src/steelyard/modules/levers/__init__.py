"""The twins of the levers that change a model, each of one lever of `steelyard.levers`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.modules.levers import train

CHANGES = {"train": train}
"""By the name of the lever."""


def change_model(model: PreTrainedModel, chain: ModelChain) -> None:
    """Makes of a model what the levers of a chain make of it, in place; twice does no harm."""
    for change in chain.changes:
        CHANGES[change.name].change_model(change, model)


def is_added(name: str) -> bool:
    """Whether a parameter of this name is not of the unmodified model."""
    return any(each.is_added(name) for each in CHANGES.values())


def own_name(name: str) -> str:
    """The name of a parameter in the unmodified model."""
    for each in CHANGES.values():
        name = each.own_name(name)
    return name


def fill_added(module: nn.Module, chain: ModelChain, *, seed: int, layer: int, is_new: bool) -> None:
    """Gives what levers added to a module of a layer first weights: all where it ``is_new``, else what has none."""
    for change in chain.changes:
        CHANGES[change.name].fill_added(module, seed=seed, layer=layer, is_new=is_new)


def added_beside(name: str) -> tuple[str, ...]:
    """The names of what levers may have added beside a parameter of the unmodified model."""
    return tuple(beside for each in CHANGES.values() for beside in each.added_beside(name))


def with_added(weight: Tensor, beside: Mapping[str, Tensor], chain: ModelChain) -> Tensor:
    """A parameter of the unmodified model with what is ``beside`` it in it."""
    for change in chain.changes:
        weight = CHANGES[change.name].with_added(change, weight, beside)
    return weight


def write_added(folder: Path, files: Sequence[Path], model: PreTrainedModel, chain: ModelChain) -> None:
    """Makes of the files of what levers have added to an unmodified model those that other software reads."""
    for change in chain.changes:
        CHANGES[change.name].write_added(change, folder, files, model, chain.name)
