"""Finds how a user's own module splits into embedding, blocks and head, by running it without values.

A copy on the meta device is run on samples without values, with hooks on its modules and a mode that sees every
operation. Blocks are the items of a list, dictionary or sequence of modules, each called once. A tensor that depends on
parameters and is read by a later block, or after the last one, flows along the chain if it was made before the first
block or by a block; made between two blocks it has no layer, and the module is refused. The same pass on another number
of samples must show the same operations, and all that flows must have the samples as its first dim.

What is refused is one error that names the place: the path of a module, and the operation.
"""

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from steelyard.errors import InvalidModelError, UserError
from steelyard.model.family import LayerRole
from steelyard.model.own import OwnInput, OwnKind, OwnSplit
from steelyard.model.split import BlockArguments
from steelyard.modules.own_pieces import HINT, META, Loss, OwnModel, call_arguments, loss_of, meta_copy
from steelyard.modules.structure import signature

Origin = tuple[str, int, int]
"""What flows: ``given`` and the first block that reads it, or ``made`` and the block that makes it; and its place."""
_BEFORE = -1


@dataclass(slots=True)
class _Made:
    """A tensor that was seen, and where it came from: how many blocks had ended, and what made it."""

    tensor: Tensor
    after: int
    inside: bool
    what: str
    version: int
    origin: Origin | None = None


@dataclass(slots=True)
class _Call:
    """One call of a block."""

    given: BlockArguments
    reads: list[tuple[int, Origin]] = field(default_factory=list)
    outputs: Any = None


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What a pass showed; parameters by identity."""

    calls: list[_Call] = field(default_factory=list)
    used: dict[int, dict[int, str]] = field(default_factory=dict)
    """Of each parameter outside blocks after how many blocks it was used, and where."""
    head_reads: list[Origin] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    keywords: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSplit:
    """A split, and how the modules in blocks are called: the order, and the names by which they get a tensor."""

    model: OwnModel
    keywords: Mapping[str, str | None]


def find_own_split(
    module: nn.Module, sample: Any, *, loss: Loss | None, blocks: str | Sequence[str] | None
) -> FoundSplit:
    """How a module splits; raises `InvalidModelError` naming what stands in the way.

    ``sample`` is what is read for some samples, two or more: the inputs, and with ``loss`` a pair of these and targets.
    """
    if isinstance(blocks, str):
        blocks = (blocks,)
    num_samples = check_sample(sample, has_loss=loss is not None)
    _check_module(module)
    model = meta_copy(module)
    paths = _blocks_of(model, _pass(model, sample, num_samples, loss, ()), blocks)
    seen, other = (_pass(model, sample, count, loss, paths) for count in (num_samples, num_samples + 1))
    _check_same(seen, other)
    own = _split_of(model, seen, other, paths, sample, has_loss=loss is not None)
    own = _with_samples_read(OwnModel(model, own, loss), sample)
    return FoundSplit(model=OwnModel(module, own, loss, sample), keywords=seen.keywords)


def check_sample(sample: Any, *, has_loss: bool) -> int:
    """The number of samples in what is read; raises `InvalidModelError` for what cannot be read so."""
    if has_loss and not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise _bad_sample(f"a {type(sample).__name__} with loss=", "a pair: the inputs, and the targets for loss=")
    inputs = sample[0] if has_loss else sample
    if not isinstance(inputs, Tensor | tuple | list | Mapping):
        raise _bad_sample(f"inputs that are a {type(inputs).__name__}", "a tensor, a tuple, or a dictionary by name")
    tensors = [each for each in pytree.tree_leaves(sample) if isinstance(each, Tensor)]
    counts = {each.shape[0] if each.dim() else 0 for each in tensors}
    if len(counts) != 1 or min(counts) < 2:
        raise _bad_sample(
            f"tensors of shapes {', '.join(str(list(each.shape)) for each in tensors) or 'none'}",
            "tensors whose first dim is that of the samples, the same number of them in each, 2 or more",
        )
    return counts.pop()


def fingerprint_of_rest(module: nn.Module, blocks: Sequence[str]) -> str:
    """A digest of the structure of what is not in blocks."""
    parts = (part for part in signature(module, places=True) if not any(_below(str(part[0]), each) for each in blocks))
    return _digest(type(module).__qualname__, *parts)


def fingerprint_of_block(block: nn.Module, place: int) -> str:
    """A digest of the structure of a block; where it stands plays no part."""
    return _digest(*_without_place(signature(block, places=True), place))


def check_same_module(module: nn.Module, own: OwnSplit) -> None:
    """Raises `InvalidModelError` naming the first place where a module is not the one that was planned."""
    found = {path for path, _ in module.named_modules()}
    count = sum(parameter.numel() for parameter in module.parameters())
    for number, path in enumerate(own.blocks):
        if path not in found:
            raise _other_module(f"{type(module).__qualname__} without a block {path}", f"{own.module} with it")
        digest = fingerprint_of_block(module.get_submodule(path), number)
        if digest != own.kind(number + 1).fingerprint:
            raise _other_module(f"block {path} of structure {digest}", f"{own.kind(number + 1).fingerprint}")
    digest = fingerprint_of_rest(module, own.blocks)
    if (digest, count) != (own.kinds[0].fingerprint, own.num_params):
        raise _other_module(
            f"{type(module).__qualname__} of {count} parameters and, outside its blocks, structure {digest}",
            f"{own.module} of {own.num_params} parameters and structure {own.kinds[0].fingerprint}",
        )


def _other_module(found: str, expected: str) -> InvalidModelError:
    return InvalidModelError(
        field="model",
        found=found,
        expected=f"{expected}, as planned",
        hint="build the module as it was planned (its sizes, its layers, its settings), or plan again",
    )


def _bad_sample(found: str, expected: str) -> InvalidModelError:
    return InvalidModelError(field="sample", found=found, expected=expected, hint=HINT)


def _refused(place: str, found: str, expected: str = "a chain of blocks", hint: str = HINT) -> InvalidModelError:
    return InvalidModelError(field=place or "forward", found=found, expected=expected, hint=hint)


def _check_module(module: nn.Module) -> None:
    """Raises `InvalidModelError` for what no split can divide."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise _refused("model", f"{type(module).__qualname__} without a parameter to train", "a module to train")
    for path, each in module.named_modules():
        if isinstance(each, _BatchNorm):
            raise _refused(
                path,
                f"{type(each).__name__}, whose result depends on which samples are computed together",
                "modules that compute each sample by itself",
                "use a norm over each sample: LayerNorm, RMSNorm, GroupNorm",
            )
        for name, value in vars(each).items():
            if isinstance(value, Tensor):
                raise _refused(
                    f"{path}.{name}".removeprefix("."),
                    "a tensor that is an attribute",
                    "parameters and buffers",
                    f'write self.register_buffer("{name}", …, persistent=False)',
                )
    for path, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise _refused(
                path,
                f"a parameter of {parameter.dtype}",
                "parameters of torch.float32, which the optimizer reads",
                "build the module in fp32: the plan's precision says what it computes in",
            )


def _pass(model: nn.Module, sample: Any, num_samples: int, loss: Loss | None, blocks: Sequence[str]) -> _Seen:
    """One forward pass on tensors without values."""
    blank = pytree.tree_map_only(
        Tensor, lambda each: torch.empty((num_samples, *each.shape[1:]), dtype=each.dtype, device=META), sample
    )
    recorder = _Recorder(model, blocks)
    inputs, targets = blank if loss is not None else (blank, None)
    for each in pytree.tree_leaves(blank):
        if isinstance(each, Tensor):
            recorder.note(each, "the samples")
    places, names = call_arguments(inputs)
    with recorder.watching():
        try:
            with recorder:
                outputs = model(*places, **names)
                recorder.ends(outputs)
                scalar = loss_of(outputs, targets, loss)
        except UserError:
            raise
        except Exception as error:
            raise _refused(
                recorder.place,
                f"an operation that needs values or fails ({type(error).__name__}: {_first_line(error)})",
                "a forward pass whose operations do not depend on values, and run on the sample's shapes",
                "compute such branches with masks (torch.where), or outside the module, and give their result",
            ) from error
    recorder.ends(scalar)
    return recorder.seen


class _Recorder(TorchFunctionMode):
    """Sees every operation of a forward pass: what made each tensor, and what parameters it was made of."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self._model, self._blocks = model, blocks
        self.seen = _Seen(calls=[_Call(((), {})) for _ in blocks])
        self._made: dict[int, _Made] = {}
        self._parameters = {id(each): each.requires_grad for each in model.parameters()}
        self._stack: list[str] = []
        self._block: int | None = None
        self._num_ended = 0

    @property
    def place(self) -> str:
        """The path of the module whose forward pass is under way."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on all modules."""
        paths = {module: path for path, module in self._model.named_modules()}
        number_of = {self._model.get_submodule(path): number for number, path in enumerate(self._blocks)}

        def before(module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any]) -> None:
            self._stack.append(paths[module])
            self.seen.called.append(paths[module])
            by_place = any(isinstance(each, Tensor) for each in places)
            first = None if by_place else next((key for key, each in names.items() if isinstance(each, Tensor)), None)
            self.seen.keywords[paths[module]] = first
            if module in number_of:
                self._block_begins(number_of[module], (places, dict(names)))

        def after(module: nn.Module, _places: Any, _names: Any, outputs: Any) -> None:
            if module in number_of:
                self._block_ends(number_of[module], outputs)
            self._stack.pop()

        handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in paths]
        handles += [module.register_forward_hook(after, with_kwargs=True) for module in paths]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, tensor: Tensor, what: str) -> _Made:
        """Remembers where a tensor came from."""
        found = _Made(tensor, self._num_ended, self._block is not None, what, tensor._version)
        self._made[id(tensor)] = found
        return found

    def ends(self, outputs: Any) -> None:
        """What the module returns is read after the last block."""
        for leaf in pytree.tree_leaves(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs):
            if isinstance(leaf, Tensor):
                self._read_outside(leaf, "what is returned")

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        name = getattr(func, "__name__", str(func))
        if not made or name == "__get__":
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
            where = "before the first block" if known.after == 0 else "between blocks"
            raise _refused(
                what.partition(" in ")[2],
                f"{what.partition(' in ')[0]} after the blocks, of what {known.what} made {where}",
                "what depends on parameters to reach the part after the blocks through them",
                "give it to a block as an argument (and use that very tensor afterwards)",
            )

    def _block_begins(self, block: int, given: BlockArguments) -> None:
        path = self._blocks[block]
        if self._block is not None:
            raise _refused(
                path, f"a call inside another block, {self._blocks[self._block]}", "blocks beside each other"
            )
        if block != self._num_ended:
            raise _refused(path, "a block that is called out of order or twice", "blocks that are called once each")
        call = self.seen.calls[block] = _Call(given)
        for place, leaf in enumerate(pytree.tree_leaves(given)):
            if isinstance(leaf, Tensor):
                self._given(call, block, place, leaf)
        self._block = block

    def _given(self, call: _Call, block: int, place: int, leaf: Tensor) -> None:
        known, path = self._made.get(id(leaf)), self._blocks[block]
        if self._parameters.get(id(leaf)):
            raise _refused(path, "a parameter of the module among a block's arguments", "parameters inside blocks")
        if known is not None and known.version != leaf._version:
            raise _refused(path, f"an argument that was changed in place after {known.what} made it", "new tensors")
        if not leaf.requires_grad:
            if known is not None and (known.inside or (known.after > 0 and known.origin is not None)):
                raise _refused(path, f"an argument without gradient that a block has made ({known.what})", "gradients")
            return
        if known is None:
            known = self.note(leaf, "something unseen")
            known.after = 0
        if known.origin is None:
            if known.after > 0:
                raise _refused(
                    path,
                    f"an argument that {known.what} makes between two blocks",
                    "blocks that are given what other blocks return, or what is made before the first block",
                    "move the operation into the block (for a long skip: give the block both tensors)",
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
            raise _refused(path, f"a block that returns {type(outputs).__name__}", "a tensor, or a tuple of tensors")
        for leaf in pytree.tree_leaves(call.given):
            known = self._made.get(id(leaf))
            if known is not None and leaf._version != known.version:
                raise _refused(path, "an argument that the block changes in place", "x = x + y in the place of x += y")
        for place, each in enumerate(each for each in entries if isinstance(each, Tensor)):
            if not each.requires_grad:
                raise _refused(path, "a result that depends on no parameter", "results that gradients flow through")
            made = self.note(each, f"block {path}")
            made.origin = ("made", block, place)
        if not all(isinstance(each, Tensor) or each is None for each in entries):
            raise _refused(path, "a result that is no tensor", "a tensor, or a tuple of tensors and None")


def _blocks_of(model: nn.Module, seen: _Seen, named: Sequence[str] | None) -> tuple[str, ...]:
    """The paths of the blocks in the order of calls."""
    lists = {path: each for path, each in model.named_modules() if isinstance(each, nn.ModuleList | nn.ModuleDict)}
    lists |= {path: each for path, each in model.named_modules() if isinstance(each, nn.Sequential)}
    for path in named or ():
        if path not in lists:
            raise _refused(
                "blocks",
                repr(path),
                "the path of a ModuleList, ModuleDict or Sequential: "
                + (", ".join(repr(each) for each in lists) or "the module has none"),
            )
    items = {
        path: [f"{path}.{name}".removeprefix(".") for name, _ in each.named_children()] for path, each in lists.items()
    }
    order = {path: place for place, path in enumerate(seen.called)}
    if named:
        chosen = [item for path in named for item in items[path]]
        for item in chosen:
            if seen.called.count(item) != 1:
                raise _refused(item, f"an item of blocks that is called {seen.called.count(item)} times", "one call")
        return tuple(sorted(chosen, key=order.__getitem__))
    usable = {path: _alike(model, each) for path, each in items.items() if each}
    usable = {path: each for path, each in usable.items() if all(seen.called.count(item) == 1 for item in each)}
    outermost = {path: each for path, each in usable.items() if not any(path != o and _below(path, o) for o in usable)}
    if not outermost:
        raise _refused(
            "model",
            f"{type(model).__qualname__} without a list of modules that are called once each",
            "blocks in a ModuleList, ModuleDict or Sequential",
            "put them into one, or name it: blocks=…",
        )
    size = {
        path: sum(p.numel() for item in each for p in model.get_submodule(item).parameters())
        for path, each in outermost.items()
    }
    best = max(outermost, key=lambda path: size[path])
    return tuple(sorted(outermost[best], key=order.__getitem__))


def _alike(model: nn.Module, items: Sequence[str]) -> list[str]:
    """The items from the first to the last that is built like another one; all of them where none is."""
    modules = [model.get_submodule(item) for item in items]
    digests = [
        fingerprint_of_block(module, place) if any(True for _ in module.parameters()) else ""
        for place, module in enumerate(modules)
    ]
    alike = [place for place, digest in enumerate(digests) if digest and digests.count(digest) > 1]
    return list(items[alike[0] : alike[-1] + 1]) if alike else list(items)


def _check_same(seen: _Seen, other: _Seen) -> None:
    for first, second in zip(seen.operations, other.operations, strict=False):
        if first != second:
            raise _refused(
                first.partition(" in ")[2],
                f"{first.partition(' in ')[0]} in one pass and {second} in another: operations that change",
                "the same operations for all samples and in every pass",
            )
    if len(seen.operations) != len(other.operations):
        raise _refused(
            "", f"{len(seen.operations)} operations in one pass, {len(other.operations)} in another", "as many"
        )


def _split_of(
    model: nn.Module, seen: _Seen, other: _Seen, blocks: Sequence[str], sample: Any, *, has_loss: bool
) -> OwnSplit:
    flows = _flows(seen, blocks)
    embedding, head = _ends(model, seen, blocks)
    shapes = {origin: _shape(seen, other, origin, blocks) for flow in flows for origin in flow}
    kinds = [_kind(model, seen, flows, shapes, blocks, block) for block in range(len(blocks))]
    distinct = [kind for place, kind in enumerate(kinds) if kinds.index(kind) == place]
    names = ["block" if len(distinct) == 1 else f"block of kind {number}" for number in range(1, len(distinct) + 1)]
    rest = fingerprint_of_rest(model, blocks)
    first = max(shapes[flows[0][0]], (1,), key=len)
    shared = tuple(_shared(model, embedding, head, blocks))
    return OwnSplit(
        module=f"{type(model).__module__}.{type(model).__qualname__}",
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        has_loss=has_loss,
        inputs=tuple(_inputs(sample)),
        seq_len=max(1, first[0] if len(first) > 1 else 1),
        blocks=tuple(blocks),
        kinds=(
            OwnKind(
                name="embedding",
                role=LayerRole.EMBEDDING,
                fingerprint=rest,
                shapes=tuple(shapes[origin] for origin in flows[0]),
            ),
            *(kind.model_copy(update={"name": name}) for kind, name in zip(distinct, names, strict=True)),
            OwnKind(name="head", role=LayerRole.HEAD, fingerprint=rest),
        ),
        layers=(0, *(1 + distinct.index(kind) for kind in kinds), len(distinct) + 1),
        embedding=embedding,
        head=head,
        first_read=tuple((block, place) for _, block, place in flows[0]),
        last_made=tuple((how, block, place) for how, block, place in flows[-1]),
        shared=shared,
        shared_entries=max((_entries(model, copies) for copies in shared), default=0),
    )


def _flows(seen: _Seen, blocks: Sequence[str]) -> list[list[Origin]]:
    """What flows out of the embedding and of each block: all that is there by then and read later."""
    last = dict.fromkeys(seen.head_reads, len(blocks))
    for block, call in enumerate(seen.calls):
        for _, origin in call.reads:
            last[origin] = max(last.get(origin, 0), block)
    born = {origin: _BEFORE if origin[0] == "given" else origin[1] for origin in last}
    flows = [
        sorted((o for o in last if born[o] <= layer < last[o]), key=lambda o: (-born[o], o[1], o[2]))
        for layer in range(_BEFORE, len(blocks))
    ]
    for layer, flow in enumerate(flows):
        if not flow:
            place = blocks[layer - 1] if layer else "forward"
            raise _refused(place, "nothing that later layers read and that depends on parameters", "a chain of blocks")
    return flows


def _shape(seen: _Seen, other: _Seen, origin: Origin, blocks: Sequence[str]) -> tuple[int, ...]:
    """The shape for one sample of what flows."""
    first, second = (_tensor(each, origin) for each in (seen, other))
    if first.dim() == 0 or first.shape[0] == second.shape[0] or first.shape[1:] != second.shape[1:]:
        how = "returned by" if origin[0] == "made" else "given to"
        raise _refused(
            blocks[origin[1]],
            f"a tensor of shape {list(first.shape)} {how} the block, whose first dim is not that of the samples",
            "samples in the first dim of all that flows between blocks",
            "expand it to one entry for each sample, or make it inside the blocks",
        )
    if first.dtype != torch.float32:
        raise _refused(blocks[origin[1]], f"a {first.dtype} tensor that flows between blocks", "torch.float32")
    return tuple(first.shape[1:])


def _tensor(seen: _Seen, origin: Origin) -> Tensor:
    how, block, place = origin
    call = seen.calls[block]
    if how == "given":
        return pytree.tree_leaves(call.given)[place]
    return _returned(call)[place]


def _returned(call: _Call) -> list[Tensor]:
    outputs = call.outputs if isinstance(call.outputs, tuple | list) else (call.outputs,)
    return [each for each in outputs if isinstance(each, Tensor)]


def _kind(
    model: nn.Module,
    seen: _Seen,
    flows: Sequence[Sequence[Origin]],
    shapes: Mapping[Origin, tuple[int, ...]],
    blocks: Sequence[str],
    block: int,
) -> OwnKind:
    """What a block is, but for its name; equal for blocks of one kind."""
    before, after, call = flows[block], flows[block + 1], seen.calls[block]
    several = isinstance(call.outputs, tuple | list)
    others = [
        f"{tuple(leaf.shape[1:])} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)[:80]
        for leaf in pytree.tree_leaves(call.given)
    ]
    digest = fingerprint_of_block(model.get_submodule(blocks[block]), block)
    return OwnKind(
        name=_digest(*others),
        role=LayerRole.BLOCK,
        fingerprint=digest,
        no_tp="",
        reads=tuple((place, before.index(origin)) for place, origin in call.reads),
        returns=tuple(isinstance(each, Tensor) for each in call.outputs) if several else None,
        makes=tuple(tuple(each.shape[1:]) for each in _returned(call)),
        goes_on=tuple(
            ("made", origin[2]) if origin[:2] == ("made", block) else ("given", before.index(origin))
            for origin in after
        ),
        shapes=tuple(shapes[origin] for origin in after),
    )


def _ends(model: nn.Module, seen: _Seen, blocks: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths of the parameters that are used before the first block, and of those used after the last."""
    ends: tuple[list[str], list[str]] = ([], [])
    for path, parameter in model.named_parameters(remove_duplicate=False):
        used, inside = seen.used.get(id(parameter), {}), [each for each in blocks if _below(path, each)]
        if parameter.requires_grad:
            _check_used(path, used, inside, len(blocks))
        if 0 in used:
            ends[0].append(path)
        if len(blocks) in used:
            ends[1].append(path)
    return tuple(ends[0]), tuple(ends[1])


def _check_used(path: str, used: Mapping[int, str], inside: Sequence[str], num_blocks: int) -> None:
    """Raises `InvalidModelError` unless a parameter is used in blocks alone, or outside and not between them."""
    for after, what in used.items():
        if 0 < after < num_blocks:
            raise _refused(path, f"a parameter that is used between blocks: {what}", "parameters inside blocks")
    if inside and used:
        raise _refused(path, f"a parameter of block {inside[0]} that is used outside it: {next(iter(used.values()))}")
    if not inside and not used:
        raise _refused(path, "a parameter that the forward pass does not use", "parameters that are trained")


def _shared(
    model: nn.Module, embedding: Sequence[str], head: Sequence[str], blocks: Sequence[str]
) -> Iterator[tuple[tuple[int, str], ...]]:
    """The parameters that layers share: those of embedding and head; blocks must have their own."""
    where: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        for number, block in enumerate(blocks, start=1):
            if _below(path, block):
                where.setdefault(parameter, []).append((number, f"block.{path.removeprefix(f'{block}.')}"))
        for number, end in ((0, embedding), (len(blocks) + 1, head)):
            if path in end:
                where.setdefault(parameter, []).append((number, f"model.{path}"))
    for places in where.values():
        first_of = dict(reversed(places))
        if len(first_of) < 2:
            continue
        if any(0 < number <= len(blocks) for number in first_of):
            number = next(number for number in first_of if 0 < number <= len(blocks))
            raise _refused(
                blocks[number - 1],
                f"a parameter that several layers share: {', '.join(path for _, path in places[:3])}",
                "blocks with parameters of their own; the embedding and the head may share some",
            )
        yield tuple(sorted(first_of.items()))


def _entries(model: nn.Module, copies: Sequence[tuple[int, str]]) -> int:
    return model.get_parameter(copies[0][1].partition(".")[2]).numel()


def _inputs(sample: Any) -> Iterator[OwnInput]:
    for path, leaf in pytree.tree_leaves_with_path(sample):
        if isinstance(leaf, Tensor):
            shape = tuple(leaf.shape[1:])
            yield OwnInput(
                path=name_of_leaf(path),
                shape=shape,
                dtype=str(leaf.dtype).removeprefix("torch."),
                num_bytes=prod(shape) * leaf.dtype.itemsize,
            )


def name_of_leaf(path: Sequence[Any]) -> str:
    """The name of a tensor in what is read: its places and keys, as in ``0.tokens``; ``inputs`` where it is alone."""
    keys = (getattr(each, "idx", getattr(each, "key", getattr(each, "name", each))) for each in path)
    return ".".join(str(each) for each in keys) or "inputs"


def _with_samples_read(model: OwnModel, sample: Any) -> OwnSplit:
    """The split with what each kind of block needs of the samples: nothing where its arguments have values without."""
    own = model.own
    arguments = model.arguments(torch.device("cpu"))
    blank = pytree.tree_map_only(Tensor, lambda each: torch.empty_like(each, device=META), sample)
    inputs = blank[0] if own.has_loss else blank
    num_samples = check_sample(sample, has_loss=own.has_loss)
    needs: set[int] = set()
    sizes: dict[int, tuple[int, int]] = {}
    with torch.no_grad():
        seen = arguments.seen(inputs, num_samples)
    for block, given in seen.items():
        flows = {leaf for leaf, _ in own.kind(block + 1).reads}
        for place, leaf in enumerate(pytree.tree_leaves(given)):
            if not isinstance(leaf, Tensor) or place in flows:
                continue
            if leaf.device == META:
                needs.add(own.layers[block + 1])
            is_of_samples = leaf.dim() > 0 and leaf.shape[0] == num_samples
            sizes[id(leaf)] = (0, leaf.nbytes // num_samples) if is_of_samples else (leaf.nbytes, 0)
    kinds = (
        kind.model_copy(update={"reads_samples": kind.role is not LayerRole.BLOCK or number in needs})
        for number, kind in enumerate(own.kinds)
    )
    whole, of_sample = (sum(each[place] for each in sizes.values()) for place in (0, 1))
    return own.model_copy(update={"kinds": tuple(kinds), "side_bytes": (whole, of_sample)})


def _without_place(parts: Sequence[tuple[Hashable, ...]], place: int) -> Iterator[Hashable]:
    """A signature without what says where a block stands, or how it was filled."""
    for part in parts:
        is_setting = len(part) == 3 and isinstance(part[1], str) and not isinstance(part[2], str)
        words = str(part[1]).split("_") if is_setting else []
        if "init" in words or (words and part[2] == place and {"idx", "id", "index", "layer"} & set(words)):
            continue
        yield part


def _digest(*parts: Hashable) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _below(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.") or not outer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]
