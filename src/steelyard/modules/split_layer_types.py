"""Analysis of a recorded pass: the values that flow between blocks, and which blocks are of one type.

Some blocks read more than the hidden state: values that other blocks or the embedding made. Blocks are of one type if
they have the same structure and are given the same. Two modules have the same structure if their trees of modules have
the same classes, the same parameters and buffers with the same shapes and types, and the same settings (numbers, texts
and switches that a module keeps), except those that only say where a layer stands.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig

from steelyard.model.family import LayerRole
from steelyard.model.split import BlockCall, SplitEncoder, SplitFeatures, SplitLayerType, SplitStream
from steelyard.modules.experts import routed_experts
from steelyard.modules.known_values import values_of
from steelyard.modules.model_inputs import first_tokens
from steelyard.modules.not_split import not_split
from steelyard.modules.recording import (
    LONGER,
    LONGEST,
    SAMPLES,
    TOKENS,
    Call,
    Recording,
    Watched,
    argument_of,
    nodes_behind,
    record_pass,
    tensors_given,
)


def all_streams(seen: Recording, call: BlockCall, *, keeps_results: bool) -> list[SplitStream]:
    """Return the streams past the blocks of the first list; ``call`` says how these are called."""
    path, blocks = next(iter(seen.chains.items()))
    streams = list(_streams(blocks, call, keeps_results=keeps_results))
    if not streams:
        return []
    more = seen.tokens + (LONGER - TOKENS if seen.tokens == TOKENS else seen.tokens)
    longer = record_pass(seen, more).chains[path]
    found = [_of_tokens(each, seen, longer, more) for each in streams]
    if not any(each.whole for each in streams):
        return found
    longest = record_pass(seen, LONGEST).chains[path]
    return [_with_most(each, longest) for each in found]


def _with_most(stream: SplitStream, longest: Sequence[Call]) -> SplitStream:
    """Return the stream with upper bounds of its token dims that stay shorter than a long sequence."""
    sizes = dict(_given(longest[stream.readers[0] - 1]))[stream.argument, stream.entry].shape[1:]
    most = tuple(size if size < LONGEST and known <= 0 else 0 for size, known in zip(sizes, stream.shape, strict=True))
    return stream.model_copy(update={"most": most if any(most) else ()})


def state_lengths(seen: Recording, calls: Mapping[str, BlockCall]) -> dict[str, tuple[int, int]]:
    """Return each list's state length as (places per token, further places); empty if all are the number of tokens.

    The blocks that read features have states of one shape.
    """
    calls = dict(list(calls.items())[1 if seen.read else 0 :])
    few = {path: _length(seen.chains[path], call) for path, call in calls.items()}
    if all(length == seen.tokens for length in few.values()):
        return {}
    longer = record_pass(seen, seen.tokens - first_tokens(seen.read)[1] + LONGER)
    found = {}
    for path, call in calls.items():
        times = (_length(longer.chains[path], call) - few[path]) // LONGER
        found[path] = times, few[path] - times * seen.tokens
    return found


def _length(chain: Sequence[Call], call: BlockCall) -> int:
    """Length of the state that enters a list of blocks."""
    return call.hidden((chain[0].places, chain[0].names)).shape[1]


def streams_past_a_tower(tower: Sequence[Call], text: Sequence[Call], how: BlockCall) -> Iterator[SplitStream]:
    """Yield the streams that the layer between a tower and the text reads or makes: states of the tower other than the
    last one, and values made of them that the first text blocks add. ``how`` says how the tower's blocks are called."""
    between = 1 + len(tower)
    results = [each.outputs if how.result is None else each.outputs[how.result] for each in tower]
    place_of = {each.grad_fn: place for place, each in enumerate(results)}
    reached = nodes_behind(tensors_given(text[0]), set(place_of))
    for place in sorted({place for node, place in place_of.items() if node in reached} - {len(tower) - 1}):
        state = how.result_of(tower[place].outputs)
        yield SplitStream(argument=how.argument, maker=1 + place, readers=(between,), shape=tuple(state.shape[1:]))
    for layer, call in enumerate(text, between + 1):
        for (argument, entry), value in _given(call):
            if entry is not None and value.requires_grad:
                shape = tuple(value.shape[1:])
                yield SplitStream(argument=argument, entry=entry, maker=between, readers=(layer,), shape=shape)


def block_call(seen: Recording, path: str) -> BlockCall:
    """Return how the result of a block of a list enters the next one, the same for all.

    A state of one shape, of blocks after an input other than tokens, has no token dim.
    """
    calls, read = seen.chains[path], seen.read if path == next(iter(seen.chains)) else None
    first = calls[0].outputs
    if isinstance(first, Tensor):
        candidates: list[tuple[int | str | None, int | None]] = [(None, None)]
    elif isinstance(first, dict):
        candidates = [(name, len(first)) for name, each in first.items() if isinstance(each, Tensor)]
    elif isinstance(first, tuple | list):
        candidates = [(place, len(first)) for place, each in enumerate(first) if isinstance(each, Tensor)]
    else:
        raise seen.refusal(f"blocks that return {type(first).__name__}")
    for result, count in candidates:
        arguments: set[int | str] | None = None
        for call, following in pairwise(calls):
            hidden = BlockCall(result=result).state_in(call.outputs)
            places = {place for place, each in enumerate(following.places) if each is hidden}
            names = {name for name, each in following.names.items() if each is hidden}
            found = places | names
            arguments = found if arguments is None else arguments & found
        if arguments is None:
            arguments = {0} if calls[0].places else {"hidden_states"}
        if len(arguments) == 1:
            argument = arguments.pop()
            state = argument_of(calls[0], argument)
            order, inner = ((), ()) if read else order_of(state, seen)
            is_list = isinstance(read, SplitFeatures) and read.grid is not None
            lone = is_list and state.ndim == 3 and len(state) == 1
            return BlockCall(
                argument=argument,
                result=result,
                num_results=count,
                number=_number(calls),
                order=order,
                inner=inner,
                places=state.shape[-2] // SAMPLES if lone or (is_list and state.ndim == 2) else 0,
                lone=lone,
            )
    raise seen.refusal("operations between its blocks, or more than one hidden state between them")


def order_of(state: Tensor, seen: Recording) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order of a hidden state's dims, samples and tokens first, and the sizes of the others.

    The order is empty if these come first already, the sizes if there is one other dim.
    """
    sizes, tokens = list(state.shape), seen.tokens
    if state.ndim == 3 and sizes[:2] == [SAMPLES, tokens]:
        return (), ()
    if state.ndim == 3 and sizes[0] == SAMPLES and tokens not in sizes:
        return (), ()  # length differs from the samples'
    if sizes.count(SAMPLES) != 1 or sizes.count(tokens) != 1:
        raise seen.refusal(f"a hidden state of shape {sizes} for {SAMPLES} samples of {tokens} tokens")
    first = [sizes.index(SAMPLES), sizes.index(tokens)]
    rest = [dim for dim in range(state.ndim) if dim not in first]
    order = (*first, *rest)
    inner = tuple(sizes[dim] for dim in rest) if len(rest) > 1 else ()
    return (() if order == tuple(range(state.ndim)) else order), inner


def _number(calls: Sequence[Call]) -> int | str | None:
    """Return the argument by which blocks are given their own index; None if there is none, or one block only."""
    given = [dict(enumerate(each.places)) | dict(each.names) for each in calls]
    counts = (n for n in given[0] if all(type(each.get(n)) is int and each[n] == p for p, each in enumerate(given)))
    return next(counts, None) if len(calls) > 1 else None


def encoded_argument(seen: Recording, calls: Sequence[Call], how: BlockCall) -> int | str:
    """Return the argument by which every block of a decoder is given the encoder's output."""
    given = [dict(enumerate(each.places)) | dict(each.names) for each in calls]
    found = [
        name
        for name, value in given[0].items()
        if isinstance(value, Tensor) and value.requires_grad and all(each.get(name) is value for each in given[1:])
    ]
    found = [name for name in found if name != how.argument]
    if len(found) != 1:
        raise seen.refusal("a decoder whose blocks do not all read one output of the encoder")
    return found[0]


_Where = tuple[int | str, tuple[str, int] | None]
"""Argument that a stream is, or the mapping and the entry in it."""


def _given(call: Call, *, written: bool = False) -> Iterator[tuple[_Where, Tensor]]:
    """Yield the tensors among a block's arguments and those it reads in mappings; if ``written``, those it writes."""
    given: list[tuple[int | str, Any]] = [*enumerate(call.places), *call.names.items()]
    for name, value in given:
        if isinstance(value, Tensor) and not written:
            yield (name, None), value
        elif isinstance(value, Watched):
            entries = value.written if written else value.read
            for key, each in entries.items():
                yield from (((name, (key, place)), leaf) for place, leaf in enumerate(each))


def _streams(calls: Sequence[Call], how: BlockCall, *, keeps_results: bool) -> Iterator[SplitStream]:
    """Yield the values that depend on parameters and that blocks are given besides the hidden state, in reading order.

    Results of blocks count only with ``keeps_results``, because some blocks recompute them if they are given none. The
    same holds for whole numbers that a block returns, such as the places of tokens that it has chosen.
    """
    returned = {id(leaf) for each in calls for leaf in pytree.tree_leaves(each.outputs)}
    makers: dict[int, tuple[int, int | None]] = {
        id(value): (place, None) for place, call in enumerate(calls, 1) for _, value in _given(call, written=True)
    }
    if keeps_results:
        for place, call in reversed([*enumerate(calls, 1)]):  # the first block that returns it has made it
            outputs = call.outputs if isinstance(call.outputs, tuple | list) else ()
            makers |= {id(each): (place, number) for number, each in enumerate(outputs) if number != how.result}
    found: dict[tuple[_Where, int], SplitStream] = {}
    for layer, call in enumerate(calls, 1):
        for where, value in _given(call):
            is_known = id(value) in makers or id(value) not in returned
            is_chosen = id(value) in makers and not value.is_floating_point()
            if (value.requires_grad or is_chosen) and where[0] != how.argument and is_known:
                (maker, result), shape = makers.get(id(value), (0, None)), tuple(value.shape[1:])
                whole = str(value.dtype).removeprefix("torch.") if is_chosen else ""
                made = SplitStream(
                    argument=where[0], entry=where[1], result=result, maker=maker, readers=(), shape=shape, whole=whole
                )
                before = found.setdefault((where, id(value)), made)
                found[where, id(value)] = before.model_copy(update={"readers": (*before.readers, layer)})
    yield from found.values()


def _of_tokens(stream: SplitStream, seen: Recording, longer: Sequence[Call], more: int) -> SplitStream:
    """Return the stream with 0, or minus the places beyond the tokens, for each token dim, as ``more`` tokens show."""
    calls = next(iter(seen.chains.values()))
    given = [dict(_given(each[stream.readers[0] - 1])) for each in (calls, longer)]
    samples, *sizes = zip(*(each[stream.argument, stream.entry].shape for each in given), strict=True)
    beside = [one - seen.tokens for one, other in sizes if one != other]
    grow_alike = all(one == other or other - one == more - seen.tokens for one, other in sizes)
    if samples != (SAMPLES, SAMPLES) or not grow_alike or min(beside, default=0) < 0:
        raise seen.refusal(f"blocks with the argument {stream.argument}, whose length differs from that of the samples")
    shape = tuple(one if one == other else seen.tokens - one for one, other in sizes)
    return stream.model_copy(update={"shape": shape})


_INTERNAL = frozenset({"training", "call_super_init", "dump_patches", "gradient_checkpointing", "drop_prob"})


def signature(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield the structure of a module, equal for modules that do the same work at the same place on equal shapes."""
    for path, owner in module.named_modules():
        yield path, type(owner).__module__, type(owner).__qualname__
        for name, value in sorted(vars(owner).items()):
            if isinstance(value, int | float | str) and name not in _INTERNAL and not name.startswith("_"):
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
    """Return the layer types, the index of each layer's type, and the rotary embedding of each block type."""
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
        part = config.get_text_config(decoder=True) if path == blocks else config
        parts = ("image ", "text ") if encoder and encoder.encoded is None else ("encoder ", "decoder ")
        words = parts[path == blocks] if encoder else ""
        given = {call.argument, call.number} | ({encoder.encoded} if encoder and path == blocks else set())
        modules, places = list(seen.blocks(path).values()), seen.places[path]
        passed = [each for one in seen.chains[path] for each in pytree.tree_leaves(one.outputs)]
        own_layers = range(len(layers), len(layers) + len(modules))
        beside = [[one for one in streams if layer in (*one.readers, one.maker)] for layer in own_layers]
        keys = [
            (
                *_signature(modules[number], place),
                *_key(one, given, (beside[number], own_layers[number]), passed, place, config),
                _attention(part, place),
            )
            for number, (place, one) in enumerate(zip(places, seen.chains[path], strict=False))
        ]
        first_of = [keys.index(key) for key in dict.fromkeys(keys)]
        attention = [_attention(part, places[number]) for number in first_of]
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
    """Return a key that is equal for blocks that are given the same.

    ``hidden`` names the arguments that flow along the chain. ``flowing`` are the streams that the block reads or makes,
    and its layer. A mapping may have them by its number.

    Other results of blocks that are ``passed`` on count as not given: a proof shows whether blocks recompute them.
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
                    raise not_split(config, f"blocks with the argument {name}, which depends on parameters")
                given.append((name, values_of(leaf) or id(leaf)))
            else:
                given.append((name, repr(leaf) if isinstance(leaf, int | float | str | bool | None) else type(leaf)))
    entries = [each.entry and (each.entry[0] == str(block) or each.entry[0], each.entry[1]) for each in streams]
    given += [
        (each.argument, entry, each.result, each.maker == layer, each.shape)
        for each, entry in zip(streams, entries, strict=True)
    ]
    return tuple(given)


def _signature(block: nn.Module, place: int) -> Iterator[tuple[Any, ...]]:
    """Yield the structure of a block, without the numbers that say where it stands."""
    for part in signature(block):
        is_place = len(part) == 3 and type(part[2]) is int and part[2] == place
        if not (is_place and ("idx" in part[1] or "id" in part[1].split("_") or "index" in part[1])):
            yield part


def _attention(config: PreTrainedConfig, block: int) -> str:
    listed = getattr(config, "layer_types", None)
    if isinstance(listed, list | tuple) and block < len(listed):
        return str(listed[block])
    slides = isinstance(getattr(config, "sliding_window", None), int) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if slides else "full_attention"


def _names(blocks: Sequence[nn.Module], attention: Sequence[str]) -> list[str]:
    """Return a name for each block type: the words that distinguish it from the others, or else a number."""
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
    """Return the pair of cosines and sines [.., S, D] that a block is given, or None."""
    for value in (*call.places, *call.names.values()):
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, Tensor) for each in value):
            return value
    return None
