"""Implementations of the levers of `steelyard.levers` that change a model."""

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
"""Levers that change a model, by name."""
REPLACES = ("train", "base")
"""Levers that replace modules; while first weights are made, the original modules stand in."""
LAYER_CHANGES: dict[str, Any] = {"float8": float8, "compile": compiled_blocks}
"""Levers that change layers one by one, in the order of `LEVERS`."""


def change_model(model: PreTrainedModel, chain: ModelChain) -> None:
    """Apply the levers of a chain to a model, in place; idempotent."""
    for change in _changes(chain, CHANGES):
        CHANGES[change.name].change_model(change, model, chain)


def changed_by_user(model: nn.Module) -> tuple[PreTrainedModel, dict[str, str]] | None:
    """Return the transformers model inside one that its user changed as a lever does, and those levers as text by name;
    None for any other module."""
    found = train.changed_by_user(model)
    return None if found is None else (found[0], {found[1].name: str(found[1])})


def change_layer(layer: nn.Module, chain: ModelChain) -> None:
    """Apply the levers of a chain to a layer that is divided but not yet sharded, in place."""
    for change in _changes(chain, LAYER_CHANGES):
        LAYER_CHANGES[change.name].change_layer(change, layer)


def loss_chunks(chain: ModelChain) -> int:
    """Number of chunks of a sample's tokens that the head computes one by one."""
    return next((change.chunks for change in chain.changes if isinstance(change, ChunkedLoss)), 1)


def saving(levers: Levers) -> Callable[[nn.Module, Any], AbstractContextManager[None]] | None:
    """Return the context manager of a block's forward pass, made from block and context; None if no lever needs one."""
    if not levers.value(Offload).moves_activations:
        return None
    return lambda layer, context: offload.saving_on_host(layer, context.side.tensors())


def num_quantized(model: nn.Module) -> int:
    """Number of weights of a model that levers store in tensors other than parameters."""
    return sum(math.prod(each.shape) for each in model.modules() if isinstance(each, quantized_base.Quantized))


def begin_filling(module: nn.Module, chain: ModelChain) -> nn.Module:
    """Return the module of a layer with replacements undone in place, to get the unmodified model's first weights."""
    for change in _changes(chain, REPLACES):
        module = CHANGES[change.name].begin_filling(module)
    return module


def fill_added(
    model: PreTrainedModel, path: str, module: nn.Module, chain: ModelChain, *, seed: int, layer: int, is_new: bool
) -> nn.Module:
    """Return the module of a layer at a path with the levers' additions. Additions get first weights: all of them if
    the module ``is_new``, else those that have none."""
    for change in reversed(_changes(chain, REPLACES)):  # what is taken out first comes back last
        module = CHANGES[change.name].fill_added(change, model, path, module, seed=seed, layer=layer, is_new=is_new)
    return module


def _changes(chain: ModelChain, names: Container[str]) -> list[Any]:
    return [change for change in chain.changes if change.name in names]
