"""The layers of a user's own module: embedding and head are the module's own forward pass, with its blocks left out.

Three passes are made of it. The embedding's ends when all that flows out of it has been seen. The head's goes through
the part before the blocks with parameters that have no values, and from the last block on with real ones. What blocks
are given beside what flows (masks, positions, rotary embeddings) comes from a pass in which no parameter has values.

Tensors without values are on the meta device; an operation that is given one returns one (`_Blanks`). So what does not
depend on parameters is computed as ever, and what does can never pass for a value: where it would be needed, there is
an error and no wrong result.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from steelyard.errors import InvalidModelError
from steelyard.model.family import Context, Layer, LayerRole, Run
from steelyard.model.own import OwnKind, OwnSplit
from steelyard.model.split import BlockArguments

META = torch.device("meta")
HINT = "docs/your-own-model.md says what a module must be like"
Loss = Callable[[Any, Any], Tensor]


class OwnModel:
    """A user's own module with its loss, and how it splits; its layers are made of it when they are asked for.

    ``sample`` is what is read for some samples, where that is known.
    """

    def __init__(self, module: nn.Module, own: OwnSplit, loss: Loss | None, sample: Any = None) -> None:
        self.module, self.own, self.loss, self.sample = module, own, loss, sample
        self.config = None
        self._layers: dict[int, dict[str, nn.Module]] = {}
        self._holders: dict[int, int] = {}
        """For each parameter, by identity, the layer that has it."""

    @property
    def name(self) -> str:
        """The class of the module."""
        return type(self.module).__name__

    def layer(self, number: int) -> dict[str, nn.Module]:
        """The modules of a layer of the chain. Of a parameter that layers share, each but the first has a copy."""
        if number not in self._layers:
            self._layers[number] = self._made(number)
        return self._layers[number]

    def _made(self, number: int) -> dict[str, nn.Module]:
        own = self.own
        if 0 < number <= own.num_blocks:
            return {"block": self.module.get_submodule(own.blocks[number - 1])}
        made = shell_of(self.module, own, keep=own.head if number else own.embedding)
        for path in (path for copies in own.shared for layer, path in copies[1:] if layer == number):
            _replace(made, made.get_parameter(path.partition(".")[2]))
        return {"model": made}

    def materialize(self, number: int, device: torch.device) -> None:
        """Moves a layer to a device; parameters on the meta device get memory there, and no values."""
        for module in self.layer(number).values():
            _move(module, device)

    def run(self, number: int) -> Run:
        """How a layer runs."""
        role = self.own.kind(number).role
        if role is LayerRole.BLOCK:
            return _Block(number, self.own.kind(number))
        return _Embedding(self.own) if role is LayerRole.EMBEDDING else _Head(self.own, self.loss)

    def arguments(self, device: torch.device) -> "Arguments":
        """What gives blocks on a device what they read beside what flows."""
        return Arguments(self.module, self.own, device)

    def without_values(self) -> "OwnModel":
        """The same of a module on the meta device."""
        return OwnModel(meta_copy(self.module), self.own, self.loss, self.sample)

    def blank_samples(self, count: int) -> Any:
        """What is read for so many samples, all of it zero."""
        return pytree.tree_map_only(
            Tensor, lambda each: torch.zeros((count, *each.shape[1:]), dtype=each.dtype, device="cpu"), self.sample
        )


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device, made without copying a value."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        blank = torch.empty_like(parameter, device=META)
        memo[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
    memo |= {id(buffer): torch.empty_like(buffer, device=META) for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def call_arguments(inputs: Any) -> BlockArguments:
    """What is given by place and by name, of the inputs that a sample has: a tensor, a tuple, or a dictionary."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


class OwnBatch:
    """The samples of one microbatch that a rank holds in some of its layers, as they are read."""

    def __init__(
        self, read: Any, own: OwnSplit, arguments: "Arguments | None", *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.num_samples = next(each.shape[0] for each in pytree.tree_leaves(read) if isinstance(each, Tensor))
        self._read, self._has_targets, self._device = read, own.has_loss, device
        self._arguments = arguments
        self._found: Mapping[int, BlockArguments] | None = None

    @cached_property
    def inputs(self) -> Any:
        """What the module is given, in the precision that it computes in; float64 stays as it is."""
        given = self._read[0] if self._has_targets else self._read
        return pytree.tree_map_only(Tensor, self._converted, given)

    @cached_property
    def targets(self) -> Any:
        """What the loss function compares with; None where the module returns its loss."""
        given = self._read[1] if self._has_targets else None
        return pytree.tree_map_only(Tensor, lambda each: each.to(self._device), given)

    def _converted(self, each: Tensor) -> Tensor:
        return each.to(device=self._device, dtype=self.dtype if each.dtype == torch.float32 else each.dtype)

    def arguments(self, block: int) -> BlockArguments:
        """What a block is given; what flows is to be put in its places."""
        if self._found is None:
            assert self._arguments is not None, "asked for by a block"
            self._found = self._arguments(self.inputs, self.num_samples, self.dtype)
        return self._found[block]


class Arguments:
    """What blocks are given, by their number, for the inputs of some samples."""

    def __init__(self, module: nn.Module, own: OwnSplit, device: torch.device) -> None:
        self._own, self._device = own, device
        self._shell = shell_of(module, own, keep=())
        _move(self._shell, device)
        self._kept: dict[int, dict[int, BlockArguments]] = {}
        self._reads_samples = any(kind.reads_samples for kind in own.kinds if kind.role is LayerRole.BLOCK)

    @torch.no_grad()
    def __call__(self, inputs: Any, num_samples: int, dtype: torch.dtype) -> Mapping[int, BlockArguments]:
        """For every block its arguments; found once where they do not depend on the samples."""
        if num_samples in self._kept:
            return self._kept[num_samples]
        found = self.seen(inputs, num_samples, dtype)
        for block, given in found.items():
            self._check(block, given)
        if not self._reads_samples:
            self._kept = {num_samples: found}
        return found

    def seen(self, inputs: Any, num_samples: int, dtype: torch.dtype = torch.float32) -> dict[int, BlockArguments]:
        """For every block its arguments, whether they have values or not."""
        found: dict[int, BlockArguments] = {}

        def at(block: int, given: BlockArguments) -> None:
            found[block] = given
            if block == self._own.num_blocks - 1:
                raise _SeenError

        with _Blanks():
            _run(self._shell, inputs, num_samples, dtype, at)
        return found

    def _check(self, block: int, given: BlockArguments) -> None:
        kind = self._own.kind(block + 1)
        flows = {leaf for leaf, _ in kind.reads}
        for place, leaf in enumerate(pytree.tree_leaves(given)):
            if isinstance(leaf, Tensor) and leaf.device == META != self._device and place not in flows:
                raise InvalidModelError(
                    field=self._own.blocks[block],
                    found=f"an argument of shape {tuple(leaf.shape)} that depends on parameters, and has no gradient",
                    expected="arguments that are made of samples and buffers, or that gradients flow through",
                    hint=HINT,
                )


class _Embedding:
    """Samples to what flows out of the embedding."""

    def __init__(self, own: OwnSplit) -> None:
        self._own = own

    def __call__(self, layer: Layer, _places: Tensor, context: Context) -> Any:
        batch = context.batch[0]
        found: list[Tensor | None] = [None] * len(self._own.first_read)
        blanks = ExitStack()

        def at(block: int, given: BlockArguments) -> None:
            leaves = pytree.tree_leaves(given)
            for place, (first, leaf) in enumerate(self._own.first_read):
                if first == block:
                    found[place] = leaves[leaf]
            if all(each is not None for each in found):
                raise _SeenError
            if block == 0:
                blanks.enter_context(_Blanks())

        with blanks:
            _run(layer.model, batch.inputs, batch.num_samples, batch.dtype, at)
        return _flow(found, batch.dtype)


class _Block:
    """What flows in to what flows out, through one block called as the module calls it."""

    def __init__(self, number: int, kind: OwnKind) -> None:
        self._number, self._kind = number, kind

    def __call__(self, layer: Layer, flow: Any, context: Context) -> Any:
        batch = context.batch[self._number]
        given = flow if isinstance(flow, tuple) else (flow,)
        leaves, tree = pytree.tree_flatten(batch.arguments(self._number - 1))
        for leaf, place in self._kind.reads:
            leaves[leaf] = given[place]
        places, names = pytree.tree_unflatten(leaves, tree)
        made = returned_tensors(layer.block(*places, **names))
        return _flow([(given if how == "given" else made)[place] for how, place in self._kind.goes_on], batch.dtype)


class _Head:
    """What flows out of the last block to this rank's share of the loss."""

    def __init__(self, own: OwnSplit, loss: Loss | None) -> None:
        self._own, self._loss = own, loss

    def __call__(self, layer: Layer, flow: Any, context: Context) -> Tensor:
        given = flow if isinstance(flow, tuple) else (flow,)
        batch, last = context.batch[self._own.num_blocks + 1], self._own.num_blocks - 1
        swapped: dict[int, Tensor] = {}
        kept: list[Any] = []
        """Keeps what is swapped alive, so that no other tensor has its identity."""

        def at(block: int, arguments: BlockArguments) -> None:
            leaves = pytree.tree_leaves(arguments)
            kept.append(leaves)
            for tensor, (how, where, leaf) in zip(given, self._own.last_made, strict=True):
                if how == "given" and where == block:
                    swapped[id(leaves[leaf])] = tensor

        def made(block: int, tensors: list[Tensor]) -> list[Tensor]:
            kept.append(tensors)
            mine = [
                (tensor, leaf)
                for tensor, (how, where, leaf) in zip(given, self._own.last_made, strict=True)
                if (how, where) == ("made", block)
            ]
            for tensor, leaf in mine:
                if block == last:
                    tensors[leaf] = tensor
                else:
                    swapped[id(tensors[leaf])] = tensor
            if block == last:
                blanks.close()
                if swapped:
                    after.enter_context(_Swapped(swapped))
            return tensors

        with ExitStack() as after, ExitStack() as blanks:
            blanks.enter_context(_Blanks())
            outputs = _run(layer.model, batch.inputs, batch.num_samples, batch.dtype, at, made)
            loss = loss_of(outputs, batch.targets, self._loss)
        return loss.float() * (batch.num_samples / context.num_targets)


def loss_of(outputs: Any, targets: Any, loss: Loss | None) -> Tensor:
    """The mean loss of some samples; raises `InvalidModelError` where there is none, or more than one."""
    if loss is not None:
        outputs = loss(pytree.tree_map_only(Tensor, _in_fp32, outputs), targets)
    found = [each for each in pytree.tree_leaves(_entries(outputs)) if _is_loss(each)]
    if len(found) != 1:
        what = "loss=" if loss is not None else "forward"
        shown = ", ".join(_shown(each) for each in pytree.tree_leaves(_entries(outputs))[:4]) or "nothing"
        raise InvalidModelError(
            field=what,
            found=f"{shown}: {len(found)} losses",
            expected="one tensor of a single number, the mean loss of the samples",
            hint="give loss=, a function of the module's outputs and the targets that are read beside its inputs",
        )
    return found[0]


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() and value.requires_grad


def _entries(outputs: Any) -> Any:
    return tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def returned_tensors(outputs: Any) -> list[Tensor]:
    """The tensors among what a block returns: one alone, or those of a tuple."""
    return [each for each in (outputs if isinstance(outputs, tuple | list) else (outputs,)) if isinstance(each, Tensor)]


def _flow(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | tuple[Tensor, ...]:
    converted = tuple(each.to(dtype).contiguous() for each in tensors if each is not None)
    return converted if len(converted) > 1 else converted[0]


def _replace(shell: nn.Module, parameter: nn.Parameter) -> None:
    """Gives a shell a copy of a parameter, wherever it has it."""
    own = nn.Parameter(parameter.detach().clone())
    for module in shell.modules():
        for name, each in module._parameters.items():
            if each is parameter:
                module._parameters[name] = own


def _move(module: nn.Module, device: torch.device) -> None:
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


class _SeenError(Exception):
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
    """Stands where a block was, and returns tensors of its shapes without values."""

    def __init__(self, block: int, kind: OwnKind, passing: _Passing) -> None:
        super().__init__()
        self._block, self._kind, self._passing = block, kind, passing

    def forward(self, *places: Any, **names: Any) -> Any:
        """What the block would return."""
        passing, kind = self._passing, self._kind
        passing.at(self._block, (places, names))
        blanks = [_nothing((passing.num_samples, *shape), passing.dtype) for shape in kind.makes]
        made = iter(passing.made(self._block, blanks))
        return next(made) if kind.returns is None else tuple(next(made) if each else None for each in kind.returns)


def _run(
    shell: nn.Module,
    inputs: Any,
    num_samples: int,
    dtype: torch.dtype,
    at: Callable[[int, BlockArguments], None],
    made: Callable[[int, list[Tensor]], list[Tensor]] = lambda _block, tensors: tensors,
) -> Any:
    passing: _Passing = shell.__dict__["passing"]
    passing.begin(num_samples, dtype)
    passing.at, passing.made = at, made
    places, names = call_arguments(inputs)
    try:
        return shell(*places, **names)
    except _SeenError:
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

    def copied(each: nn.Module, path: str) -> nn.Module:
        if path in stubs:
            return stubs[path]
        if id(each) in made:
            return made[id(each)]
        found = made[id(each)] = copy.copy(each)
        found._buffers, found._parameters = dict(each._buffers), {}
        found._non_persistent_buffers_set = set(each._non_persistent_buffers_set)
        for name, parameter in each._parameters.items():
            if parameter is None or f"{path}.{name}".removeprefix(".") in keep:
                found._parameters[name] = parameter
            elif not parameter.requires_grad:
                found._buffers[name] = parameter.detach()
                found._non_persistent_buffers_set.add(name)
            else:
                found.__dict__[name] = _nothing(parameter.shape, parameter.dtype)
                passing.blanks.append((found, name))
        found._modules = {
            name: child and copied(child, f"{path}.{name}".removeprefix(".")) for name, child in each._modules.items()
        }
        return found

    with _disable_current_modes():  # tensors are taken as they are, also where new ones are fake
        root = copied(module, "")
    root.__dict__["passing"] = passing
    return root


class _Blanks(TorchDispatchMode):
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


class _Swapped(TorchFunctionMode):
    """Within it operations are given other tensors in the place of some, which are known by identity."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._swapped, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _swapped(self, tensor: Tensor) -> Tensor:
        return self._tensors.get(id(tensor), tensor)


def tensors_of_batch(batch: OwnBatch, blocks: Sequence[int]) -> Iterator[Tensor]:
    """The samples of a batch, and what blocks are given beside what flows."""
    given = [batch.arguments(block) for block in blocks]
    for leaf in pytree.tree_leaves((batch.inputs, batch.targets, given)):
        if isinstance(leaf, Tensor):
            yield leaf
