"""The twins of the levers that change a model, each of one lever of `steelyard.levers`."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from steelyard.levers import Levers
from steelyard.levers.chunked_loss import ChunkedLoss
from steelyard.levers.offload import Offload
from steelyard.model.chain import ModelChain
from steelyard.modules.levers import compiled_blocks, float8, offload, quantized_base, train

CHANGES: dict[str, Any] = {"train": train, "base": quantized_base, "float8": float8}
"""By the name of the lever, those that change a model."""
LAYER_CHANGES: dict[str, Any] = {"float8": float8, "compile": compiled_blocks}
"""Those that change layers one by one, in the order of `LEVERS`."""


def change_model(model: PreTrainedModel, chain: ModelChain) -> None:
    """Makes of a model what the levers of a chain make of it, in place; twice does no harm."""
    for change in _changes(chain):
        CHANGES[change.name].change_model(change, model, chain)


def changed_by_user(model: nn.Module) -> tuple[PreTrainedModel, dict[str, str]] | None:
    """The model of transformers in one that its user has changed as a lever does, and what such levers say; None for
    any other module."""
    found = train.changed_by_user(model)
    return None if found is None else (found[0], {found[1].name: str(found[1])})


def change_layer(layer: nn.Module, chain: ModelChain) -> None:
    """Makes of a layer, divided and not yet sharded, what the levers of a chain make of it, in place."""
    for change in chain.changes:
        if change.name in LAYER_CHANGES:
            LAYER_CHANGES[change.name].change_layer(change, layer)


def loss_chunks(chain: ModelChain) -> int:
    """Chunks of a sample's tokens that the head computes one after another."""
    return next((change.chunks for change in chain.changes if isinstance(change, ChunkedLoss)), 1)


def saving(levers: Levers) -> Callable[[nn.Module, Any], AbstractContextManager[None]] | None:
    """What a forward pass through a block, given with its context, is within; None where levers leave it as it is."""
    if not levers.value(Offload).moves_activations:
        return None
    return lambda layer, context: offload.saving_on_host(layer, context.side.tensors())


is_added = train.is_added
"""Whether a parameter of a name is not of the unmodified model."""
own_name = train.own_name
"""The name of a parameter in the unmodified model."""
added_that_read = train.entered
"""The modules that levers have added to a module and that read what linear layers read."""


def num_quantized(model: nn.Module) -> int:
    """Weights of a model that levers keep in other tensors than parameters."""
    return sum(math.prod(each.shape) for each in model.modules() if isinstance(each, quantized_base.QuantizedLinear))


def begin_filling(module: nn.Module, chain: ModelChain) -> nn.Module:
    """The module of a layer, to get first weights as in the unmodified model; what is in it is replaced in place."""
    for change in _changes(chain):
        module = CHANGES[change.name].begin_filling(module)
    return module


def fill_added(
    model: PreTrainedModel, path: str, module: nn.Module, chain: ModelChain, *, seed: int, layer: int, is_new: bool
) -> nn.Module:
    """The module of a layer at a path with what levers add, which gets first weights: all where the module ``is_new``,
    else what has none."""
    for change in reversed(_changes(chain)):  # what is taken out first comes back last, around what is quantized
        module = CHANGES[change.name].fill_added(change, model, path, module, seed=seed, layer=layer, is_new=is_new)
    return module


def cast_added(layer: nn.Module, chain: ModelChain) -> None:
    """Casts what levers have added to a layer to fp32, in place, where peft does."""
    train.cast(_adapters(chain), layer)


def _changes(chain: ModelChain) -> list[Any]:
    return [change for change in chain.changes if change.name in CHANGES]


def with_added(model: PreTrainedModel, chain: ModelChain, layer: int) -> dict[str, tuple[str, ...]]:
    """The modules of a layer in which levers add something, by path: the paths inside of that and what it is beside."""
    paths = set(chain.family.modules(layer).values()) - set(chain.split.holders) if chain.has_adapters else ()
    found = {path: tuple(train.names_inside(model.get_submodule(path))) for path in sorted(paths)}
    return {path: names for path, names in found.items() if names}


def reads_base(chain: ModelChain) -> bool:
    """Whether first values of what levers add depend on what they are beside."""
    return chain.has_adapters and not _adapters(chain).is_plain


def first_values(
    model: PreTrainedModel, chain: ModelChain, path: str, tensors: Mapping[str, Tensor], *, seed: int, layer: int
) -> dict[str, Tensor]:
    """The first values of what levers add to a module of a layer, of the tensors that `with_added` names there."""
    return train.first_values(_adapters(chain), model, path, tensors, seed=seed, layer=layer)


def merged(model: PreTrainedModel, chain: ModelChain, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is added merged into what it is beside, by its path in the unmodified module, of these tensors."""
    return train.merged(_adapters(chain), model, path, tensors)


def write_added(folder: Path, files: Sequence[Path], model: PreTrainedModel, chain: ModelChain) -> None:
    """Makes of the files of what levers have added to an unmodified model those that other software reads."""
    train.write_added(_adapters(chain), folder, files, model, chain.name)


def _adapters(chain: ModelChain) -> Any:
    return next(change for change in chain.changes if change.adds_parameters)
