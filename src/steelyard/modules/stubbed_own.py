"""A user's own module, stubbed: around the parameters that a layer keeps of it, whichever modules hold them."""

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from steelyard.model.own import OwnLayerType, OwnSplit, Shape
from steelyard.model.split import BlockArguments
from steelyard.modules.blanks import blank_of
from steelyard.modules.paths import is_below_any
from steelyard.modules.stubbed_model import Fate, ReachedError, Stub, StubbedModel

At = Callable[[int, BlockArguments], None]
Made = Callable[[int, list[Tensor]], list[Tensor]]


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


class StubbedOwn(StubbedModel):
    """A stubbed module of a user's own, with the parameters at the paths of ``keep`` and no others.

    Those that are not trained keep their values, outside blocks. What a module asks of its block it has from a copy of
    the block without values.
    """

    passing: tuple[At, Made, Callable[[Shape], Tensor]]
    """What sees what blocks are given, and makes what their stubs return, while a pass runs."""

    def __init__(self, module: nn.Module, split: OwnSplit, *, keep: Collection[str]) -> None:
        super().__init__({})
        self._keep, self._blocks = frozenset(keep), split.blocks
        stubs = {}
        for number, path in enumerate(split.blocks):
            block = module.get_submodule(path)
            stubs[block] = _OwnStub(number, split.type_of(number + 1), self)
            self.stub(block, path)
            stubs[block].stands_for = SimpleNamespace(model=self.model)
        self._standing = stubs
        self.stub(module)
        self.model.__dict__["stubbed"] = self

    def is_whole(self, _path: str) -> bool:
        """Modules are copied, all of them."""
        return False

    def fate(self, module: nn.Module, path: str, name: str) -> Fate:
        """Constant is what is not trained."""
        if f"{path}.{name}".removeprefix(".") in self._keep:
            return "kept"
        is_constant = not module._parameters[name].requires_grad and not is_below_any(path, self._blocks)
        return "constant" if is_constant else "blank"

    def run(
        self,
        inputs: Any,
        num_samples: int,
        dtype: torch.dtype,
        at: At,
        made: Made = lambda _block, tensors: tensors,
    ) -> Any:
        """What the module returns; None where ``at``, which sees what each block is given, ends the pass.

        ``made`` may put other tensors in the place of what a stub returns.
        """
        device = next(each.device for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor))
        self.become(dtype, device)
        self.passing = at, made, lambda shape: blank_of((num_samples, *shape), dtype, device)
        places, names = call_arguments(inputs)
        try:
            return self.model(*places, **names)
        except ReachedError:
            return None
        finally:
            del self.passing


class _OwnStub(Stub):
    """Returns blanks of the shapes that a block returns."""

    def __init__(self, block: int, layer_type: OwnLayerType, stubbed: StubbedOwn) -> None:
        super().__init__()
        self._block, self._layer_type, self._stubbed = block, layer_type, stubbed

    def forward(self, *places: Any, **names: Any) -> Any:
        """What the block would return."""
        at, made, blank = self._stubbed.passing
        at(self._block, (places, names))
        found = iter(made(self._block, [blank(shape) for shape in self._layer_type.makes]))
        layer_types = self._layer_type.returns
        return next(found) if layer_types is None else tuple(next(found) if each else None for each in layer_types)


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
