"""Split a user's own module into embedding, blocks and head by running it without values.

A copy on the meta device runs on samples without values (`steelyard.modules.own_recording`). Blocks are the items of a
list, dictionary or sequence of modules, each called once. A tensor is an activation of the chain if it depends on
parameters, a later block or the part after the blocks reads it, and it was made before the first block or by a block.
If it was made between two blocks, no layer makes it and the module is rejected. A second pass on another number of
samples must show the same operations, and all activations must have the samples as their first dim.

A rejected module raises one error that names the place: the path of a module, and the operation. Digests of its
structure identify a module, so that a plan can recognise its module.
"""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from steelyard.errors import InvalidModelError
from steelyard.model.family import LayerRole
from steelyard.model.own import OwnInput, OwnLayerType, OwnSplit
from steelyard.model.split import is_below, is_below_any, outermost
from steelyard.modules.known_values import Blank, blank_of
from steelyard.modules.not_split import HINT, refused
from steelyard.modules.own_pieces import Loss, OwnModel, meta_copy, returned_tensors
from steelyard.modules.own_recording import Origin, Seen, record
from steelyard.modules.split_layer_types import signature


def fingerprint_of_rest(module: nn.Module, blocks: Sequence[str]) -> str:
    """Return a digest of the module's structure outside its blocks."""
    parts = (part for part in _structure(module) if not is_below_any(str(part[0]), blocks))
    return digest_of(type(module).__qualname__, *parts)


def fingerprint_of_block(block: nn.Module, place: int) -> str:
    """Return a digest of the structure of a block, independent of its position."""
    return digest_of(*_without_place(_structure(block), place))


def check_same_module(module: nn.Module, own: OwnSplit) -> None:
    """Raise `InvalidModelError` at the first difference between a module and the planned one."""
    refuse_compiled(module)
    found = {path for path, _ in module.named_modules()}
    count = sum(parameter.numel() for parameter in module.parameters())
    for number, path in enumerate(own.blocks):
        if path not in found:
            raise _other_module(f"{type(module).__qualname__} without a block {path}", f"{own.module} with it")
        digest = fingerprint_of_block(module.get_submodule(path), number)
        if digest != own.type_of(number + 1).fingerprint:
            raise _other_module(f"block {path} of structure {digest}", f"{own.type_of(number + 1).fingerprint}")
    digest = fingerprint_of_rest(module, own.blocks)
    if (digest, count) != (own.kinds[0].fingerprint, own.num_params):
        raise _other_module(
            f"{type(module).__qualname__} of {count} parameters and, outside its blocks, structure {digest}",
            f"{own.module} of {own.num_params} parameters and structure {own.kinds[0].fingerprint}",
        )


def refuse_compiled(module: nn.Module) -> None:
    """Raise `InvalidModelError` if a module is, or contains, a result of `torch.compile`."""
    for path, each in module.named_modules():
        outer, _, name = path.rpartition(".")
        if name == "_orig_mod":
            raise InvalidModelError(
                field=outer or "model",
                found=f"a compiled {type(each).__qualname__}, whose operations cannot be recorded",
                expected="the module before torch.compile",
                hint="leave torch.compile out, or pass _orig_mod of the compiled module",
            )


def _other_module(found: str, expected: str) -> InvalidModelError:
    return InvalidModelError(
        field="model",
        found=found,
        expected=f"{expected}, as planned",
        hint="build the module as it was planned (its sizes, its layers, its settings), or plan again",
    )


def _structure(module: nn.Module) -> Iterator[tuple[Hashable, ...]]:
    """Yield a signature without the files of classes, because a script names its classes differently than an import."""
    path: Hashable = None
    for part in signature(module):
        yield (part[0], part[2]) if part[0] != path else part  # the first entry of a module is its class
        path = part[0]


def _without_place(parts: Iterable[tuple[Hashable, ...]], place: int) -> Iterator[Hashable]:
    """Yield a signature without the entries that give a block's position or initialisation."""
    for part in parts:
        is_setting = len(part) == 3 and isinstance(part[1], str) and not isinstance(part[2], str)
        words = str(part[1]).split("_") if is_setting else []
        if "init" in words or (words and part[2] == place and {"idx", "id", "index", "layer"} & set(words)):
            continue
        yield part


def digest_of(*parts: Hashable) -> str:
    """Return a short digest of values; equal values must have equal representations."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


_BEFORE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSplit:
    """A split, and the keyword by which each called module receives its tensor, in the order of calls."""

    model: OwnModel
    keywords: Mapping[str, str | None]


def find_own_split(
    module: nn.Module, sample: Any, *, loss: Loss | None, blocks: str | Sequence[str] | None
) -> FoundSplit:
    """Return the split of a module; raises `InvalidModelError` that names the obstacle if there is none.

    ``sample`` is the data of two samples or more: the inputs or, with ``loss``, a pair of inputs and targets.
    """
    if isinstance(blocks, str):
        blocks = (blocks,)
    num_samples = check_sample(sample, has_loss=loss is not None)
    _check_module(module)
    try:
        model = meta_copy(module)
        paths = _blocks_of(record(model, sample, num_samples, loss, ()), blocks)
        seen, other = (record(model, sample, count, loss, paths) for count in (num_samples, num_samples + 1))
        for first, second in zip(seen.operations, other.operations, strict=False):
            if first != second:
                raise refused(
                    first.partition(" in ")[2],
                    f"{first.partition(' in ')[0]} in one pass but {second} in another",
                    "the same operations in every pass and for any number of samples",
                )
        if len(seen.operations) != len(other.operations):
            raise refused(
                "",
                f"{len(seen.operations)} operations in one pass, {len(other.operations)} in another",
                "equal numbers",
            )
        own = _split_of(seen, other, sample, has_loss=loss is not None)
        own = _with_samples_read(OwnModel(model, own, loss), sample)
        return FoundSplit(model=OwnModel(module, own, loss, sample), keywords=seen.keywords)
    except InvalidModelError as error:
        if all(each.requires_grad for each in module.parameters()):
            raise
        frozen = "if frozen parameters are the reason, set requires_grad=True everywhere, and name them in freeze="
        raise InvalidModelError(**error.parts() | {"hint": f"{error.hint}; {frozen}"}) from error


def check_sample(sample: Any, *, has_loss: bool) -> int:
    """Return the number of samples in ``sample``; raises `InvalidModelError` if it has another form."""
    if has_loss and not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise _bad_sample(f"a {type(sample).__name__} with loss=", "a pair: the inputs, and the targets for loss=")
    inputs = sample[0] if has_loss else sample
    if not isinstance(inputs, Tensor | tuple | list | Mapping):
        raise _bad_sample(f"inputs that are a {type(inputs).__name__}", "a tensor, a tuple, or a dictionary")
    tensors = [each for each in pytree.tree_leaves(sample) if isinstance(each, Tensor)]
    counts = {each.shape[0] if each.dim() else 0 for each in tensors}
    if len(counts) != 1 or min(counts) < 2:
        raise _bad_sample(
            f"tensors of shapes {', '.join(str(list(each.shape)) for each in tensors) or 'none'}",
            "tensors whose first dim is the sample dim, with the same number of samples in each, 2 or more",
        )
    return counts.pop()


def _bad_sample(found: str, expected: str) -> InvalidModelError:
    return InvalidModelError(field="sample", found=found, expected=expected, hint=HINT)


def _check_module(module: nn.Module) -> None:
    """Raise `InvalidModelError` if a module has a property that no split supports."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise refused("model", f"{type(module).__qualname__} without a trained parameter", "trained parameters")
    for path, each in module.named_modules():
        if isinstance(each, _BatchNorm):
            raise refused(
                path,
                f"{type(each).__name__}, whose result for a sample depends on other samples",
                "modules that compute samples independently",
                "use a norm within each sample: LayerNorm, RMSNorm, GroupNorm",
            )
        for name, value in vars(each).items():
            if isinstance(value, Tensor):
                raise refused(
                    f"{path}.{name}".removeprefix("."),
                    "a tensor as a plain attribute",
                    "parameters and buffers",
                    f'write self.register_buffer("{name}", …, persistent=False)',
                )
    for path, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise refused(
                path,
                f"a parameter of {parameter.dtype}",
                "torch.float32 parameters, which the optimizer needs",
                "build the module in fp32; the plan's precision sets the compute type",
            )
        if parameter.dim() == 0 or not parameter.is_contiguous():
            raise refused(
                path,
                f"a parameter of shape {list(parameter.shape)} and strides {list(parameter.stride())}",
                "a contiguous tensor with one or more dims, which FSDP can shard",
                "write nn.Parameter(tensor.reshape(1)) for a scalar, or else nn.Parameter(tensor.contiguous())",
            )


def _blocks_of(seen: Seen, named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the paths of the blocks in the order of calls."""
    model = seen.model
    lists = {path: each for path, each in model.named_modules() if isinstance(each, nn.ModuleList | nn.ModuleDict)}
    lists |= {path: each for path, each in model.named_modules() if isinstance(each, nn.Sequential)}
    for path in named or ():
        if path not in lists:
            raise refused(
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
                raise refused(item, f"an item of blocks that is called {seen.called.count(item)} times", "one call")
        return tuple(sorted(chosen, key=order.__getitem__))
    usable = {path: _alike(model, each) for path, each in items.items() if each}
    usable = {path: each for path, each in usable.items() if all(seen.called.count(item) == 1 for item in each)}
    if not usable:
        raise refused(
            "model",
            f"{type(model).__qualname__} without a list of modules that are each called once",
            "blocks in a ModuleList, ModuleDict or Sequential",
            "put the blocks into one, or name it: blocks=…",
        )
    outer = {path: usable[path] for path in ([""] if "" in usable else outermost(usable))}
    size = {
        path: sum(p.numel() for item in each for p in model.get_submodule(item).parameters())
        for path, each in outer.items()
    }
    best = max(outer, key=lambda path: size[path])
    return tuple(sorted(outer[best], key=order.__getitem__))


def _alike(model: nn.Module, items: Sequence[str]) -> list[str]:
    """Return the items from the first to the last that has the structure of another one; all items if none has."""
    modules = [model.get_submodule(item) for item in items]
    digests = [
        fingerprint_of_block(module, place) if any(True for _ in module.parameters()) else ""
        for place, module in enumerate(modules)
    ]
    alike = [place for place, digest in enumerate(digests) if digest and digests.count(digest) > 1]
    return list(items[alike[0] : alike[-1] + 1]) if alike else list(items)


def _split_of(seen: Seen, other: Seen, sample: Any, *, has_loss: bool) -> OwnSplit:
    model, blocks, flows = seen.model, seen.blocks, _flows(seen)
    embedding, head = _ends(seen)
    shapes = {origin: _shape(seen, other, origin) for flow in flows for origin in flow}
    layer_types = [_layer_type(seen, flows, shapes, block) for block in range(len(blocks))]
    distinct = [layer_type for place, layer_type in enumerate(layer_types) if layer_types.index(layer_type) == place]
    names = ["block" if len(distinct) == 1 else f"block of kind {number}" for number in range(1, len(distinct) + 1)]
    rest = fingerprint_of_rest(model, blocks)
    first = max(shapes[flows[0][0]], (1,), key=len)
    shared = tuple(_shared(seen, embedding, head))
    return OwnSplit(
        module=f"{type(model).__module__}.{type(model).__qualname__}",
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        has_loss=has_loss,
        inputs=tuple(_inputs(sample)),
        seq_len=max(1, first[0] if len(first) > 1 else 1),
        blocks=tuple(blocks),
        kinds=(
            OwnLayerType(
                name="embedding",
                role=LayerRole.EMBEDDING,
                fingerprint=rest,
                shapes=tuple(shapes[origin] for origin in flows[0]),
            ),
            *(layer_type.model_copy(update={"name": name}) for layer_type, name in zip(distinct, names, strict=True)),
            OwnLayerType(name="head", role=LayerRole.HEAD, fingerprint=rest),
        ),
        layers=(0, *(1 + distinct.index(layer_type) for layer_type in layer_types), len(distinct) + 1),
        embedding=embedding,
        head=head,
        first_read=tuple((block, place) for _, block, place in flows[0]),
        last_made=tuple(("given" if how == "given" else "made", block, place) for how, block, place in flows[-1]),
        shared=shared,
        work=digest_of(*seen.work),
        shared_entries=max(
            (model.get_parameter(path.partition(".")[2]).numel() for (_, path), *_ in shared), default=0
        ),
    )


def _flows(seen: Seen) -> list[list[Origin]]:
    """Return the activations after the embedding and after each block: those that exist by then and are read later."""
    blocks = seen.blocks
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
            raise refused(place, "no tensor of parameters that later layers read", "a chain of blocks")
    return flows


def _shape(seen: Seen, other: Seen, origin: Origin) -> tuple[int, ...]:
    """Return the shape of an activation for one sample."""
    how, number, place = origin
    block, calls = seen.blocks[number], (seen.calls[number], other.calls[number])
    first, second = (
        pytree.tree_leaves(each.given)[place] if how == "given" else returned_tensors(each.outputs)[place]
        for each in calls
    )
    if first.dim() == 0 or first.shape[0] == second.shape[0] or first.shape[1:] != second.shape[1:]:
        words = "returned by" if how == "made" else "given to"
        raise refused(
            block,
            f"a tensor of shape {list(first.shape)} {words} the block, whose first dim is not the sample dim",
            "the sample dim first in all activations between blocks",
            "expand it to one entry per sample, or make it inside the blocks",
        )
    if first.dtype != torch.float32:
        raise refused(block, f"a {first.dtype} activation between blocks", "torch.float32")
    return tuple(first.shape[1:])


def _layer_type(
    seen: Seen, flows: Sequence[Sequence[Origin]], shapes: Mapping[Origin, tuple[int, ...]], block: int
) -> OwnLayerType:
    """Return the layer type of a block, provisionally named by a digest of its arguments; equal for one type."""
    before, after, call = flows[block], flows[block + 1], seen.calls[block]
    several = isinstance(call.outputs, tuple | list)
    others = [
        f"{tuple(leaf.shape[1:])} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)[:80]
        for leaf in pytree.tree_leaves(call.given)
    ]
    digest = fingerprint_of_block(seen.model.get_submodule(seen.blocks[block]), block)
    return OwnLayerType(
        name=digest_of(*others),
        role=LayerRole.BLOCK,
        fingerprint=digest,
        no_tp="",
        reads=tuple((place, before.index(origin)) for place, origin in call.reads),
        returns=tuple(isinstance(each, Tensor) for each in call.outputs) if several else None,
        makes=tuple(tuple(each.shape[1:]) for each in returned_tensors(call.outputs)),
        goes_on=tuple(
            ("made", origin[2]) if origin[:2] == ("made", block) else ("given", before.index(origin))
            for origin in after
        ),
        shapes=tuple(shapes[origin] for origin in after),
    )


def _ends(seen: Seen) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of the parameters used before the first block, and of those used after the last one."""
    ends: tuple[list[str], list[str]] = ([], [])
    blocks = seen.blocks
    for path, parameter in seen.model.named_parameters(remove_duplicate=False):
        used, inside = seen.used.get(id(parameter), {}), [each for each in blocks if is_below(path, each)]
        if parameter.requires_grad:
            for after, what in used.items():
                if 0 < after < len(blocks):
                    raise refused(path, f"a parameter that is used between blocks: {what}", "parameters inside blocks")
            if inside and used:
                raise refused(
                    path, f"a parameter of block {inside[0]} that is used outside it: {next(iter(used.values()))}"
                )
            if not inside and not used:
                raise refused(path, "a parameter that the forward pass does not use", "parameters that are trained")
        if 0 in used:
            ends[0].append(path)
        if len(blocks) in used:
            ends[1].append(path)
    return tuple(ends[0]), tuple(ends[1])


def _shared(seen: Seen, embedding: Sequence[str], head: Sequence[str]) -> Iterator[tuple[tuple[int, str], ...]]:
    """Yield the parameters that embedding and head share; raises `InvalidModelError` if a block shares one."""
    where: dict[nn.Parameter, list[tuple[int, str]]] = {}
    blocks = seen.blocks
    for path, parameter in seen.model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        for number, block in enumerate(blocks, start=1):
            if is_below(path, block):
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
            raise refused(
                blocks[number - 1],
                f"a parameter that several layers share: {', '.join(path for _, path in places[:3])}",
                "separate parameters per block (embedding and head may share some)",
            )
        yield tuple(sorted(first_of.items()))


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
    """Return the name of a tensor in a sample: its indices and keys, as in ``0.tokens``, or ``inputs`` if alone."""
    keys = (getattr(each, "idx", getattr(each, "key", getattr(each, "name", each))) for each in path)
    return ".".join(str(each) for each in keys) or "inputs"


def _with_samples_read(model: OwnModel, sample: Any) -> OwnSplit:
    """Return the split with whether each block type reads the samples, and the bytes of the blocks' other arguments."""
    own = model.split
    cpu = torch.device("cpu")
    arguments = model.arguments(cpu)
    blank = pytree.tree_map_only(Tensor, lambda each: blank_of(each.shape, each.dtype, cpu), sample)
    inputs = blank[0] if own.has_loss else blank
    num_samples = check_sample(sample, has_loss=own.has_loss)
    needs: set[int] = set()
    sizes: dict[int, tuple[int, int]] = {}
    with torch.no_grad():
        seen = arguments.seen(inputs, num_samples)
    for block, given in seen.items():
        flows = {leaf for leaf, _ in own.type_of(block + 1).reads}
        for place, leaf in enumerate(pytree.tree_leaves(given)):
            if not isinstance(leaf, Tensor) or place in flows:
                continue
            if isinstance(leaf, Blank):
                needs.add(own.layers[block + 1])
            is_of_samples = leaf.dim() > 0 and leaf.shape[0] == num_samples
            sizes[id(leaf)] = (0, leaf.nbytes // num_samples) if is_of_samples else (leaf.nbytes, 0)
    layer_types = (
        layer_type.model_copy(update={"reads_samples": layer_type.role is not LayerRole.BLOCK or number in needs})
        for number, layer_type in enumerate(own.kinds)
    )
    whole, of_sample = (sum(each[place] for each in sizes.values()) for place in (0, 1))
    return own.model_copy(update={"kinds": tuple(layer_types), "side_bytes": (whole, of_sample)})
