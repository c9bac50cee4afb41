"""A user's own module around what a layer keeps of it: blocks are stubs, other parameters have no values.

Tensors without values are on the meta device; an operation that is given one returns one (`Blanks`). So what does not
depend on parameters is computed as ever, and what does can never pass for a value: where it would be needed, there is
an error and no wrong result.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from steelyard.errors import InvalidModelError
from steelyard.model.own import OwnKind, OwnSplit
from steelyard.model.split import BlockArguments

META = torch.device("meta")


HINT = "docs/your-own-model.md says what a module must be like"


def call_arguments(inputs: Any) -> BlockArguments:
    """What is given by place and by name, of the inputs that a sample has: a tensor, a tuple, or a dictionary."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def move_module(module: nn.Module, device: torch.device) -> None:
    """Moves what a module holds, in place; what is on the meta device gets memory, and no values."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.device != device:
                    if id(tensor) not in moved:
                        moved[id(tensor)] = tensor, _on(tensor, device)
                    table[name] = moved[id(tensor)][1]


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        found = tensor.detach().to(device)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if is_parameter else found.detach()


class SeenError(Exception):
    """All that a pass was to show has been seen."""


class _Passing:
    """What the stubs of one shell do in the pass that is under way."""

    def __init__(self) -> None:
        self.at: Callable[[int, BlockArguments], None] = lambda _block, _given: None
        self.made: Callable[[int, list[Tensor]], list[Tensor]] = lambda _block, tensors: tensors
        self.num_samples = 0
        self.dtype = torch.float32
        """In which the pass computes."""
        self.blanks: list[tuple[nn.Module, str]] = []
        """The parameters without values: the module, and the name there."""

    def begin(self, num_samples: int, dtype: torch.dtype) -> None:
        """Prepares for a pass."""
        self.num_samples = num_samples
        if dtype != self.dtype:
            for module, name in self.blanks:
                module.__dict__[name] = _nothing(module.__dict__[name].shape, dtype)
        self.dtype = dtype


class _Stub(nn.Module):
    """Stands where a block was, and returns tensors of its shapes without values.

    What else a module asks of its block it has from a copy of the block without values.
    """

    def __init__(self, block: int, kind: OwnKind, passing: _Passing) -> None:
        super().__init__()
        self._block, self._kind, self._passing = block, kind, passing

    def stand_for(self, copied: nn.Module) -> None:
        """Takes the copy, which is none of the modules of this one."""
        self.__dict__["_copied"] = copied

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_copied"], name)

    def forward(self, *places: Any, **names: Any) -> Any:
        """What the block would return."""
        passing, kind = self._passing, self._kind
        passing.at(self._block, (places, names))
        blanks = [_nothing((passing.num_samples, *shape), passing.dtype) for shape in kind.makes]
        made = iter(passing.made(self._block, blanks))
        return next(made) if kind.returns is None else tuple(next(made) if each else None for each in kind.returns)


def run_shell(
    shell: nn.Module,
    inputs: Any,
    num_samples: int,
    dtype: torch.dtype,
    at: Callable[[int, BlockArguments], None],
    made: Callable[[int, list[Tensor]], list[Tensor]] = lambda _block, tensors: tensors,
) -> Any:
    """What the module of a shell returns; None where ``at``, which sees what each block is given, ends the pass.

    ``made`` may put other tensors in the place of what a stub returns.
    """
    passing: _Passing = shell.__dict__["passing"]
    passing.begin(num_samples, dtype)
    passing.at, passing.made = at, made
    places, names = call_arguments(inputs)
    try:
        return shell(*places, **names)
    except SeenError:
        return None
    finally:
        passing.at, passing.made = _Passing().at, _Passing().made


def shell_of(module: nn.Module, own: OwnSplit, *, keep: Collection[str]) -> nn.Module:
    """A copy of a module that has the parameters at the paths of ``keep`` and no others; its blocks are stubs.

    Parameters are the module's own. Where there was another one is a tensor on the meta device; if that is not trained,
    a buffer with its values.
    """
    passing = _Passing()
    stubs = {path: _Stub(number, own.kind(number + 1), passing) for number, path in enumerate(own.blocks)}
    made: dict[int, nn.Module] = {}

    def copied(each: nn.Module, path: str, *, has_values: bool = True) -> nn.Module:
        if id(each) in made:
            return made[id(each)]
        has_values &= path not in stubs
        found = made[id(each)] = copy.copy(each)
        found._buffers, found._parameters = dict(each._buffers), {}
        if not has_values:
            found._buffers = {name: b if b is None else _nothing(b.shape, b.dtype) for name, b in each._buffers.items()}
        found._non_persistent_buffers_set = set(each._non_persistent_buffers_set)
        for name, parameter in each._parameters.items():
            if parameter is None or f"{path}.{name}".removeprefix(".") in keep:
                found._parameters[name] = parameter
            elif not parameter.requires_grad and has_values:
                found._buffers[name] = parameter.detach()
                found._non_persistent_buffers_set.add(name)
            else:
                found.__dict__[name] = _nothing(parameter.shape, parameter.dtype)
                passing.blanks.append((found, name))
        found._modules = {
            name: child and copied(child, f"{path}.{name}".removeprefix("."), has_values=has_values)
            for name, child in each._modules.items()
        }
        if path in stubs:
            stubs[path].stand_for(found)
            made[id(each)] = stubs[path]
        return made[id(each)]

    with _disable_current_modes():  # tensors are taken as they are, also where new ones are fake
        root = copied(module, "")
    root.__dict__["passing"] = passing
    return root


class Blanks(TorchDispatchMode):
    """Within it an operation that is given a tensor on the meta device computes nothing, and returns such tensors."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(each.device == META for each in tensors):
            return func(*args, **kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and value.device != META:
                raise InvalidModelError(
                    field="forward",
                    found=f"{func}, which writes what depends on parameters into a tensor of shape {list(value.shape)}",
                    expected="new tensors, outside the blocks",
                    hint=HINT,
                )
        with _disable_current_modes():
            args, kwargs = pytree.tree_map_only(Tensor, _blank, (args, kwargs))
            return func(*args, **(kwargs | ({"device": META} if "device" in kwargs else {})))


def _nothing(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the meta device, and no fake tensor where these are made."""
    with _disable_current_modes():
        return torch.empty(tuple(shape), dtype=dtype, device=META)


def _blank(tensor: Tensor) -> Tensor:
    if tensor.device == META:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


class Swapped(TorchFunctionMode):
    """Within it operations are given other tensors in the place of some, which are known by identity."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._swapped, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _swapped(self, tensor: Tensor) -> Tensor:
        return self._tensors.get(id(tensor), tensor)
