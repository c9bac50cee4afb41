"""Recording of one forward pass of a user's own module without values: calls, operations, parameters.

Every tensor is recorded with its origin, which distinguishes block arguments made before the first block, by another
block, or between two blocks. A pattern that prevents a split raises an error as soon as it is found.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from steelyard.errors import UserError, first_line
from steelyard.model.split import BlockArguments
from steelyard.modules.known_values import META
from steelyard.modules.not_split import refused
from steelyard.modules.own_pieces import Loss, loss_of
from steelyard.modules.recording import keyword_of
from steelyard.modules.stubbed_model import call_arguments

Origin = tuple[str, int, int]
"""Origin of an activation: ``given`` and the first block that reads it, or ``made`` and its block; then its place."""


_BETWEEN = "between two blocks"
_RETURN = "return the tensor from that block, with its other results"
_WRITTEN = (bool, int, float, complex, str, bytes, slice, type(None), type(Ellipsis), torch.dtype, torch.device)
"""Types of arguments whose text is the same in every process."""


@dataclass(slots=True)
class Made:
    """A recorded tensor and its origin: the number of blocks that had ended, and the operation that made it."""

    tensor: Tensor
    after: int
    inside: bool
    what: str
    version: int
    origin: Origin | None = None


@dataclass(slots=True)
class Call:
    """One call of a block."""

    given: BlockArguments
    reads: list[tuple[int, Origin]] = field(default_factory=list)
    outputs: Any = None


@dataclass(slots=True, kw_only=True)
class Seen:
    """Record of a forward pass of a model; blocks are named by their paths and parameters by identity."""

    model: nn.Module
    blocks: Sequence[str]
    calls: list[Call]
    used: dict[int, dict[int, str]] = field(default_factory=dict)
    """Uses of each parameter outside blocks: number of blocks that had ended, and the first operation there."""
    head_reads: list[Origin] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    """Operations outside blocks."""
    work: list[Hashable] = field(default_factory=list)
    """All operations with their arguments, in which tensors are numbered."""
    called: list[str] = field(default_factory=list)
    keywords: dict[str, str | None] = field(default_factory=dict)


def record(model: nn.Module, sample: Any, num_samples: int, loss: Loss | None, blocks: Sequence[str]) -> Seen:
    """Record one forward pass on tensors without values; raises `InvalidModelError` if it fails or does not split."""
    blank = pytree.tree_map_only(
        Tensor, lambda each: torch.empty((num_samples, *each.shape[1:]), dtype=each.dtype, device=META), sample
    )
    recorder = _Recorder(model, blocks)
    inputs, targets = blank if loss is not None else (blank, None)
    for each in pytree.tree_leaves(blank):
        if isinstance(each, Tensor):
            recorder.note(each, "the samples")
    places, names = call_arguments(inputs)
    buffers = [(path, each, each._version) for path, each in model.named_buffers() if each.is_floating_point()]
    with recorder.watching():
        try:
            with recorder:
                outputs = model(*places, **names)
                recorder.ends(outputs)
                scalar = loss_of(outputs, targets, loss)
        except UserError:
            raise
        except Exception as error:
            raise refused(
                recorder.place,
                f"an operation that needs tensor values or fails ({type(error).__name__}: {first_line(error)[:160]})",
                "a forward pass whose operations do not depend on tensor values and run on the sample's shapes",
                "move constants to the device of the samples: constant.to(x.device)"
                if "expected device meta" in str(error)
                else "compute such branches with masks (torch.where), or outside the module and pass the result",
            ) from error
    recorder.ends(scalar)
    for path, buffer, version in buffers:
        if buffer._version != version:
            raise refused(
                path,
                "a buffer that the forward pass changes in place",
                "buffers that samples do not change, because each process sees others",
                "keep such statistics outside the module, or compute them from all samples after a step",
            )
    return recorder.seen


class _Recorder(TorchFunctionMode):
    """Mode that records every operation of a forward pass: the origin of each tensor and the use of parameters."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self._model, self._blocks = model, blocks
        self.seen = Seen(model=model, blocks=blocks, calls=[Call(((), {})) for _ in blocks])
        self._made: dict[int, Made] = {}
        self._parameters = {id(each): each.requires_grad for each in model.parameters()}
        self._numbers: dict[int, int] = {}
        self._stack: list[str] = []
        self._block: int | None = None
        self._num_ended = 0

    @property
    def place(self) -> str:
        """Path of the module whose forward pass is running."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Install hooks on all modules within the context."""
        paths = {module: path for path, module in self._model.named_modules()}
        number_of = {self._model.get_submodule(path): number for number, path in enumerate(self._blocks)}

        def before(module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any]) -> None:
            self._stack.append(paths[module])
            self.seen.called.append(paths[module])
            self.seen.keywords[paths[module]] = keyword_of(places, names)
            if module in number_of:
                self._block_begins(number_of[module], (places, dict(names)))

        def after(module: nn.Module, _places: Any, _names: Any, outputs: Any) -> None:
            if module in number_of:
                self._block_ends(number_of[module], outputs)
            self._stack.pop()

        with ExitStack() as hooks:
            for module in paths:
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
            yield

    def note(self, tensor: Tensor, what: str) -> Made:
        """Record the origin of a tensor."""
        found = Made(tensor, self._num_ended, self._block is not None, what, tensor._version)
        self._made[id(tensor)] = found
        return found

    def ends(self, outputs: Any) -> None:
        """Record that the tensors the module returns are read after the last block."""
        for leaf in pytree.tree_leaves(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs):
            if isinstance(leaf, Tensor):
                self._read_outside(leaf, "the returned value")

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        name = getattr(func, "__name__", str(func))
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name  # an attribute, such as T
        self.seen.work.append((name, *kwargs, *map(self._written, pytree.tree_leaves((args, kwargs)))))
        if not made:
            return result
        what = f"{name} in {self.place or 'the module itself'}"
        if self._block is None:
            self.seen.operations.append(what)
            for each in pytree.tree_leaves((args, kwargs)):
                if isinstance(each, Tensor):
                    self._read_outside(each, what)
        for each in made:
            known = self._made.get(id(each))
            if known is None or known.version != each._version:
                self.note(each, what)
        return result

    def _written(self, argument: Any) -> Hashable:
        """Return an argument of an operation without addresses in memory."""
        if not isinstance(argument, Tensor):
            return repr(argument) if isinstance(argument, _WRITTEN) else type(argument).__name__
        is_kept = id(argument) in self._made or id(argument) in self._parameters
        return self._numbers.setdefault(id(argument), len(self._numbers)) if is_kept else tuple(argument.shape)

    def _read_outside(self, tensor: Tensor, what: str) -> None:
        if id(tensor) in self._parameters:
            self.seen.used.setdefault(id(tensor), {}).setdefault(self._num_ended, what)
            return
        known = self._made.get(id(tensor))
        if known is None or not self._blocks or self._num_ended < len(self._blocks) or not tensor.requires_grad:
            return
        if known.origin is not None:
            self.seen.head_reads.append(known.origin)
        elif known.after < len(self._blocks):
            between = "before the first block" if known.after == 0 else _BETWEEN
            where = "inside a block" if known.inside else between
            raise refused(
                what.partition(" in ")[2],
                f"{what.partition(' in ')[0]} after the blocks, of the result of {known.what} {where}",
                "tensors that depend on parameters and reach the part after the blocks only through them",
                _RETURN
                if known.inside
                else "pass the tensor to a block as an argument (and use the same tensor afterwards); if it "
                "belongs to another list of blocks, name every list: blocks=(…, …)",
            )

    def _block_begins(self, block: int, given: BlockArguments) -> None:
        path = self._blocks[block]
        if self._block is not None:
            raise refused(path, f"a call inside another block, {self._blocks[self._block]}", "no nested blocks")
        if block != self._num_ended:
            raise refused(path, "a block that is called out of order or twice", "blocks that are called once each")
        call = self.seen.calls[block] = Call(given)
        for place, leaf in enumerate(pytree.tree_leaves(given)):
            if isinstance(leaf, Tensor):
                self._given(call, block, place, leaf)
        self._block = block

    def _given(self, call: Call, block: int, place: int, leaf: Tensor) -> None:
        known, path = self._made.get(id(leaf)), self._blocks[block]
        if self._parameters.get(id(leaf)):
            raise refused(path, "a parameter of the module among a block's arguments", "parameters inside blocks")
        if known is not None and known.version != leaf._version:
            raise refused(path, f"an argument that was changed in place after {known.what}", "new tensors")
        if not leaf.requires_grad:
            if known is not None and (known.inside or (known.after > 0 and known.origin is not None)):
                raise refused(path, f"an argument without gradient from a block ({known.what})", "gradients")
            return
        if known is None:
            known = self.note(leaf, "an unrecorded operation")
            known.after = 0
        if known.origin is None:
            if known.inside or known.after > 0:
                raise refused(
                    path,
                    f"an argument that is made by {known.what} {'inside a block' if known.inside else _BETWEEN}",
                    "block arguments that other blocks return or that are made before the first block",
                    _RETURN
                    if known.inside
                    else "move the operation into the block (for a skip connection, pass both tensors to the block)",
                )
            known.origin = ("given", block, place)
        call.reads.append((place, known.origin))

    def _block_ends(self, block: int, outputs: Any) -> None:
        path = self._blocks[block]
        self._block, self._num_ended = None, block + 1
        call = self.seen.calls[block]
        call.outputs = outputs
        entries = outputs if isinstance(outputs, tuple | list) else (outputs,)
        if not any(isinstance(each, Tensor) for each in entries):
            raise refused(path, f"a block that returns {type(outputs).__name__}", "a tensor, or a tuple of tensors")
        for leaf in pytree.tree_leaves(call.given):
            known = self._made.get(id(leaf))
            if known is not None and leaf._version != known.version:
                raise refused(path, "an argument that the block changes in place", "x = x + y instead of x += y")
        tensors = [each for each in entries if isinstance(each, Tensor)]
        if len({*map(id, tensors)}) < len(tensors):
            raise refused(
                path, "a block that returns a tensor twice", "each tensor once", "return it once, and reuse it"
            )
        for place, each in enumerate(tensors):
            if not each.requires_grad:
                raise refused(path, "a result that depends on no parameter", "results with gradients")
            made = self.note(each, f"block {path}")
            made.origin = ("made", block, place)
        if not all(isinstance(each, Tensor) or each is None for each in entries):
            raise refused(path, "a result that is not a tensor", "a tensor, or a tuple of tensors and None")
