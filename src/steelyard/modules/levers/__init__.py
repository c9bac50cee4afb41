"""The twins of the levers that change a model, each of one lever of `steelyard.levers`."""

import math
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from steelyard.levers import Levers
from steelyard.levers.chunked_loss import ChunkedLoss
from steelyard.levers.offload import Offload
from steelyard.model.chain import ModelChain
from steelyard.modules.levers import compiled_blocks, float8, offload, quantized_base, train

CHANGES: dict[str, Any] = {"train": train, "base": quantized_base, "float8": float8}
"""By the name of the lever, those that change a model."""
REPLACES = ("train", "base")
"""Those of them that put other modules into it, which come back once theirs have first weights."""
LAYER_CHANGES: dict[str, Any] = {"float8": float8, "compile": compiled_blocks}
"""Those that change layers one by one, in the order of `LEVERS`."""


def change_model(model: PreTrainedModel, chain: ModelChain) -> None:
    """Makes of a model what the levers of a chain make of it, in place; twice does no harm."""
    for change in _changes(chain, CHANGES):
        CHANGES[change.name].change_model(change, model, chain)


def changed_by_user(model: nn.Module) -> tuple[PreTrainedModel, dict[str, str]] | None:
    """The model of transformers in one that its user has changed as a lever does, and what such levers say; None for
    any other module."""
    found = train.changed_by_user(model)
    return None if found is None else (found[0], {found[1].name: str(found[1])})


def change_layer(layer: nn.Module, chain: ModelChain) -> None:
    """Makes of a layer, divided and not yet sharded, what the levers of a chain make of it, in place."""
    for change in _changes(chain, LAYER_CHANGES):
        LAYER_CHANGES[change.name].change_layer(change, layer)


def loss_chunks(chain: ModelChain) -> int:
    """Chunks of a sample's tokens that the head computes one after another."""
    return next((change.chunks for change in chain.changes if isinstance(change, ChunkedLoss)), 1)


def saving(levers: Levers) -> Callable[[nn.Module, Any], AbstractContextManager[None]] | None:
    """What a forward pass through a block, given with its context, is within; None where levers leave it as it is."""
    if not levers.value(Offload).moves_activations:
        return None
    return lambda layer, context: offload.saving_on_host(layer, context.side.tensors())


def num_quantized(model: nn.Module) -> int:
    """Weights of a model that levers keep in other tensors than parameters."""
    return sum(math.prod(each.shape) for each in model.modules() if isinstance(each, quantized_base.QuantizedLinear))


def begin_filling(module: nn.Module, chain: ModelChain) -> nn.Module:
    """The module of a layer, to get first weights as in the unmodified model; what is in it is replaced in place."""
    for change in _changes(chain, REPLACES):
        module = CHANGES[change.name].begin_filling(module)
    return module


def fill_added(
    model: PreTrainedModel, path: str, module: nn.Module, chain: ModelChain, *, seed: int, layer: int, is_new: bool
) -> nn.Module:
    """The module of a layer at a path with what levers add, which gets first weights: all where the module ``is_new``,
    else what has none."""
    for change in reversed(_changes(chain, REPLACES)):  # what is taken out first comes back last
        module = CHANGES[change.name].fill_added(change, model, path, module, seed=seed, layer=layer, is_new=is_new)
    return module


def _changes(chain: ModelChain, names: Container[str]) -> list[Any]:
    return [change for change in chain.changes if change.name in names]
