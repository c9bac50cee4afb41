"""The twins of the levers that change a model, each of one lever of `steelyard.levers`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from steelyard.levers.chunked_loss import ChunkedLoss
from steelyard.model.chain import ModelChain
from steelyard.modules.levers import compiled_blocks, quantized_base, train

CHANGES: dict[str, Any] = {"train": train, "base": quantized_base}
"""By the name of the lever, those that change a model."""
LAYER_CHANGES: dict[str, Any] = {"compile": compiled_blocks}
"""Those that change layers one by one."""


def change_model(model: PreTrainedModel, chain: ModelChain) -> None:
    """Makes of a model what the levers of a chain make of it, in place; twice does no harm."""
    for change in chain.changes:
        if change.name in CHANGES:
            CHANGES[change.name].change_model(change, model)


def change_layer(layer: nn.Module, chain: ModelChain) -> None:
    """Makes of a layer, divided and not yet sharded, what the levers of a chain make of it, in place."""
    for change in chain.changes:
        if change.name in LAYER_CHANGES:
            LAYER_CHANGES[change.name].change_layer(change, layer)


def loss_chunks(chain: ModelChain) -> int:
    """Chunks of a sample's tokens that the head computes one after another."""
    return next((change.chunks for change in chain.changes if isinstance(change, ChunkedLoss)), 1)


def is_added(name: str) -> bool:
    """Whether a parameter of this name is not of the unmodified model."""
    return train.is_added(name)


def own_name(name: str) -> str:
    """The name of a parameter in the unmodified model."""
    return train.own_name(name)


def num_quantized(model: nn.Module) -> int:
    """Weights of a model that levers keep in other tensors than parameters."""
    return sum(math.prod(each.shape) for each in model.modules() if isinstance(each, quantized_base.QuantizedLinear))


def begin_filling(module: nn.Module) -> None:
    """Prepares a module of a layer to get first weights as in the unmodified model, in place."""
    quantized_base.begin_filling(module)


def fill_added(module: nn.Module, chain: ModelChain, *, seed: int, layer: int, is_new: bool) -> None:
    """Gives what levers added to a module of a layer first weights: all where it ``is_new``, else what has none."""
    for change in (each for each in chain.changes if each.name in CHANGES):
        CHANGES[change.name].fill_added(change, module, seed=seed, layer=layer, is_new=is_new)


def added_beside(name: str) -> tuple[str, ...]:
    """The names of what levers may have added beside a parameter of the unmodified model."""
    return train.added_beside(name)


def with_added(weight: Tensor, beside: Mapping[str, Tensor], chain: ModelChain) -> Tensor:
    """A parameter of the unmodified model with what is ``beside`` it in it."""
    return train.with_added(_adapters(chain), weight, beside)


def write_added(folder: Path, files: Sequence[Path], model: PreTrainedModel, chain: ModelChain) -> None:
    """Makes of the files of what levers have added to an unmodified model those that other software reads."""
    train.write_added(_adapters(chain), folder, files, model, chain.name)


def _adapters(chain: ModelChain) -> Any:
    return next(change for change in chain.changes if change.adds_parameters)
