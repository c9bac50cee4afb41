"""Find the frozen parameters of a model by name, and freeze them in its layers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steelyard.errors import InvalidModelError, nearest
from steelyard.model.chain import Freeze, FrozenLayers, ModelChain, nothing_left
from steelyard.modules.build import build_meta_model, named_layer_modules
from steelyard.modules.levers import num_quantized
from steelyard.modules.levers.train import is_added

_MOST_NAMED = 8
"""Maximum number of modules that an error lists."""


class _Named(NamedTuple):
    """A parameter of a layer, with its path in the layer and in the model."""

    layer: int
    local: str
    path: str
    parameter: nn.Parameter


def find_freeze(chain: ModelChain, patterns: Sequence[str], own: Any = None) -> Freeze | None:
    """Return the parameters that patterns freeze and those without gradients; None if there are none.

    A pattern is the path of a module or parameter as ``named_parameters`` spells it, with shell wildcards such as
    ``*``. ``own`` is a user's own module (`steelyard.modules.own_pieces.OwnModel`); without it, the Transformers model
    is built. Raises `InvalidModelError` if a pattern matches nothing or no parameter is left to train.
    """
    if own is None and not patterns and not chain.changes:
        return None
    model = build_meta_model(chain) if own is None else own
    named = list(_named_parameters(model, chain))
    for pattern in patterns:
        if not any(_matches(each.path, pattern) for each in named):
            parts = [each.path.split(".") for each in named]
            every = dict.fromkeys(".".join(each[:end]) for each in parts for end in range(1, len(each) + 1))
            outer = sorted(every, key=lambda path: path.count("."))[:_MOST_NAMED]
            raise InvalidModelError(
                field="--freeze",
                found=f"{pattern!r}, which matches nothing in the model",
                expected=f"the path of a module or parameter, for example {', '.join(outer)}",
                hint=nearest(pattern, every),
            )
    frozen = {
        (each.layer, each.local)
        for each in named
        if not each.parameter.requires_grad or any(_matches(each.path, pattern) for pattern in patterns)
    }
    for shared in chain.shared:
        if _with_other_paths(frozen, named) & {*shared.copies}:
            frozen |= {*shared.copies}
    frozen = _with_other_paths(frozen, named)
    if not frozen:
        return None
    resting = chain.split.resting
    if all((each.layer, each.local) in frozen or any(_matches(each.path, path) for path in resting) for each in named):
        raise nothing_left(chain.name)
    again = _with_other_paths([copy for shared in chain.shared for copy in shared.copies[1:]], named)
    counted = {id(each.parameter): each for each in reversed(named) if (each.layer, each.local) not in again}.values()
    quantized = num_quantized(model) if own is None else 0
    return Freeze(
        patterns=(*patterns, *(("all except adapters",) if chain.has_adapters else ())),
        num_params=quantized + sum(each.parameter.numel() for each in counted if (each.layer, each.local) in frozen),
        of_params=quantized + sum(each.parameter.numel() for each in counted),
        parts=tuple(_parts(named, frozen, chain.num_layers)),
    )


def _with_other_paths(found: Collection[tuple[int, str]], named: Sequence[_Named]) -> set[tuple[int, str]]:
    """Return parameters, given by layer and path in the layer, by all their paths there."""
    held = {(each.layer, id(each.parameter)) for each in named if (each.layer, each.local) in found}
    return {(each.layer, each.local) for each in named if (each.layer, id(each.parameter)) in held}


def freeze_layer(layer: nn.Module, chain: ModelChain, number: int) -> None:
    """Freeze the frozen parameters of a layer of the chain, in place.

    The first and last layers of a user's own module share that module, so the layer gets its own frozen parameters.
    """
    if chain.freeze is None:
        return
    made: dict[int, nn.Parameter] = {}
    for path, owner in layer.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not chain.freeze.holds(number, f"{path}.{name}"):
                continue
            if chain.split.module:
                frozen = made.setdefault(id(parameter), nn.Parameter(parameter.detach(), requires_grad=False))
                owner.register_parameter(name, frozen)
            else:
                parameter.requires_grad_(False)
                owner.__dict__[BY_PLAN] = True


def rest_in(layer: nn.Module, dtype: torch.dtype, *, trained: bool = False) -> None:
    """Cast a layer's frozen parameters (all if ``trained``) and added buffers to its compute dtype, in place."""
    for parameter in layer.parameters():
        if (trained or not parameter.requires_grad) and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for path, owner in layer.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(rests_in(f"{path}.{name}", buffer, dtype))


def rests_in(name: str, buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the storage dtype of a buffer: the compute dtype ``dtype`` if levers added the buffer, else its own."""
    return dtype if is_added(name) and buffer.is_floating_point() else buffer.dtype


def check_frozen(model: Any, chain: ModelChain) -> None:
    """Raise `InvalidModelError` if a prepared model has no gradients for parameters that its plan trains.

    Parameters that the Transformers class itself does not train are ignored, and so are, if the plan freezes nothing,
    those of the first and last layers of a user's own module.
    """
    frozen = {
        each.path: each.layer
        for each in _named_parameters(model, chain)
        if not each.parameter.requires_grad and not (chain.freeze and chain.freeze.holds(each.layer, each.local))
    }
    if chain.split.module:
        ends = (0, chain.num_layers - 1)
        frozen = {path: layer for path, layer in frozen.items() if chain.freeze or layer not in ends}
    elif frozen:
        fresh = build_meta_model(chain)
        frozen = {path: layer for path, layer in frozen.items() if fresh.get_parameter(path).requires_grad}
    if frozen:
        raise InvalidModelError(
            field="model",
            found=f"{next(iter(frozen))} without a gradient",
            expected="gradients for every parameter that the plan trains",
            hint="plan again with the frozen parameters (--freeze, or freeze=), or call requires_grad_(True)",
        )


def freeze_model(model: nn.Module, chain: ModelChain) -> None:
    """Freeze the parameters of a whole Transformers model that a plan freezes, in place."""
    if chain.freeze is None:
        return
    for each in _named_parameters(model, chain):
        if chain.freeze.holds(each.layer, each.local):
            each.parameter.requires_grad_(False)


BY_PLAN = "_frozen_by_plan"
"""Attribute that marks a module whose parameters were frozen by a plan and not by its class."""


def _named_parameters(model: Any, chain: ModelChain) -> Iterator[_Named]:
    for layer in range(chain.num_layers):
        for local, module in named_layer_modules(model, chain, layer).items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                inside = f"{local}.{name}"
                yield _Named(layer, inside, chain.split.model_path(layer, inside), parameter)


def _matches(path: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter or a module that contains it."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _parts(named: Sequence[_Named], frozen: Collection[tuple[int, str]], num_layers: int) -> Iterator[FrozenLayers]:
    """Yield the frozen parts by layer, with neighbours merged if equal; a layer without parameters counts as frozen."""
    found: dict[int, tuple[str, ...] | None] = dict.fromkeys(range(num_layers), ())
    for layer, of_layer in groupby(named, key=lambda each: each.layer):
        found[layer] = _paths({each.local: (layer, each.local) in frozen for each in of_layer})
    for paths, layers in groupby(found, key=found.__getitem__):
        if paths is not None:
            first, *rest = layers
            yield FrozenLayers(layers=(first, rest[-1] if rest else first), paths=paths)


def _paths(is_frozen: Mapping[str, bool]) -> tuple[str, ...] | None:
    """Return the outermost frozen modules and parameters of a layer; empty if all are frozen, None if none are."""
    if not any(is_frozen.values()):
        return None
    found = set()
    for path in (path for path, each in is_frozen.items() if each):
        parts = path.split(".")
        outer = (".".join(parts[:end]) for end in range(len(parts) + 1))
        found.add(next(each for each in outer if _is_all_frozen(is_frozen, each)))
    return () if "" in found else tuple(sorted(found))


def _is_all_frozen(is_frozen: Mapping[str, bool], outer: str) -> bool:
    inside = [each for path, each in is_frozen.items() if not outer or path == outer or path.startswith(f"{outer}.")]
    return bool(inside) and all(inside)
