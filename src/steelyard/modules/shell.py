"""A model of transformers with holes: its own forward pass around the few modules that a layer keeps.

A hole passes on values without meaning, of the right shape and type; a stub stands where a block was.
`steelyard.modules.split_proof` proves that nothing of them reaches a result.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from steelyard.model.family import Task
from steelyard.model.split import BlockArguments, BlockCall, ModelSplit
from steelyard.modules.build import build_from_config, fill_buffers
from steelyard.modules.freezing import BY_PLAN
from steelyard.modules.known_values import plain_token, without_values
from steelyard.modules.model_inputs import (
    beside_features,
    blank,
    first_tokens,
    forward_options,
    given_samples,
    ids_beside,
    read_by,
)
from steelyard.modules.unpadded import NO_MASK, one_sequence_each


class Shell:
    """A copy of the model around the modules that it keeps, which stay the model's own.

    Its blocks are stubs: those given, by the layer of the chain, and for the others ones that pass on what they read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        split: ModelSplit,
        *,
        keep: Collection[str],
        stubs: Mapping[int, "_Stub"],
        makes_masks: bool,
    ) -> None:
        self._whole = _Whole(model)
        self._config = copy.copy(model.config)
        if not makes_masks:
            self._config._attn_implementation_internal = NO_MASK
        self._keep, self._token, self._first = frozenset(keep), plain_token(model.config), first_tokens(split.features)
        self._records_outputs = split.task is Task.IMAGE_TEXT
        self._stubs = {
            path: {split.place_of(layer): stubs.get(layer) or _Stub(split, layer) for layer in split.block_layers(path)}
            for path in split.lists
        }
        self._behind = {path: (split, split.block_layers(path)[-1]) for path in split.lists}
        blocks = [(path, [*model.get_submodule(path).children()]) for path in split.lists]
        self._standing = {b: stub for p, each in blocks for b, stub in zip(each, self._stubs_of(p, each), strict=True)}
        self._holes: list[_Hole] = []
        self._filled: list[tuple[PreTrainedModel, nn.Module]] = []
        self._holders, self._constants = split.holders, list[nn.Module]()
        self._emptied: list[tuple[nn.Module, Mapping[str, nn.Parameter | None]]] = []
        self._typed: list[nn.Module] = []
        self._options, self._read, self._ids = forward_options(model), read_by(split), ids_beside(split.task)
        with _disable_current_modes():
            options = {"fused_attention": split.fused_attention}
            self._shapes = build_from_config(model.config, split.task, **options) if read_by(split) else None
        self.model = self._copy(model, "", model)
        self._shapes = None
        self._device: torch.device | None = None

    def __call__(
        self,
        first: Tensor | None,
        dtype: torch.dtype,
        ids: Tensor | None = None,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Any:
        """The model's outputs; holes pass on blanks of ``dtype``. ``first`` is what its first layer reads, if it does.

        What else reads ``ids`` reads where there are none the same, or one token beside features. The model has
        ``buffers`` in the place of its own, by their paths.
        """
        read: Any = ids if first is None else first
        device = read.device
        self.fill(device)
        for hole in self._holes:
            hole.become(dtype, device)
        for module in self._constants:
            module._buffers = {name: buffer.to(dtype) for name, buffer in module._buffers.items()}
        for module, parameters in self._emptied:
            module._parameters = {
                n: None if each is None else _frozen(each, dtype, device) for n, each in parameters.items()
            }
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
        with one_sequence_each(), without_values(samples.values(), self._token, self._first):
            beside = {} if first is None else beside_features(self.model, self._read, ids)
            return self.model(**samples, **beside, **self._options)

    def fill(self, device: torch.device) -> None:
        """Gives the model its buffers on a device, where it does not have them."""
        if self._device != device:
            for hole in self._holes:
                hole.empty()
            for part, module in self._filled:
                fill_buffers(part, module, device)
            self._device = device

    def _copy(self, module: nn.Module, path: str, part: PreTrainedModel) -> nn.Module:
        part = module if isinstance(module, PreTrainedModel) else part
        if module in self._standing:  # wherever else it stands, too
            return self._standing[module]
        if path in self._keep and path not in self._holders:
            return module
        found = copy.copy(module)
        if self._records_outputs:  # by hooks, of which the copy has its own
            found.__dict__.pop("_output_capturing_hooks_installed", None)
            found._forward_hooks = copy.copy(module._forward_hooks)
        found._modules = {
            name: child and self._copy(child, f"{path}.{name}" if path else name, part)
            for name, child in module._modules.items()
        }
        holds_kept = any(each.startswith(f"{path}.") for each in self._keep)  # what it holds itself is tied to them
        is_holder, is_constant = path in self._holders, _is_constant(module)
        if holds_parameters(module) and not (holds_kept or is_holder or is_constant):
            if self._shapes is None:
                hole = _Hole(found, is_wide=module is self._whole.model.get_output_embeddings())
            else:
                hole = _HoleOfImages(found, self._shapes.get_submodule(path))
            self._holes.append(hole)
            return hole
        found._buffers = dict(module._buffers)
        if is_constant:
            found._buffers |= module._parameters
            found._parameters = {}
            self._constants.append(found)
        elif is_holder and path not in self._keep:
            self._emptied.append((found, module._parameters))
        if found._buffers:
            self._filled.append((part, found))
        if isinstance(module, PreTrainedModel) and not found._parameters:  # is of the type of its first parameter
            self._typed.append(found)
        for name, value in vars(found).items():
            if value is self._whole.model.config:
                found.__dict__[name] = self._config
        return found

    def _stubs_of(self, path: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """A stub for each block of a list; those that are not in the chain, which nothing reads, pass on what they get.

        Where outputs of blocks are recorded, which goes by their class, stubs are of the class, too.
        """
        stubs = [self._stubs[path].get(place) or _Stub(*self._behind[path]) for place in range(len(blocks))]
        for stub, block in zip(stubs, blocks, strict=True):
            stub.stands_for = _Whole(block)
            if self._records_outputs:
                stub.__class__ = type(type(block).__name__, (type(stub), type(block)), {})
        return stubs


def _is_constant(module: nn.Module) -> bool:
    """Whether the parameters of a module are not trained and of a class of a model's own, which knows their values."""
    own = list(module.parameters(recurse=False))
    is_trained = module.__dict__.get(BY_PLAN) or any(each.requires_grad for each in own)
    return bool(own) and _is_leaf_of_a_model(module) and not is_trained


def _is_leaf_of_a_model(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.") and not list(module.children())


def _frozen(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Zeros in the place of a parameter, without its memory."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(parameter.shape), requires_grad=False)


class _Whole:
    """A whole model or block, which a copy of what points to it does not copy."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_Whole":
        return self


class _Hole(nn.Module):
    """Stands where a module with parameters was: the same attributes, and blanks instead of results."""

    def __init__(self, module: nn.Module, *, is_wide: bool = False) -> None:
        super().__init__()
        self._is_wide, self._is_table = is_wide, isinstance(module, nn.Embedding)
        kept = {name: value for name, value in vars(module).items() if name not in vars(self)}
        self.__dict__.update(kept)
        self._modules = dict(module._modules)
        self._width = _width(module)
        self._is_own = _is_leaf_of_a_model(module)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._module = _Whole(module)
        self.__dict__.update({name: None for name, each in module._parameters.items() if each is None})
        self._is_empty = True

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """A blank of the shape that the module would return."""
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor)]
        if not tensors or (self._is_own and len(tensors) > 1):
            return self._as_made(*arguments, **named)
        given = tensors[0]
        if self._width is None:
            return given
        is_hidden = given.is_floating_point() and (given.ndim > 2 or not self._is_table)  # [B, S] of any type are ids
        shape = (*(given.shape[:-1] if is_hidden else given.shape), self._width)
        if self._is_wide:  # of the vocabulary's width, which would fill the memory
            return torch.zeros((), dtype=self.dtype, device=given.device).expand(shape)
        return torch.zeros(shape, dtype=self.dtype, device=given.device)  # models write into some

    def __getattr__(self, name: str) -> Any:
        """A blank for a parameter; whatever else a table is asked to do, it does as it does its work."""
        whole = self.__dict__.get("_module")
        if whole is not None and name in whole.model._parameters:
            return self._blank(whole.model._parameters[name])
        if whole is not None and callable(getattr(type(whole.model), name, None)):
            return self.forward
        return super().__getattr__(name)

    def empty(self) -> None:
        """Has tensors without entries in the place of parameters: models write first values into some."""
        self._is_empty = True

    def become(self, dtype: torch.dtype, device: torch.device) -> None:
        """Makes blanks of a type and on a device from here on."""
        self.dtype, self.device, self._is_empty = dtype, device, False

    def _blank(self, parameter: Tensor) -> Tensor:
        """In the place of a parameter, without its memory."""
        if self._is_empty:
            return torch.empty((0,), dtype=parameter.dtype)
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(parameter.shape)

    def _as_made(self, *arguments: Any, **named: Any) -> Any:
        """What the module makes with blanks as its parameters: tables of positions of sizes alone."""
        module = copy.copy(self._module.model)
        module._parameters = {n: None if each is None else self._blank(each) for n, each in module._parameters.items()}
        return module(*arguments, **named)


class _HoleOfImages(_Hole):
    """As a hole; the shapes are those that the module makes of tensors without values."""

    def __init__(self, module: nn.Module, shaped: nn.Module) -> None:
        super().__init__(module)
        self._shaped = _Whole(shaped)

    @torch.no_grad()
    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Blanks of the shapes that the module would return."""
        given = next(each for each in (*arguments, *named.values()) if isinstance(each, Tensor))
        with _disable_current_modes():  # nobody counts it
            places, names = pytree.tree_map_only(Tensor, _on_meta, (arguments, named))
            made = self._shaped.model(*places, **names)
        options = {"dtype": self.dtype, "device": given.device}
        return pytree.tree_map_only(Tensor, lambda each: torch.zeros(each.shape, **options), made)


def _on_meta(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def holds_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own: not those that it only points to in a module below it."""
    own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
    return bool(own - {id(parameter) for child in module.children() for parameter in child.parameters()})


def _width(module: nn.Module) -> int | None:
    """The last dim of what a table or a matrix returns; None where the shape stays."""
    width = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)
    return width if isinstance(width, int) else None


class ReachedError(Exception):
    """A block was reached behind which nothing is asked for; what it was given."""

    def __init__(self, call: BlockCall, arguments: BlockArguments) -> None:
        super().__init__()
        self.call, self.arguments = call, arguments


class _Stub(nn.Module):
    """Stands where a block was, and passes the hidden state on; what else a model asks of the block the block tells."""

    stands_for: "_Whole | None" = None

    def __init__(self, split: ModelSplit, layer: int) -> None:
        super().__init__()
        self._call = split.call_of(layer)
        self._encoder = split.reads_encoded(layer)
        self._shape = split.kinds[split.layers[layer]].shape

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.stands_for is None:
                raise
            return getattr(self.stands_for.model, name)

    def forward(self, *places: Any, **names: Any) -> Any:
        """What the block would return, had it nothing to compute."""
        hidden = self._call.hidden((places, names))
        if self._shape and hidden.shape[1:] != self._shape:
            hidden = hidden.new_zeros((len(hidden), *self._shape))
        return self._call.returned(hidden)


class Stop(_Stub):
    """Ends the forward pass where the block would begin."""

    def forward(self, *places: Any, **names: Any) -> Any:
        """Nothing comes back."""
        raise ReachedError(self._call, (places, names))


class Give(_Stub):
    """Passes on what it was told to in the place of what the block is given."""

    hidden: Tensor | None = None

    def forward(self, *_places: Any, **_names: Any) -> Any:
        """What was told, as the block returns it."""
        assert self.hidden is not None
        return self._call.returned(self.hidden)


class _Record(_Stub):
    _found: BlockArguments | None = None
    is_last = False
    """Whether nothing behind it is asked for."""

    def __init__(self, split: ModelSplit, layer: int) -> None:
        super().__init__(split, layer)
        self._flows = [self._call, *([self._encoder.reads] if self._encoder else [])]
        streams = [split.streams[number] for number in split.read_by(layer)]
        self._flows += [each.reads for each in streams if each.entry is None]
        self._entries = [(str(each.argument), each.entry[0]) for each in split.streams if each.entry]

    def forward(self, *places: Any, **names: Any) -> Any:
        self._found = places, names
        if self.is_last:
            raise ReachedError(self._call, (places, names))
        return super().forward(*places, **names)

    def take(self) -> BlockArguments:
        """All that the block was given; forgotten here."""
        found, self._found = self._found, None
        assert found is not None, "the model has not run the block"
        return found

    def take_sides(self) -> BlockArguments:
        """The same without what flows along the chain."""
        found = self.take()
        for each in self._flows:
            found = each.with_hidden(found, None)
        for name, key in self._entries:
            if key in (mapping := found[1].get(name, {})):
                del mapping[key]
        return found


def recording_stubs(split: ModelSplit, layers: Collection[int]) -> dict[int, _Record]:
    """Stubs for these layers that record what they are given; nothing behind the last is asked for."""
    found = {layer: _Record(split, layer) for layer in sorted(layers)}
    found[max(layers)].is_last = True
    return found
