"""Which layers are of one type: blocks of equal structure that a recorded pass gives the same.

Two modules have the same structure when their trees of modules have the same classes, the same parameters and buffers
with the same shapes and types, and the same settings (whatever numbers, texts and switches a module keeps), except
those that only say where a layer stands.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig

from steelyard.model.family import LayerRole
from steelyard.model.split import BlockCall, SplitEncoder, SplitLayerType, SplitStream
from steelyard.modules.experts import routed_experts
from steelyard.modules.known_values import values_of
from steelyard.modules.not_split import not_split
from steelyard.modules.recording import Call, Recording

_PLACES = frozenset({"layer_idx", "layer_type", "sliding_window", "is_sliding", "attention_type", "shift_size"})
"""Attributes that say where a layer stands or what it attends to, which is a mask made outside the module."""
_INTERNAL = frozenset({"training", "call_super_init", "dump_patches", "gradient_checkpointing", "drop_prob"})


def signature(module: nn.Module, *, places: bool = False) -> tuple[tuple[Any, ...], ...]:
    """Equal for modules that do the same work on inputs of the same shape.

    ``places`` tells apart what only says where a layer stands or what it attends to.
    """
    return tuple(_parts(module, _INTERNAL if places else _PLACES | _INTERNAL))


def _parts(module: nn.Module, left_out: frozenset[str]) -> Iterator[tuple[Any, ...]]:
    for path, owner in module.named_modules():
        yield path, type(owner).__module__, type(owner).__qualname__
        for name, value in sorted(vars(owner).items()):
            if isinstance(value, int | float | str) and name not in left_out and not name.startswith("_"):
                yield path, name, value
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            yield path, name, tuple(tensor.shape), tensor.dtype


NO_TP = "how its modules divide is not known"


def types_of_layers(
    seen: Recording,
    calls: Mapping[str, BlockCall],
    encoder: SplitEncoder | None,
    streams: Sequence[SplitStream],
    lengths: Mapping[str, tuple[int, int]],
    shapes: Sequence[tuple[int, ...]],
) -> tuple[list[SplitLayerType], list[int], list[Any]]:
    """The layer types, for each layer the index of its type, and the rotary embedding of each block type."""
    config, first, blocks = seen.config, next(iter(calls)), list(calls)[-1]
    tokens = lengths.get(first, (1, 0))
    layer_types = [
        SplitLayerType(name="embedding", role=LayerRole.EMBEDDING, no_tp=NO_TP, tokens=tokens, shape=shapes[0])
    ]
    layers, rotary, before = [0], list[Any](), 1
    for path, call in calls.items():
        tokens = lengths.get(path, (1, 0))
        if path == blocks and encoder:
            layers.append(len(layer_types))
            name = "text embedding" if encoder.encoded is None else "decoder embedding"
            layer_types.append(SplitLayerType(name=name, role=LayerRole.EMBEDDING, no_tp=NO_TP, tokens=tokens))
        parts = ("image ", "text ") if encoder and encoder.encoded is None else ("encoder ", "decoder ")
        words = parts[path == blocks] if encoder else ""
        given = {call.argument, call.number} | ({encoder.encoded} if encoder and path == blocks else set())
        modules, places = list(seen.blocks(path).values()), seen.places[path]
        passed = [each for one in seen.chains[path] for each in pytree.tree_leaves(one.outputs)]
        own_layers = range(len(layers), len(layers) + len(modules))
        beside = [[one for one in streams if layer in (*one.readers, one.maker)] for layer in own_layers]
        keys = [
            (
                *own,
                *_key(one, given, (beside[number], own_layers[number]), passed, place, config),
                _attention(config, place),
            )
            for number, (place, own, one) in enumerate(
                zip(places, _signatures(modules, places), seen.chains[path], strict=False)
            )
        ]
        first_of = [keys.index(key) for key in dict.fromkeys(keys)]
        attention = [_attention(config, places[number]) for number in first_of]
        names = _names([modules[place] for place in first_of], attention)
        layers += [len(layer_types) + first_of.index(keys.index(key)) for key in keys]
        layer_types += [
            SplitLayerType(
                name=words + name,
                role=LayerRole.BLOCK,
                no_tp=NO_TP,
                num_experts=max((each.num_experts for each in routed_experts(modules[place])), default=0),
                attention=attends,
                tokens=tokens,
                shape=shapes[before + place],
                returns_state=call.result is not None and isinstance(seen.chains[path][place].outputs, Tensor),
            )
            for name, place, attends in zip(names, first_of, attention, strict=True)
        ]
        before += len(keys)
        rotary += [_rotary(seen.chains[path][place]) for place in first_of]
    layers.append(len(layer_types))
    layer_types.append(SplitLayerType(name="head", role=LayerRole.HEAD, no_tp=NO_TP, shape=shapes[-1]))
    return layer_types, layers, rotary


def _key(
    call: Call,
    hidden: Collection[object],
    flowing: tuple[Collection[SplitStream], int],
    passed: Sequence[object],
    block: int,
    config: PreTrainedConfig,
) -> tuple[Hashable, ...]:
    """Equal for blocks that are given the same; ``hidden`` says under what names they are given what flows along.

    ``flowing`` are the streams that the block reads or makes, and its layer. A mapping may have them by its number.

    What else of that which blocks return is ``passed`` on they are not given: a proof shows whether they make it anew.
    """
    given: list[Hashable] = []
    streams, layer = flowing
    for name, value in (*enumerate(call.places), *sorted(call.names.items())):
        if name in hidden:
            continue
        if any((each.argument, each.entry) == (name, None) for each in streams):
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                if any(leaf is each for each in passed):
                    given.append((name, repr(None)))
                    continue
                if leaf.requires_grad:
                    raise not_split(config, f"blocks that are given {name}, which depends on parameters")
                given.append((name, values_of(leaf) or id(leaf)))
            else:
                given.append((name, repr(leaf) if isinstance(leaf, int | float | str | bool | None) else type(leaf)))
    entries = [each.entry and (each.entry[0] == str(block) or each.entry[0], each.entry[1]) for each in streams]
    given += [
        (each.argument, entry, each.result, each.maker == layer, each.shape)
        for each, entry in zip(streams, entries, strict=True)
    ]
    return tuple(given)


def _signatures(blocks: Sequence[nn.Module], places: Sequence[int]) -> list[tuple[tuple[Any, ...], ...]]:
    """The structure of each block, without the numbers that say where it, or what it holds, stands among all."""
    found = [signature(each, places=True) for each in blocks]
    seen: dict[Hashable, dict[int, int]] = {}
    for block, parts in zip(places, found, strict=False):
        for part in filter(_is_index, parts):
            seen.setdefault(part[:2], {})[block] = part[2]
    counting = {name for name, values in seen.items() if _is_counting(values)}

    return [
        tuple(p for p in parts if not (_is_index(p) and (p[2] == block or p[:2] in counting)))
        for block, parts in zip(places, found, strict=False)
    ]


def _is_index(part: Any) -> bool:
    is_number = isinstance(part, tuple) and len(part) == 3 and type(part[2]) is int
    return is_number and ("idx" in part[1] or "id" in part[1].split("_") or "index" in part[1])


def _is_counting(values: Mapping[int, int]) -> bool:
    """Whether numbers by block grow by as many from each block to the next, and name no block before it."""
    steps = {(values[after] - values[before]) / (after - before) for before, after in pairwise(sorted(values))}
    return len(steps) == 1 and min(steps) >= 1 and all(number >= block for block, number in values.items())


def _attention(config: PreTrainedConfig, block: int) -> str:
    listed = getattr(config, "layer_types", None)
    if isinstance(listed, list | tuple) and block < len(listed):
        return str(listed[block])
    slides = isinstance(getattr(config, "sliding_window", None), int) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if slides else "full_attention"


def _names(blocks: Sequence[nn.Module], attention: Sequence[str]) -> list[str]:
    """A name for each block type: by what tells it from the others, where words do, else by number."""
    sparse = [bool(routed_experts(block)) for block in blocks]
    found = []
    for has_experts, attends in zip(sparse, attention, strict=True):
        words = [attends.removesuffix("_attention")] if len(set(attention)) > 1 else []
        words += [("sparse" if has_experts else "dense")] if len(set(sparse)) > 1 else []
        found.append(" ".join([*words, "block"]))
    return [
        name if found.count(name) == 1 else f"{name} of kind {found[:place].count(name) + 1}"
        for place, name in enumerate(found)
    ]


def _rotary(call: Call) -> tuple[Tensor, Tensor] | None:
    """The pair of cosines and sines [.., S, D] that a block is given."""
    for value in (*call.places, *call.names.values()):
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, Tensor) for each in value):
            return value
    return None
