"""Execution of the layers of a split model: the embedding and the head run the model's own forward pass, stubbed.

If the model only calls modules one after another there, the layer calls just those. Otherwise the embedding runs the
model up to its first block, and the head runs it from the result of its last block on; the skipped parts cost nothing
(`steelyard.modules.stubbed_model`). Blocks are called as the model calls them: their arguments other than the hidden
state (masks, positions, rotary embeddings) depend on no parameter, and one more forward pass with blanks for all
parameters records them for each block type.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.model.family import Context, Layer, LayerRole, Run
from steelyard.model.split import BlockArguments, ModelSplit, local_name
from steelyard.modules.build import outside_buffers
from steelyard.modules.called import called_at
from steelyard.modules.known_values import KnownValues, has_values, known_of, plain_token, with_first
from steelyard.modules.model_inputs import blank, first_tokens, read_by
from steelyard.modules.own_pieces import Arguments
from steelyard.modules.stubbed_model import Give, ReachedError, StubbedTransformers, recording_stubs


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedInputs:
    """Inputs of every block other than the hidden state; identical on all ranks, over the full sequence."""

    position_ids: Tensor
    arguments: Mapping[str, BlockArguments] = field(default_factory=dict)
    """Arguments of each block type other than the hidden state, for a split model."""
    token_dims: Callable[[], Mapping[str, BlockArguments]] | None = None
    """Function that returns `arguments` with each tensor replaced by its token dim; None for no such dim, or two as in
    a mask."""
    of_samples: Arguments | None = None
    """Function that gives the blocks of a user's own module these inputs, for the samples that they read."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors among them."""
        leaves = pytree.tree_leaves(dict(self.arguments))
        held = (leaf.held if isinstance(leaf, PerSample) else leaf for leaf in leaves)
        return [self.position_ids, *(each for each in held if isinstance(each, Tensor))]


class SplitSharedInputs:
    """Builder of the `SharedInputs` of a forward pass, for some block types of a model split by its structure."""

    def __init__(
        self, model: PreTrainedModel, chain: ModelChain, layer_types: Collection[str], *, makes_masks: bool = True
    ) -> None:
        split = chain.split
        assert isinstance(split, ModelSplit), "a user's own module has its own blocks"
        self.model_config = model.config
        first_of = {chain.type_of(layer).name: layer for layer in reversed(range(chain.num_layers))}
        layers = sorted(first_of[name] for name in layer_types)
        stubs = recording_stubs(split, layers) if layers else {}
        self._records = {chain.type_of(layer).name: record for layer, record in stubs.items()}
        self._stubbed = (
            StubbedTransformers(model, split, keep=(), stubs=stubs, makes_masks=makes_masks) if stubs else None
        )
        self._by_sample, self._read = split.sides_by_sample, read_by(split)
        self._token, self._first = plain_token(model.config), first_tokens(split.features)
        self._token_dims: Mapping[str, BlockArguments] | None = None

    def __call__(
        self,
        seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        model_kwargs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> SharedInputs:
        """Return the arguments of every block type for samples of ``seq_len`` tokens and a hidden state in ``dtype``,
        made for one sample, or for the samples of ``model_kwargs`` (`PER_SAMPLE`), if there are any."""
        if model_kwargs:
            samples = len(next(iter(model_kwargs.values())))
            positions = model_kwargs.get("position_ids", torch.arange(seq_len, device=device).unsqueeze(0))
            with torch.no_grad():
                arguments = self._recorded(samples, seq_len, dtype, device, model_kwargs)
            return SharedInputs(position_ids=positions, arguments=arguments)

        def token_dims() -> Mapping[str, BlockArguments]:
            if self._token_dims is None:
                few, more = (self._arguments(tokens, dtype, device) for tokens in _LENGTHS)
                self._token_dims = {name: pytree.tree_map(_token_dim, few[name], more[name]) for name in few}
            return self._token_dims

        positions = torch.arange(seq_len, device=device).unsqueeze(0)
        arguments = self._arguments(seq_len, dtype, device)
        return SharedInputs(position_ids=positions, arguments=arguments, token_dims=token_dims)

    @torch.no_grad()
    def _arguments(self, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, BlockArguments]:
        one = self._recorded(1, tokens, dtype, device)
        if not self._by_sample:
            return one
        two = self._recorded(2, tokens, dtype, device)
        return {name: pytree.tree_map(_per_sample, one[name], two[name]) for name in one}

    def _recorded(
        self,
        samples: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        model_kwargs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, BlockArguments]:
        if self._stubbed is None:
            return {}
        ids = with_first(torch.full((samples, tokens), self._token, device=device), *self._first)
        with suppress(ReachedError):
            first = blank(self._read, samples, tokens, device, dtype) if self._read else ids
            self._stubbed(first, dtype, ids, model_kwargs=model_kwargs)
        return {name: record.take_sides() for name, record in self._records.items()}


@dataclass(frozen=True, slots=True)
class PerSample:
    """A tensor that blocks expect once per sample along a dim; held for one sample because all are identical."""

    held: Tensor
    dim: int

    def of(self, samples: int) -> Tensor:
        """Return the tensor for this number of samples."""
        times = [samples if dim == self.dim else 1 for dim in range(self.held.ndim)]
        return self.held.repeat(times)


@dataclass(frozen=True, slots=True)
class EndsPerSample:
    """End positions of consecutive sequences, equally many in every sample; on the host, where they are read."""

    ends: tuple[int, ...]
    dtype: torch.dtype

    def of(self, samples: int) -> Tensor:
        """Return the end positions for this number of samples, after a leading 0."""
        ends = [sample * self.ends[-1] + end for sample in range(samples) for end in self.ends]
        return torch.tensor([0, *ends], dtype=self.dtype)


def _per_sample(one: Any, two: Any) -> Any:
    """Return an argument of a block in its form per sample, found from its values for one sample and for two."""
    if not isinstance(one, Tensor) or one.shape == two.shape:
        return one
    if one.ndim == 1 and 2 * (len(one) - 1) == len(two) - 1:
        return EndsPerSample(tuple(known_of(one).tolist()[1:]), one.dtype)
    (dim,) = [dim for dim, (size, twice) in enumerate(zip(one.shape, two.shape, strict=True)) if size != twice]
    return PerSample(one, dim)


_LENGTHS = (8, 16)
"""Short sequence lengths; comparing their arguments shows which dims grow with the tokens."""


def _token_dim(few: Any, more: Any) -> int | None:
    one, other = (each.held if isinstance(each, PerSample) else each for each in (few, more))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None
    dims = [dim for dim, (size, longer) in enumerate(zip(one.shape, other.shape, strict=True)) if size != longer]
    return dims[0] if len(dims) == 1 else None


class CalledPiece:
    """Modules and operations called one after another, from token ids to a hidden state or from that to logits."""

    def __init__(self, model: PreTrainedModel, steps: Collection[str]) -> None:
        self._steps = [called_at(model, step) for step in steps]
        self.beside = tuple(model.get_submodule(step) for step in steps if ":" not in step)

    def __call__(self, _layer: nn.Module, flow: Tensor | tuple[Tensor, Tensor], context: Context) -> Tensor:
        """Return the result of the last step; an encoder's output ends here, with a gradient of 0."""
        found = _AtTheEnd.apply(*flow) if isinstance(flow, tuple) else flow
        for step in self._steps:
            found = step(found, context)
        return found


class _AtTheEnd(torch.autograd.Function):
    """Identity on a decoder's hidden state; the encoder's output that comes with it ends here, with a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, encoded: Tensor) -> Tensor:
        ctx.encoded_shape = encoded.shape
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros(ctx.encoded_shape)


class ShellPiece:
    """A part of the model's own forward pass."""

    def __init__(
        self, model: PreTrainedModel, split: ModelSplit, keep: Collection[str], stubs: Mapping[int, Any]
    ) -> None:
        self._stubbed = StubbedTransformers(model, split, keep=keep, stubs=stubs, makes_masks=not split.fused_attention)
        self.beside = (self._stubbed.model,)

    def fill(self, device: torch.device) -> None:
        """Make the values that do not depend on samples, which the first forward pass would make otherwise."""
        self._stubbed.fill(device)


class EmbeddingPiece(ShellPiece):
    """Embedding from token ids [B, S] to the hidden state of the first block and the other values that blocks read."""

    def __init__(self, model: PreTrainedModel, split: ModelSplit) -> None:
        self._call, self._streams = split.call_of(1), [split.streams[number] for number in split.made_by(0)]
        self._records = recording_stubs(split, {1, *(min(each.readers) for each in self._streams)})
        super().__init__(model, split, split.embedding, self._records)

    def __call__(self, _layer: nn.Module, ids: Tensor, context: Context) -> Tensor | tuple[Tensor, ...]:
        """Run the model's own forward pass until the last of the blocks that are the first to read a value begins."""
        with suppress(ReachedError):
            self._stubbed(ids, torch.get_default_dtype(), model_kwargs=context.model_kwargs)
        given = {layer: record.take() for layer, record in self._records.items()}
        hidden = self._call.hidden(given[1])
        read = (each.reads.hidden(given[min(each.readers)]) for each in self._streams)
        beside = tuple(each.view_as(each).contiguous() for each in read)  # as it is sent to another stage
        return (hidden, *beside) if beside else hidden


class DecoderEmbeddingPiece(ShellPiece):
    """Layer between two lists of blocks: the encoder's last state to the decoder's first one, and the encoder's output.

    For a tower it also reads states of other blocks, and the values made of them go to the text blocks that read them.
    """

    def __init__(self, model: PreTrainedModel, split: ModelSplit) -> None:
        assert split.encoder is not None
        self._encoder = split.encoder
        read = [split.streams[number].maker for number in split.read_by(split.between)]
        self._gives, self._features = [Give(split, layer) for layer in (split.between - 1, *read)], split.features
        self._makes = [split.streams[number] for number in split.made_by(split.between)]
        stubs = dict(zip((split.between - 1, *read), self._gives, strict=True))
        records = recording_stubs(split, {split.between + 1})
        self._call, self._first = split.call_of(split.between + 1), records[split.between + 1]
        stubs |= records
        super().__init__(model, split, split.encoder.between, stubs)

    def __call__(
        self, _layer: nn.Module, flow: Tensor | tuple[Tensor, ...], context: Context
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the model's own forward pass between the two blocks; return a state alone if blocks read no more."""
        states = flow if isinstance(flow, tuple) else (flow,)
        for give, state in zip(self._gives, states, strict=False):
            give.hidden = state
        hidden = states[0]
        samples, tokens = hidden.shape[:2]
        one = self._features is not None and self._features.grid is None
        first = blank(self._features, 1 if one else samples, tokens, hidden.device, hidden.dtype)
        try:
            with suppress(ReachedError):
                self._stubbed(first, hidden.dtype, context.decoder_ids, model_kwargs=context.model_kwargs)
        finally:
            for give in self._gives:
                give.hidden = None
        given = self._first.take()
        entering = self._call.hidden(given)
        if self._encoder.encoded is not None:
            return entering, self._encoder.reads.hidden(given)
        made = tuple(each.made(given[1], None).contiguous() for each in self._makes)
        return (entering, *made) if made else entering


class CalledDecoderEmbedding:
    """`DecoderEmbeddingPiece` for modules and operations that are called one after another."""

    def __init__(self, model: PreTrainedModel, steps: tuple[Collection[str], Collection[str]]) -> None:
        self._of_ids, self._of_encoded = (CalledPiece(model, each) for each in steps)
        self.beside = (*self._of_ids.beside, *self._of_encoded.beside)

    def __call__(self, layer: nn.Module, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the results of the last steps."""
        return self._of_ids(layer, context.decoder_ids, context), self._of_encoded(layer, hidden, context)


class HeadPiece(ShellPiece):
    """Head from the hidden state that the last block returns to logits."""

    def __init__(self, model: PreTrainedModel, split: ModelSplit) -> None:
        last = len(split.layers) - 2
        self._last = Give(split, last)
        self._buffers = {path: local_name(path) for path in outside_buffers(model, split, last + 1)}
        self._sees_shape, self._read, self._features = split.head_sees_shape, read_by(split), split.features
        self._tokens = split.kinds[split.layers[last]].tokens
        super().__init__(model, split, split.head, {last: self._last})

    def __call__(self, layer: Layer, flow: Tensor | tuple[Tensor, Tensor], _context: Context) -> Tensor:
        """Run the model's own forward pass after the last block; the part before it gets one token where that is
        enough.

        An encoder's output ends here, with a gradient of 0.
        """
        hidden = _AtTheEnd.apply(*flow) if isinstance(flow, tuple) else flow
        self._last.hidden = hidden
        times, beside = self._tokens
        samples, tokens = (len(hidden), (hidden.shape[1] - beside) // (times or 1)) if self._sees_shape else (1, 1)
        buffers = {path: layer.get_buffer(name) for path, name in self._buffers.items()}
        try:
            ids = blank(None, samples, tokens, hidden.device)
            reads_ids_alone = self._features is not None and self._features.token is not None
            first = None if reads_ids_alone else blank(self._read, samples, tokens, hidden.device, hidden.dtype)
            outputs = self._stubbed(first, hidden.dtype, ids if self._features else None, buffers)
        finally:
            self._last.hidden = None
        return outputs.logits


class BlockPiece:
    """A block, called as the model calls it."""

    def __init__(self, split: ModelSplit, layer: int) -> None:
        self._call, self._place = split.call_of(layer), split.place_of(layer)
        self._asks, self._typed = split.asks_for_values, split.typed_buffers
        self._encoder = split.reads_encoded(layer)
        self._reads = [split.streams[number] for number in split.read_by(layer)]
        self._makes = [split.streams[number] for number in split.made_by(layer)]

    def __call__(self, layer: Layer, flow: Tensor | tuple[Tensor, ...], context: Context) -> Any:
        """Return the next hidden state and the other values that the block makes.

        A decoder's block also returns the encoder's output, which every block passes on.
        """
        hidden, *beside = flow if isinstance(flow, tuple) else (flow,)
        with KnownValues() if self._asks and not has_values(hidden) else nullcontext():
            for path in self._typed:
                owner, _, name = path.rpartition(".")
                with suppress(AttributeError):  # blocks of another type have none of this name
                    buffers = layer.get_submodule(owner)._buffers
                    if name in buffers:
                        buffers[name] = buffers[name].to(hidden.dtype)
            places, names = self._arguments(context.side.arguments[layer.layer_type.name], hidden, beside)
            outputs = (layer.compiled or layer.block)(*places, **names)
        found = self._call.result_of(outputs).contiguous()  # as it is sent to another stage
        if self._encoder:
            return found, beside[0].view_as(beside[0])
        made = (each.made(names, outputs, found).contiguous() for each in self._makes)
        leaving = tuple(each.view_as(each) if each is found else each for each in made)
        return (found, *leaving) if leaving else found

    def _arguments(self, side: BlockArguments, hidden: Tensor, beside: Sequence[Tensor]) -> BlockArguments:
        repeated = pytree.tree_map_only((PerSample, EndsPerSample), lambda each: each.of(hidden.shape[0]), side)
        arguments = self._call.with_number(self._call.with_hidden(repeated, hidden), self._place)
        if self._encoder:
            return self._encoder.reads.with_hidden(arguments, beside[0])
        # the arguments with the block's inputs other than the hidden state, and separate mappings to write into
        places, names = arguments
        names = {name: copy.copy(each) if isinstance(each, UserDict) else each for name, each in names.items()}
        for stream, value in zip(self._reads, beside, strict=True):
            if stream.entry is None:
                places, names = stream.reads.with_hidden((places, names), value)
            else:
                mapping, key = names[str(stream.argument)], stream.entry[0]
                mapping[key] = (*mapping.get(key, ()), value)
        return places, names


def split_run(model: PreTrainedModel, split: ModelSplit, layer: int) -> Run:
    """Return the function that runs a layer of a split model."""
    role = split.kinds[split.layers[layer]].role
    if role is LayerRole.BLOCK:
        return BlockPiece(split, layer)
    calls = split.head_calls if role is LayerRole.HEAD else () if layer else split.embedding_calls
    if calls:
        return CalledPiece(model, calls)
    if role is LayerRole.HEAD:
        return HeadPiece(model, split)
    if not layer:
        return EmbeddingPiece(model, split)
    steps = split.encoder.between_calls if split.encoder else None
    return DecoderEmbeddingPiece(model, split) if steps is None else CalledDecoderEmbedding(model, steps)
