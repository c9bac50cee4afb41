"""What flows from block to block of a recorded pass: the hidden state, and what some blocks read beside it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from steelyard.model.split import BlockCall, SplitFeatures, SplitStream
from steelyard.modules.model_inputs import first_tokens
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
    """What flows past the blocks of the first list, which are called so."""
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
    """The stream with what those of its dims never exceed that are shorter than many tokens."""
    sizes = dict(_given(longest[stream.readers[0] - 1]))[stream.argument, stream.entry].shape[1:]
    most = tuple(size if size < LONGEST and known <= 0 else 0 for size, known in zip(sizes, stream.shape, strict=True))
    return stream.model_copy(update={"most": most if any(most) else ()})


def state_lengths(seen: Recording, calls: Mapping[str, BlockCall]) -> dict[str, tuple[int, int]]:
    """For each list of blocks the places of a state for each token, and beside them, where they are not the tokens.

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
    """The places of the state that enters a list of blocks."""
    return call.hidden((chain[0].places, chain[0].names)).shape[1]


def streams_past_a_tower(tower: Sequence[Call], text: Sequence[Call], how: BlockCall) -> Iterator[SplitStream]:
    """The states of a tower that are read beside the last one, and what the first blocks of text add that is made of
    them: both by the layer between, which takes the tower's blocks to be called so.
    """
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
    """Where the result of a block of a list goes into the next; the same for all.

    A state of one shape, of blocks behind what is read in the place of tokens, has no dim of tokens.
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
    raise seen.refusal("something between its blocks, or more than one state that goes from block to block")


def order_of(state: Tensor, seen: Recording) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of a hidden state that are samples and tokens, and the others, where these come first; the sizes of all
    others, where they are several.
    """
    sizes, tokens = list(state.shape), seen.tokens
    if state.ndim == 3 and sizes[:2] == [SAMPLES, tokens]:
        return (), ()
    if state.ndim == 3 and sizes[0] == SAMPLES and tokens not in sizes:
        return (), ()  # of another length
    if sizes.count(SAMPLES) != 1 or sizes.count(tokens) != 1:
        raise seen.refusal(f"a hidden state of {sizes} for {SAMPLES} samples of {tokens} tokens")
    first = [sizes.index(SAMPLES), sizes.index(tokens)]
    rest = [dim for dim in range(state.ndim) if dim not in first]
    order = (*first, *rest)
    inner = tuple(sizes[dim] for dim in rest) if len(rest) > 1 else ()
    return (() if order == tuple(range(state.ndim)) else order), inner


def _number(calls: Sequence[Call]) -> int | str | None:
    """Where blocks are given their own number, of which there is more than one."""
    given = [dict(enumerate(each.places)) | dict(each.names) for each in calls]
    counts = (n for n in given[0] if all(type(each.get(n)) is int and each[n] == p for p, each in enumerate(given)))
    return next(counts, None) if len(calls) > 1 else None


def encoded_argument(seen: Recording, calls: Sequence[Call], how: BlockCall) -> int | str:
    """Where every block of a decoder is given the encoder's output."""
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
"""The argument that a stream is, or the mapping and the entry there."""


def _given(call: Call, *, written: bool = False) -> Iterator[tuple[_Where, Tensor]]:
    """What depends on parameters among the arguments of a block: itself, and what it reads, or writes, in mappings."""
    given: list[tuple[int | str, Any]] = [*enumerate(call.places), *call.names.items()]
    for name, value in given:
        if isinstance(value, Tensor) and not written:
            yield (name, None), value
        elif isinstance(value, Watched):
            entries = value.written if written else value.read
            for key, each in entries.items():
                yield from (((name, (key, place)), leaf) for place, leaf in enumerate(each))


def _streams(calls: Sequence[Call], how: BlockCall, *, keeps_results: bool) -> Iterator[SplitStream]:
    """What depends on parameters and is given to blocks beside the hidden state, in the order of its reading.

    What blocks return they are given only with ``keeps_results``: some make it anew where they are given none. So are
    whole numbers that one of them returns, as the places of tokens that it has chosen.
    """
    returned = {id(leaf) for each in calls for leaf in pytree.tree_leaves(each.outputs)}
    makers: dict[int, tuple[int, int | None]] = {
        id(value): (place, None) for place, call in enumerate(calls, 1) for _, value in _given(call, written=True)
    }
    if keeps_results:
        for place, call in reversed([*enumerate(calls, 1)]):  # of those that hand it on the first has made it
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
    """The stream with 0 in the place of the dims that are tokens, as calls with ``more`` tokens show."""
    calls = next(iter(seen.chains.values()))
    given = [dict(_given(each[stream.readers[0] - 1])) for each in (calls, longer)]
    samples, *sizes = zip(*(each[stream.argument, stream.entry].shape for each in given), strict=True)
    beside = [one - seen.tokens for one, other in sizes if one != other]
    grow_alike = all(one == other or other - one == more - seen.tokens for one, other in sizes)
    if samples != (SAMPLES, SAMPLES) or not grow_alike or min(beside, default=0) < 0:
        raise seen.refusal(f"blocks that are given {stream.argument}, of another length than the samples are")
    shape = tuple(one if one == other else seen.tokens - one for one, other in sizes)
    return stream.model_copy(update={"shape": shape})
