"""Layers of a user's own module: the embedding and head run the module's own forward pass without its blocks.

The forward pass runs in three ways. The embedding's pass ends when all its outgoing activations are known. The head's
pass runs the part before the blocks with parameters without values, and the part after the last block with real ones.
The other arguments of blocks (masks, positions, rotary embeddings) come from a pass in which no parameter has values
(`steelyard.modules.stubbed_model`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.family import Context, Layer, LayerRole, Run
from steelyard.model.own import OwnLayerType, OwnSplit
from steelyard.model.read import planned_model
from steelyard.model.split import BlockArguments
from steelyard.modules.known_values import META, Blank, Blanks
from steelyard.modules.not_split import HINT
from steelyard.modules.stubbed_model import ReachedError, StubbedOwn, Swapped, move_module

Loss = Callable[[Any, Any], Tensor]


class OwnModel:
    """A user's own module with its loss and its split; its layers are built on demand.

    ``sample`` is the data of some samples, if known.
    """

    def __init__(self, module: nn.Module, split: OwnSplit, loss: Loss | None, sample: Any = None) -> None:
        self.module, self.split, self.loss, self.sample = module, split, loss, sample
        self.config = None
        self._ends: dict[int, nn.Module] = {}

    @property
    def chain(self) -> ModelChain:
        """Chain of layers."""
        return planned_model(type(self.module).__name__, None, self.split)

    def layer(self, number: int) -> dict[str, nn.Module]:
        """Return the modules of a layer of the chain; every layer but the first that shares a parameter has a copy."""
        own = self.split
        if 0 < number <= own.num_blocks:
            return {"block": self.module.get_submodule(own.blocks[number - 1])}
        if number not in self._ends:
            made = StubbedOwn(self.module, own, keep=own.head if number else own.embedding).model
            for path in (path for copies in own.shared for layer, path in copies[1:] if layer == number):
                shared = made.get_parameter(path.partition(".")[2])
                own_copy = nn.Parameter(shared.detach().clone())
                for table in (module._parameters for module in made.modules()):
                    table.update({name: own_copy for name, each in table.items() if each is shared})
            self._ends[number] = made
        return {"model": self._ends[number]}

    def materialize(self, number: int, device: torch.device) -> None:
        """Move a layer to a device; parameters on the meta device get uninitialised memory there."""
        for module in self.layer(number).values():
            move_module(module, device)

    def run(self, number: int) -> Run:
        """Return the function that runs a layer."""
        role = self.split.type_of(number).role
        if role is LayerRole.BLOCK:
            return _Block(number, self.split.type_of(number))
        return _Embedding(self.split) if role is LayerRole.EMBEDDING else _Head(self.split, self.loss)

    def arguments(self, device: torch.device) -> "Arguments":
        """Return the source of the arguments of blocks on a device, except the activations."""
        return Arguments(self.module, self.split, device)

    def without_values(self) -> "OwnModel":
        """Return this model with a copy of the module on the meta device."""
        return OwnModel(meta_copy(self.module), self.split, self.loss, self.sample)

    def blank_samples(self, count: int) -> Any:
        """Return the data of ``count`` samples, filled with zeros."""
        return pytree.tree_map_only(
            Tensor, lambda each: torch.zeros((count, *each.shape[1:]), dtype=each.dtype, device="cpu"), self.sample
        )


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device, without copying values."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        blank = torch.empty_like(parameter, device=META)
        memo[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
    memo |= {id(buffer): torch.empty_like(buffer, device=META) for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


class OwnBatch:
    """Samples of one microbatch that a rank holds for some of its layers, as read from the data."""

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
        """Inputs of the module, with float32 tensors in the compute dtype; other dtypes are kept."""
        given = self._read[0] if self._has_targets else self._read
        return pytree.tree_map_only(
            Tensor, lambda each: each.to(self._device, self.dtype if each.dtype == torch.float32 else each.dtype), given
        )

    @cached_property
    def targets(self) -> Any:
        """Targets of the loss function; None if the module returns its loss."""
        given = self._read[1] if self._has_targets else None
        return pytree.tree_map_only(Tensor, lambda each: each.to(self._device), given)

    def arguments(self, block: int) -> BlockArguments:
        """Return the arguments of a block; the caller replaces the activations among them."""
        if self._found is None:
            assert self._arguments is not None, "asked for by a block"
            self._found = self._arguments(self.inputs, self.num_samples, self.dtype)
        return self._found[block]


def parts_of(value: Any, count: int) -> Iterator[Any]:
    """Yield ``count`` parts of the data, each with the same number of samples."""
    total = next(each.shape[0] for each in pytree.tree_leaves(value) if isinstance(each, Tensor))
    for first in range(0, total, total // count):
        yield pytree.tree_map_only(Tensor, lambda each, first=first: each[first : first + total // count], value)


class Arguments:
    """Source of the arguments of each block, by its number, for the inputs of some samples."""

    def __init__(self, module: nn.Module, own: OwnSplit, device: torch.device) -> None:
        self._own, self._device = own, device
        self._stubbed = StubbedOwn(module, own, keep=())
        move_module(self._stubbed.model, device)
        self._kept: dict[int, dict[int, BlockArguments]] = {}
        self._reads_samples = any(
            layer_type.reads_samples for layer_type in own.kinds if layer_type.role is LayerRole.BLOCK
        )

    @torch.no_grad()
    def __call__(self, inputs: Any, num_samples: int, dtype: torch.dtype) -> Mapping[int, BlockArguments]:
        """Return the arguments of each block; they are cached if no block reads the samples."""
        if num_samples in self._kept:
            return self._kept[num_samples]
        found = self.seen(inputs, num_samples, dtype)
        for block, given in found.items():
            self._check(block, given)
        if not self._reads_samples:
            self._kept = {num_samples: found}
        return found

    def seen(self, inputs: Any, num_samples: int, dtype: torch.dtype = torch.float32) -> dict[int, BlockArguments]:
        """Return the arguments of each block, with or without values."""
        found: dict[int, BlockArguments] = {}

        def at(block: int, given: BlockArguments) -> None:
            found[block] = given
            if block == self._own.num_blocks - 1:
                raise ReachedError

        with Blanks():
            self._stubbed.run(inputs, num_samples, dtype, at)
        return found

    def _check(self, block: int, given: BlockArguments) -> None:
        layer_type = self._own.type_of(block + 1)
        flows = {leaf for leaf, _ in layer_type.reads}
        for place, leaf in enumerate(pytree.tree_leaves(given)):
            if isinstance(leaf, Blank) and place not in flows:
                raise InvalidModelError(
                    field=self._own.blocks[block],
                    found=f"an argument of shape {tuple(leaf.shape)} that depends on parameters but has no gradient",
                    expected="arguments computed only from samples and buffers, or with a gradient",
                    hint=HINT,
                )


class _Embedding:
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
                raise ReachedError
            if block == 0:
                blanks.enter_context(Blanks())

        with blanks:
            layer.model.stubbed.run(batch.inputs, batch.num_samples, batch.dtype, at)
        return _flow(found, batch.dtype)


class _Block:
    """One block, called as the module calls it, from incoming to outgoing activations."""

    def __init__(self, number: int, layer_type: OwnLayerType) -> None:
        self._number, self._layer_type = number, layer_type

    def prepare(self, context: Context) -> None:
        """Compute the arguments of the block that do not flow, which its batch then keeps."""
        context.batch[self._number].arguments(self._number - 1)

    def __call__(self, layer: Layer, flow: Any, context: Context) -> Any:
        batch = context.batch[self._number]
        given = flow if isinstance(flow, tuple) else (flow,)
        leaves, tree = pytree.tree_flatten(batch.arguments(self._number - 1))
        for leaf, place in self._layer_type.reads:
            leaves[leaf] = given[place]
        places, names = pytree.tree_unflatten(leaves, tree)
        made = returned_tensors(layer.block(*places, **names))
        return _flow(
            [(given if how == "given" else made)[place] for how, place in self._layer_type.goes_on], batch.dtype
        )


class _Head:
    """Head: from the activations after the last block to this rank's share of the loss."""

    def __init__(self, own: OwnSplit, loss: Loss | None) -> None:
        self._own, self._loss = own, loss

    def __call__(self, layer: Layer, flow: Any, context: Context) -> Tensor:
        if not torch.is_grad_enabled():  # evaluation also finds the loss by its gradient
            with torch.enable_grad():
                given = pytree.tree_map(lambda each: each.detach().requires_grad_(), flow)
                return self(layer, given, context).detach()
        given = flow if isinstance(flow, tuple) else (flow,)
        batch, last = context.batch[self._own.num_blocks + 1], self._own.num_blocks - 1
        swapped: dict[int, Tensor] = {}
        kept: list[Any] = []
        """Swapped tensors, kept alive so that no other tensor gets their id."""

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
                    after.enter_context(Swapped(swapped))
            return tensors

        with ExitStack() as after, ExitStack() as blanks:
            blanks.enter_context(Blanks())
            outputs = layer.model.stubbed.run(batch.inputs, batch.num_samples, batch.dtype, at, made)
            loss = loss_of(outputs, batch.targets, self._loss)
        if isinstance(loss, Blank):
            raise InvalidModelError(
                field="forward",
                found="a loss that reads a tensor computed from parameters before the blocks, but without a gradient",
                expected="tensors with gradients wherever they depend on parameters",
                hint=HINT,
            )
        return loss.float() * (batch.num_samples / context.num_targets)


def loss_of(outputs: Any, targets: Any, loss: Loss | None) -> Tensor:
    """Return the mean loss of some samples; raises `InvalidModelError` if there is no loss or more than one."""
    if loss is not None:
        narrow = torch.bfloat16, torch.float16
        in_fp32 = pytree.tree_map_only(Tensor, lambda each: each.float() if each.dtype in narrow else each, outputs)
        outputs = loss(in_fp32, targets)
    leaves = pytree.tree_leaves(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs)
    found = [
        each
        for each in leaves
        if isinstance(each, Tensor) and each.dim() == 0 and each.is_floating_point() and each.requires_grad
    ]
    if len(found) != 1:
        what = "loss=" if loss is not None else "forward"
        shapes = (
            f"a tensor of shape {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            for each in leaves[:4]
        )
        shown = ", ".join(shapes) or "nothing"
        raise InvalidModelError(
            field=what,
            found=f"{shown}: {len(found)} losses",
            expected="one scalar tensor, the mean loss over the samples",
            hint="pass loss=, a function of the module's outputs and the targets",
        )
    return found[0]


def returned_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors in a block's result: a single tensor, or those of a tuple or list."""
    return [each for each in (outputs if isinstance(outputs, tuple | list) else (outputs,)) if isinstance(each, Tensor)]


def _flow(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | tuple[Tensor, ...]:
    converted = tuple(each.to(dtype).contiguous() for each in tensors if each is not None)
    return converted if len(converted) > 1 else converted[0]


def tensors_of_batch(batch: OwnBatch, blocks: Sequence[int]) -> Iterator[Tensor]:
    """Yield the tensors of a batch's samples and of the arguments of blocks."""
    given = [batch.arguments(block) for block in blocks]
    for leaf in pytree.tree_leaves((batch.inputs, batch.targets, given)):
        if isinstance(leaf, Tensor):
            yield leaf
