"""A model reduced to what a layer keeps: its own forward pass with stubs for blocks and blanks for parameters.

Modules are copied, parameters are not. A blank (`steelyard.modules.known_values`) replaces each parameter that is not
kept, so that values that depend on it cost nothing and cannot be taken for real ones. A layer of a transformers model
keeps modules, whose model is also given samples, masks and buffers; a layer of a user's own module keeps parameters,
whichever modules hold them.
"""

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from steelyard.model.family import Task
from steelyard.model.own import OwnLayerType, OwnSplit, Shape
from steelyard.model.split import BlockArguments, ModelSplit, is_below_any
from steelyard.modules.build import fill_buffers
from steelyard.modules.freezing import BY_PLAN
from steelyard.modules.known_values import Blanks, blank_of, plain_token, without_values
from steelyard.modules.model_inputs import (
    NO_MASK,
    beside_features,
    blank,
    first_tokens,
    forward_options,
    given_samples,
    ids_beside,
    one_sequence_each,
    read_by,
)

Fate = Literal["kept", "constant", "blank"]
"""Treatment of a parameter: a constant one keeps its value, as a buffer does."""


class Whole:
    """A whole model or block that a deep copy of its holder shares."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Whole":
        return self


class ReachedError(Exception):
    """Raised to end a pass when everything that it was to show has been seen."""


class Stub(nn.Module):
    """Replacement of a block; other attributes that a model reads from the block come from the one it stands for."""

    stands_for: Whole | SimpleNamespace | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.stands_for is None:
                raise
            return getattr(self.stands_for.model, name)


class StubbedModel(ABC):
    """A copy of a model reduced to the parts that it keeps; its blocks are stubs, wherever they stand."""

    model: nn.Module

    def __init__(self, stubs: Mapping[nn.Module, Stub]) -> None:
        self._standing = dict(stubs)
        self._blanked: list[tuple[nn.Module, str, torch.Size]] = []
        self._blank_for: tuple[torch.dtype, torch.device] | None = None

    @abstractmethod
    def fate(self, module: nn.Module, path: str, name: str) -> Fate:
        """Return the treatment of a parameter of the module at a path."""

    @abstractmethod
    def is_whole(self, path: str) -> bool:
        """Return whether the module at a path is kept as it is."""

    def copied(self, module: nn.Module, path: str = "") -> nn.Module:
        """Return the copy of a module."""
        if module in self._standing:
            return self._standing[module]
        if self.is_whole(path):
            return module
        found = object.__new__(type(module))  # copy.copy refuses parametrized modules
        found.__dict__ |= module.__dict__
        found._buffers, found._parameters = dict(module._buffers), {}
        found._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        found._modules = {
            name: child and self.copied(child, f"{path}.{name}".removeprefix("."))
            for name, child in module._modules.items()
        }
        for name, parameter in module._parameters.items():
            fate = "kept" if parameter is None else self.fate(module, path, name)
            if fate == "kept":
                found._parameters[name] = parameter
            elif fate == "constant":
                found._buffers[name] = parameter.detach()
                found._non_persistent_buffers_set.add(name)
            else:
                self._blanked.append((found, name, parameter.shape))
        return found

    def stub(self, model: nn.Module, path: str = "") -> None:
        """Make the copy. Tensors are taken as they are, even if new ones would be fake."""
        with _disable_current_modes():
            self.model, self._standing = self.copied(model, path), {}
            self._blank_for = None
            self.become(torch.float32, torch.device("cpu"))

    def become(self, dtype: torch.dtype, device: torch.device) -> None:
        """Replace parameters that are not kept by blanks of a dtype and a device."""
        if (dtype, device) == self._blank_for:
            return
        self._blank_for = dtype, device
        for module, name, shape in self._blanked:
            module.__dict__[name] = blank_of(shape, dtype, device)


class StubbedTransformers(StubbedModel):
    """A stubbed model of transformers, reduced to the modules that it keeps.

    ``stubs`` gives the stubs of some blocks, by the layer of the chain; those of the others pass on what they read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        split: ModelSplit,
        *,
        keep: Collection[str],
        stubs: Mapping[int, "_PassingStub"],
        makes_masks: bool,
    ) -> None:
        self._given_config, self._config = Whole(model.config), copy.copy(model.config)
        if not makes_masks:
            self._config._attn_implementation_internal = NO_MASK
        self._keep, self._token, self._first = frozenset(keep), plain_token(model.config), first_tokens(split.features)
        self._records_outputs = split.task is Task.IMAGE_TEXT
        super().__init__(dict(self._stubs(model, split, stubs)))
        self._filled: list[tuple[Whole, nn.Module]] = []
        self._holders, self._constants = split.holders, list[nn.Module]()
        self._typed: list[nn.Module] = []
        self._options, self._read, self._ids = forward_options(model), read_by(split), ids_beside(split.task)
        self._part = Whole(model)
        """Innermost model of transformers around the module being copied."""
        self.stub(model)
        self._device: torch.device | None = None

    def __call__(
        self,
        first: Tensor | None,
        dtype: torch.dtype,
        ids: Tensor | None = None,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
        model_kwargs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Any:
        """Return the model's outputs, with blanks of ``dtype``. ``first`` is the input of its first layer, if it has
        one.

        ``ids`` is the model's other input; by default the same as ``first``, or one token if that is features.
        ``buffers`` replace those of the model, by their paths. ``model_kwargs`` are arguments that differ between
        samples (`PER_SAMPLE`).
        """
        read: Any = ids if first is None else first
        device = read.device
        self.become(dtype, device)
        self.fill(device)
        for module in self._constants:
            module._buffers = {name: buffer.to(dtype) for name, buffer in module._buffers.items()}
        like = nn.Parameter(torch.empty((0,), dtype=dtype, device=device), requires_grad=False)
        for module in self._typed:
            module._parameters = {"_like": like}
        for path, buffer in buffers.items():
            owner, _, name = path.rpartition(".")
            self.model.get_submodule(owner)._buffers[name] = buffer
        if self._ids and ids is None and first is not None:
            ids = blank(None, len(first), 1, device) if first.is_floating_point() else first
        samples = given_samples(self._read, first)
        samples |= {self._ids: ids} if self._ids else {}
        told = one_sequence_each(reads_values=bool(model_kwargs))
        with Blanks(), told, without_values(samples.values(), self._token, self._first):
            beside = {} if first is None else beside_features(self.model, self._read, ids)
            return self.model(**samples, **beside, **self._options, **model_kwargs)

    def fill(self, device: torch.device) -> None:
        """Give the model its buffers on a device, if it does not have them there."""
        if self._device != device:
            with Blanks():  # models initialize blank parameters beside the buffers
                for part, module in self._filled:
                    fill_buffers(part.model, module, device)
            self._device = device

    def is_whole(self, path: str) -> bool:
        """Return whether the layer keeps a module; of a module that holds blocks it keeps only parameters."""
        return path in self._keep and path not in self._holders

    def fate(self, module: nn.Module, path: str, name: str) -> Fate:
        """Keep parameters that are tied to those that the layer keeps."""
        if path in self._holders:
            return "kept" if path in self._keep else "blank"
        if any(each.startswith(f"{path}.") for each in self._keep):
            return "kept"
        return "constant" if _is_constant(module) else "blank"

    def copied(self, module: nn.Module, path: str = "") -> nn.Module:
        """Return the copy of a module, with the config of this model and separate hooks."""
        outer = self._part
        self._part = part = Whole(module) if isinstance(module, PreTrainedModel) else outer
        found = super().copied(module, path)
        self._part = outer
        if found is module or isinstance(found, Stub):
            return found
        if self._records_outputs:  # by hooks
            found.__dict__.pop("_output_capturing_hooks_installed", None)
            found._forward_hooks = copy.copy(module._forward_hooks)
        if {*module._parameters} == {*found._parameters}:
            found._parameters = module._parameters  # the same dictionary: replacing one in either replaces both
        elif not _is_constant(module):  # its parameters are blank: hooks would divide its work
            found.__dict__ |= {name: OrderedDict() for name in vars(found) if name.startswith(_HOOKS)}
        if _is_constant(module):
            self._constants.append(found)
        if found._buffers:
            self._filled.append((part, found))
        if isinstance(module, PreTrainedModel) and not found._parameters:  # is of the type of its first parameter
            self._typed.append(found)
        for name, value in vars(found).items():
            if value is self._given_config.model:
                found.__dict__[name] = self._config
        return found

    def _stubs(
        self, model: PreTrainedModel, split: ModelSplit, given: Mapping[int, "_PassingStub"]
    ) -> Iterator[tuple[nn.Module, "_PassingStub"]]:
        """Yield a stub for each block; stubs of blocks outside the chain, which nothing reads, pass on their input.

        If outputs of blocks are recorded, which goes by their class, stubs have that class as well.
        """
        for path in split.lists:
            layers = {split.place_of(layer): layer for layer in split.block_layers(path)}
            for place, block in enumerate(model.get_submodule(path).children()):
                layer = layers.get(place, [*layers.values()][-1])
                stub = (given.get(layer) if place in layers else None) or _PassingStub(split, layer)
                stub.stands_for = Whole(block)
                if self._records_outputs:
                    stub.__class__ = type(type(block).__name__, (type(stub), type(block)), {})
                yield block, stub


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Prefixes of the attributes that hold the hooks of a module's forward pass."""


def _is_constant(module: nn.Module) -> bool:
    """Return whether a module's parameters are not trained and its class is a model's own, which knows their values."""
    own = list(module.parameters(recurse=False))
    is_trained = module.__dict__.get(BY_PLAN) or any(each.requires_grad for each in own)
    of_a_model = type(module).__module__.startswith("transformers.models.") and not list(module.children())
    return bool(own) and of_a_model and not is_trained


def holds_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters that it does not only refer to in a module below it."""
    own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
    return bool(own - {id(parameter) for child in module.children() for parameter in child.parameters()})


class _PassingStub(Stub):
    def __init__(self, split: ModelSplit, layer: int) -> None:
        super().__init__()
        self._call = split.call_of(layer)
        self._encoder = split.reads_encoded(layer)
        self._shape = split.kinds[split.layers[layer]].shape

    def forward(self, *places: Any, **names: Any) -> Any:
        """Return the hidden state in the form of the block's result, without computing anything."""
        hidden = self._call.hidden((places, names))
        if self._shape and hidden.shape[1:] != self._shape:
            hidden = blank_of((len(hidden), *self._shape), hidden.dtype, hidden.device)
        return self._call.returned(hidden)


class Give(_PassingStub):
    """A stub that returns the given hidden state, not the one that the block reads."""

    hidden: Tensor | None = None

    def forward(self, *_places: Any, **_names: Any) -> Any:
        """Return the given hidden state in the form of the block's result."""
        assert self.hidden is not None
        return self._call.returned(self.hidden)


class _Record(_PassingStub):
    _found: BlockArguments | None = None
    is_last = False
    """Whether nothing after it is needed."""

    def __init__(self, split: ModelSplit, layer: int) -> None:
        super().__init__(split, layer)
        self._flows = [self._call, *([self._encoder.reads] if self._encoder else [])]
        streams = [split.streams[number] for number in split.read_by(layer)]
        self._flows += [each.reads for each in streams if each.entry is None]
        self._entries = [(str(each.argument), each.entry[0]) for each in split.streams if each.entry]

    def forward(self, *places: Any, **names: Any) -> Any:
        self._found = places, names
        if self.is_last:
            raise ReachedError
        return super().forward(*places, **names)

    def take(self) -> BlockArguments:
        """Return all arguments of the block, and forget them here."""
        found, self._found = self._found, None
        assert found is not None, "the model has not run the block"
        return found

    def take_sides(self) -> BlockArguments:
        """Return the arguments of the block without those that flow along the chain, and forget them here."""
        found = self.take()
        for each in self._flows:
            found = each.with_hidden(found, None)
        for name, key in self._entries:
            if key in (mapping := found[1].get(name, {})):
                del mapping[key]
        return found


def recording_stubs(split: ModelSplit, layers: Collection[int]) -> dict[int, _Record]:
    """Return stubs for these layers that record their arguments; the pass ends at the last one."""
    found = {layer: _Record(split, layer) for layer in sorted(layers)}
    found[max(layers)].is_last = True
    return found


At = Callable[[int, BlockArguments], None]
Made = Callable[[int, list[Tensor]], list[Tensor]]


def call_arguments(inputs: Any) -> BlockArguments:
    """Return the positional and keyword arguments for a sample's inputs: a tensor, a tuple, or a dictionary."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module's tensors, in place; those on the meta device get memory, but no values."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    new = (
                        tensor.detach().to(device)
                        if not tensor.is_meta
                        else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    )
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = tensor, new
                table[name] = moved[id(tensor)][1]


class StubbedOwn(StubbedModel):
    """A stubbed module of a user's own, with the parameters at the paths of ``keep`` and no others.

    Parameters outside blocks that are not trained keep their values. Attributes that a module reads from its block come
    from a copy of the block without values.
    """

    passing: tuple[At, Made, Callable[[Shape], Tensor]]
    """Functions of the current pass: one sees the arguments of blocks, the others make the results of their stubs."""

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
        """Return False: all modules are copied."""
        return False

    def copied(self, module: nn.Module, path: str = "") -> nn.Module:
        """Return the copy of a module, which always has a parameter that tells a dtype and a device."""
        found = super().copied(module, path)
        found.__dict__["parameters"] = partial(self._parameters, found)
        return found

    def _parameters(self, copied: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
        yield from nn.Module.parameters(copied, recurse)
        if self._blank_for is not None:
            yield blank_of((0,), *self._blank_for)

    def fate(self, module: nn.Module, path: str, name: str) -> Fate:
        """Keep the parameters of ``keep``; those outside blocks that are not trained are constant."""
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
        """Return the result of the module; None if ``at``, which sees the arguments of each block, ends the pass.

        ``made`` may replace the tensors that a stub returns.
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
    """A stub that returns blanks of the shapes that its block returns."""

    def __init__(self, block: int, layer_type: OwnLayerType, stubbed: StubbedOwn) -> None:
        super().__init__()
        self._block, self._layer_type, self._stubbed = block, layer_type, stubbed

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class of the block, which modules look at (``isinstance``)."""
        return type(self.stands_for.model) if self.stands_for else type(self)

    def forward(self, *places: Any, **names: Any) -> Any:
        """Return blanks in the form of the block's result."""
        at, made, blank = self._stubbed.passing
        at(self._block, (places, names))
        found = iter(made(self._block, [blank(shape) for shape in self._layer_type.makes]))
        layer_types = self._layer_type.returns
        return next(found) if layer_types is None else tuple(next(found) if each else None for each in layer_types)


class Swapped(TorchFunctionMode):
    """Mode that replaces some tensors, known by identity, in the arguments of operations."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda each: self._tensors.get(id(each), each), (args, kwargs or {})
        )
        return func(*args, **kwargs)
