"""How the layers of a split model run: embedding and head are the model's own forward pass with holes.

Where all that the model does there is to call modules one after another, they are just that. Else the embedding runs
the model up to its first block, the head from the result of its last block on; what both skip has holes in its place.
Blocks are called as the model calls them: one more forward pass with holes for everything that has
parameters shows what each kind of block is given beside the hidden state (masks, positions, rotary embeddings), which
depends on no parameter.

A hole passes on values without meaning, of the right shape and type. `steelyard.modules.split_proof` proves that
nothing of them reaches a result.

Legend of shapes: B samples, S tokens.
"""

import copy
import inspect
import threading
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel, masking_utils

from steelyard.model.chain import ModelChain
from steelyard.model.config_values import ROUTER_LOSS
from steelyard.model.family import Context, Layer, LayerRole, Run, Task
from steelyard.model.split import BlockArguments, BlockCall, ModelSplit, SplitFeatures, local_name
from steelyard.modules.build import build_from_config, fill_buffers, outside_buffers
from steelyard.modules.called import called_at
from steelyard.modules.freezing import BY_PLAN
from steelyard.modules.known_values import (
    KnownValues,
    has_values,
    is_known,
    known_of,
    plain_token,
    with_first,
    without_values,
)
from steelyard.modules.pairs import pair_loss

IMAGES = "image_embeds"
"""What a pair of an image and its text calls the image, as the text's blocks pass it on to the head."""
NO_MASK = "flash_attention_2"
"""An implementation of attention that reads no mask of plain sequences: so that none is made where none is read."""


class CalledPiece:
    """Modules and operations called one after another: token ids to a hidden state, or that to logits."""

    def __init__(self, model: PreTrainedModel, steps: Collection[str]) -> None:
        self._steps = [called_at(model, step) for step in steps]
        self.beside = tuple(model.get_submodule(step) for step in steps if ":" not in step)

    def __call__(self, _layer: nn.Module, flow: Tensor | tuple[Tensor, Tensor], context: Context) -> Tensor:
        """What the last step returns; an encoder's output ends here, with a gradient of 0."""
        found = _AtTheEnd.apply(*flow) if isinstance(flow, tuple) else flow
        for step in self._steps:
            found = step(found, context)
        return found


class _AtTheEnd(torch.autograd.Function):
    """A decoder's hidden state as it is; the encoder's output beside it goes no further, with a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, encoded: Tensor) -> Tensor:
        ctx.encoded_shape = encoded.shape
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros(ctx.encoded_shape)


class ShellPiece:
    """A part of the model's own forward pass."""

    _shell: "Shell"

    def fill(self, device: torch.device) -> None:
        """Makes what does not follow from samples, which otherwise the first of them does."""
        self._shell.fill(device)


class EmbeddingPiece(ShellPiece):
    """Token ids [B, S] to the hidden state that the first block reads, and what blocks read beside it."""

    def __init__(self, model: PreTrainedModel, split: ModelSplit) -> None:
        self._call, self._streams = split.call_of(1), [split.streams[number] for number in split.made_by(0)]
        self._records = _records(split, {1, *(min(each.readers) for each in self._streams)})
        self._shell = Shell(
            model, split, keep=split.embedding, stubs=self._records, makes_masks=not split.fused_attention
        )
        self.beside = (self._shell.model,)

    def __call__(self, _layer: nn.Module, ids: Tensor, _context: Context) -> Tensor | tuple[Tensor, ...]:
        """The model's own forward pass, ended where the last block begins that is the first to read something."""
        with suppress(_ReachedError):
            self._shell(ids, torch.get_default_dtype())
        given = {layer: record.take() for layer, record in self._records.items()}
        hidden = self._call.hidden(given[1])
        read = (each.reads.hidden(given[min(each.readers)]) for each in self._streams)
        beside = tuple(each.view_as(each).contiguous() for each in read)  # as it is sent to another stage
        return (hidden, *beside) if beside else hidden


class DecoderEmbeddingPiece(ShellPiece):
    """What the encoder's last block returns to what the decoder's first one reads: a hidden state, and that output.

    Of a tower states of other blocks are read, too, and what is made of them goes to the blocks of text that read it.
    """

    def __init__(self, model: PreTrainedModel, split: ModelSplit) -> None:
        assert split.encoder is not None
        self._encoder = split.encoder
        read = [split.streams[number].maker for number in split.read_by(split.between)]
        self._gives, self._features = [_Give(split, layer) for layer in (split.between - 1, *read)], split.features
        self._last, self._makes = self._gives[0], [split.streams[number] for number in split.made_by(split.between)]
        stubs = dict(zip((split.between - 1, *read), self._gives, strict=True))
        stubs |= {split.between + 1: _Stop(split, split.between + 1)}
        self._shell = Shell(
            model, split, keep=split.encoder.between, stubs=stubs, makes_masks=not split.fused_attention
        )
        self.beside = (self._shell.model,)

    def __call__(
        self, _layer: nn.Module, flow: Tensor | tuple[Tensor, ...], context: Context
    ) -> Tensor | tuple[Tensor, ...]:
        """The model's own forward pass from the one block to the other; a state alone if blocks read no more."""
        states = flow if isinstance(flow, tuple) else (flow,)
        for give, state in zip(self._gives, states, strict=False):
            give.hidden = state
        try:
            hidden = states[0]
            samples, tokens = hidden.shape[:2]
            one = self._features is not None and self._features.grid is None
            first = blank(self._features, 1 if one else samples, tokens, hidden.device)
            self._shell(first, hidden.dtype, context.decoder_ids)
        except _ReachedError as reached:
            entering, (_, names) = reached.call.hidden(reached.arguments), reached.arguments
            if self._encoder.encoded is not None:
                return entering, self._encoder.reads.hidden(reached.arguments)
            made = tuple(each.made(names, None).contiguous() for each in self._makes)
            return (entering, *made) if made else entering
        finally:
            for give in self._gives:
                give.hidden = None
        raise AssertionError("the model has run no block of its decoder")


class PairEmbeddingPiece(DecoderEmbeddingPiece):
    """What the last block of images returns to what the first of texts reads; beside it the features of the images."""

    def __call__(self, _layer: nn.Module, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The model's own features of images, and its text tower up to its first block."""
        self._last.hidden = hidden
        try:
            images = self._shell.features("image", blank(self._features, 1, 0, hidden.device), hidden.dtype)
            self._shell.features("text", context.decoder_ids, hidden.dtype)
        except _ReachedError as reached:
            return reached.call.hidden(reached.arguments), images.contiguous()
        finally:
            self._last.hidden = None
        raise AssertionError("the model has run no block of its texts")


class CalledDecoderEmbedding:
    """As `DecoderEmbeddingPiece`, of modules and operations called one after another."""

    def __init__(self, model: PreTrainedModel, steps: tuple[Collection[str], Collection[str]]) -> None:
        self._of_ids, self._of_encoded = (CalledPiece(model, each) for each in steps)
        self.beside = (*self._of_ids.beside, *self._of_encoded.beside)

    def __call__(self, layer: nn.Module, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """What the last steps return."""
        return self._of_ids(layer, context.decoder_ids, context), self._of_encoded(layer, hidden, context)


class HeadPiece(ShellPiece):
    """The hidden state that the last block returns to logits."""

    def __init__(self, model: PreTrainedModel, split: ModelSplit) -> None:
        last = len(split.layers) - 2
        self._last = _Give(split, last)
        self._buffers = {path: local_name(path) for path in outside_buffers(model, split, last + 1)}
        self._sees_shape, self._read, self._features = split.head_sees_shape, read_by(split), split.features
        self._tokens = split.kinds[split.layers[last]].tokens
        self._shell = Shell(
            model, split, keep=split.head, stubs={last: self._last}, makes_masks=not split.fused_attention
        )
        self.beside = (self._shell.model,)

    def __call__(self, layer: Layer, flow: Tensor | tuple[Tensor, Tensor], _context: Context) -> Tensor:
        """The model's own forward pass from there on; what comes before is given one token where it may be.

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
            first = None if reads_ids_alone else blank(self._read, samples, tokens, hidden.device)
            outputs = self._shell(first, hidden.dtype, ids if self._features else None, buffers)
        finally:
            self._last.hidden = None
        return outputs.logits


class PairHeadPiece(ShellPiece):
    """The state that the last block of texts returns, and the features of images, to the loss."""

    def __init__(self, model: PreTrainedModel, split: ModelSplit) -> None:
        last = len(split.layers) - 2
        self._last = _Give(split, last)
        self._shell = Shell(
            model, split, keep=split.head, stubs={last: self._last}, makes_masks=not split.fused_attention
        )
        self.beside = (self._shell.model,)

    def __call__(self, layer: Layer, flow: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """This rank's share of the mean loss over all pairs of the global batch."""
        self._last.hidden, images = flow
        try:
            texts = self._shell.features("text", context.labels_BS, images.dtype)
        finally:
            self._last.hidden = None
        return pair_loss(layer.get_submodule(local_name("")), images, texts, layer.batch)


class BlockPiece:
    """A block, called as the model calls it."""

    def __init__(self, split: ModelSplit, layer: int) -> None:
        self._call, self._place = split.call_of(layer), split.place_of(layer)
        self._asks, self._typed = split.asks_for_values, split.typed_buffers
        self._encoder = split.reads_encoded(layer)
        self._reads = [split.streams[number] for number in split.read_by(layer)]
        self._makes = [split.streams[number] for number in split.made_by(layer)]

    def __call__(self, layer: Layer, flow: Tensor | tuple[Tensor, ...], context: Context) -> Any:
        """The next hidden state, and what else the block makes.

        In a decoder with the encoder's output, which every block passes on.
        """
        hidden, *beside = flow if isinstance(flow, tuple) else (flow,)
        with KnownValues() if self._asks and not has_values(hidden) else nullcontext():
            for path in self._typed:
                _set_type(layer, path, hidden.dtype)
            places, names = self._arguments(context.side.arguments[layer.kind.name], hidden, beside)
            outputs = layer.block(*places, **names)
        found = self._call.result_of(outputs).contiguous()  # as it is sent to another stage
        if self._encoder:
            return found, beside[0].view_as(beside[0])
        made = (each.made(names, outputs, found).contiguous() for each in self._makes)
        beside = tuple(each.view_as(each) if each is found else each for each in made)
        return (found, *beside) if beside else found

    def _arguments(self, side: BlockArguments, hidden: Tensor, beside: Sequence[Tensor]) -> BlockArguments:
        """All that the block is given."""
        repeated = pytree.tree_map_only((PerSample, EndsPerSample), lambda each: each.of(hidden.shape[0]), side)
        arguments = self._call.with_number(self._call.with_hidden(repeated, hidden), self._place)
        if self._encoder:
            return self._encoder.reads.with_hidden(arguments, beside[0])
        return self._with_streams(arguments, beside)

    def _with_streams(self, arguments: BlockArguments, values: Sequence[Tensor]) -> BlockArguments:
        """The arguments with what the block reads beside the hidden state, and mappings of its own to write into."""
        places, names = arguments
        names = {name: copy.copy(each) if isinstance(each, UserDict) else each for name, each in names.items()}
        for stream, value in zip(self._reads, values, strict=True):
            if stream.entry is None:
                places, names = stream.reads.with_hidden((places, names), value)
            else:
                mapping, key = names[stream.argument], stream.entry[0]
                mapping[key] = (*mapping.get(key, ()), value)
        return places, names


def _set_type(layer: nn.Module, path: str, dtype: torch.dtype) -> None:
    owner, _, name = path.rpartition(".")
    with suppress(AttributeError):  # blocks of another kind have none of this name
        buffers = layer.get_submodule(owner)._buffers
        if name in buffers:
            buffers[name] = buffers[name].to(dtype)


class BlockInputs:
    """What every kind of block reads beside the hidden state."""

    def __init__(
        self, model: PreTrainedModel, chain: ModelChain, kinds: Collection[str], *, makes_masks: bool = True
    ) -> None:
        split = chain.split
        assert split is not None
        first_of = {chain.kind_of(layer).name: layer for layer in reversed(range(chain.num_layers))}
        layers = sorted(first_of[name] for name in kinds)
        stubs = _records(split, layers)
        self._records = {chain.kind_of(layer).name: record for layer, record in stubs.items()}
        self._shell = Shell(model, split, keep=(), stubs=stubs, makes_masks=makes_masks)
        self._by_sample, self._read = split.sides_by_sample, read_by(split)
        self._token, self._first = plain_token(model.config), first_tokens(split.features)

    @torch.no_grad()
    def __call__(self, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, BlockArguments]:
        """For every kind its arguments, for one sample of so many tokens and a hidden state in ``dtype``."""
        one = self._recorded(1, tokens, dtype, device)
        if not self._by_sample:
            return one
        two = self._recorded(2, tokens, dtype, device)
        return {name: pytree.tree_map(_per_sample, one[name], two[name]) for name in one}

    def token_dims(self, device: torch.device, dtype: torch.dtype) -> dict[str, BlockArguments]:
        """For every kind, in the place of each tensor the one dim that is tokens; None where there is none, or two."""
        few, more = (self(tokens, dtype, device) for tokens in _LENGTHS)
        return {name: pytree.tree_map(_token_dim, few[name], more[name]) for name in few}

    def _recorded(
        self, samples: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, BlockArguments]:
        ids = with_first(torch.full((samples, tokens), self._token, device=device), *self._first)
        with suppress(_ReachedError):
            self._shell(blank(self._read, samples, tokens, device) if self._read else ids, dtype, ids)
        return {name: record.take_sides() for name, record in self._records.items()}


@dataclass(frozen=True, slots=True)
class PerSample:
    """A tensor that blocks want for every sample, one after another in a dim; held for one, since all are alike."""

    held: Tensor
    dim: int

    def of(self, samples: int) -> Tensor:
        """The tensor for so many samples."""
        times = [samples if dim == self.dim else 1 for dim in range(self.held.ndim)]
        return self.held.repeat(times)


@dataclass(frozen=True, slots=True)
class EndsPerSample:
    """Where sequences end that stand one behind another, as many in every sample; on the host, where it is read."""

    ends: tuple[int, ...]
    dtype: torch.dtype

    def of(self, samples: int) -> Tensor:
        """The ends of so many samples, behind a 0."""
        ends = [sample * self.ends[-1] + end for sample in range(samples) for end in self.ends]
        return torch.tensor([0, *ends], dtype=self.dtype)


def _per_sample(one: Any, two: Any) -> Any:
    """What a block is given, from what it is given for one sample and for two."""
    if not isinstance(one, Tensor) or one.shape == two.shape:
        return one
    if one.ndim == 1 and 2 * (len(one) - 1) == len(two) - 1:
        return EndsPerSample(tuple(known_of(one).tolist()[1:]), one.dtype)
    (dim,) = [dim for dim, (size, twice) in enumerate(zip(one.shape, two.shape, strict=True)) if size != twice]
    return PerSample(one, dim)


_LENGTHS = (8, 16)
"""Short sequences whose arguments show what grows with the tokens."""


def _token_dim(few: Any, more: Any) -> int | None:
    one, other = (each.held if isinstance(each, PerSample) else each for each in (few, more))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None
    dims = [dim for dim, (size, longer) in enumerate(zip(one.shape, other.shape, strict=True)) if size != longer]
    return dims[0] if len(dims) == 1 else None


def split_run(model: PreTrainedModel, split: ModelSplit, layer: int) -> Run:
    """How a layer of a split model runs."""
    role = split.kinds[split.layers[layer]].role
    if role is LayerRole.BLOCK:
        return BlockPiece(split, layer)
    if split.task is Task.CONTRASTIVE and layer:
        return PairHeadPiece(model, split) if role is LayerRole.HEAD else PairEmbeddingPiece(model, split)
    calls = split.head_calls if role is LayerRole.HEAD else () if layer else split.embedding_calls
    if calls:
        return CalledPiece(model, calls)
    if role is LayerRole.HEAD:
        return HeadPiece(model, split)
    if not layer:
        return EmbeddingPiece(model, split)
    steps = split.encoder and split.encoder.between_calls
    return DecoderEmbeddingPiece(model, split) if steps is None else CalledDecoderEmbedding(model, steps)


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
        device = (ids if first is None else first).device
        self._make_ready(dtype, device)
        for path, buffer in buffers.items():
            owner, _, name = path.rpartition(".")
            self.model.get_submodule(owner)._buffers[name] = buffer
        if self._ids and ids is None:
            ids = blank(None, len(first), 1, device) if first.is_floating_point() else first
        samples = given_samples(self._read, first)
        samples |= {self._ids: ids} if self._ids else {}
        with one_sequence_each(), without_values(samples.values(), self._token, self._first):
            beside = {} if first is None else beside_features(self.model, self._read, ids)
            return self.model(**samples, **beside, **self._options)

    def features(self, of: Literal["image", "text"], samples: Tensor, dtype: torch.dtype) -> Tensor:
        """The features [B, D] that a model of pairs makes of images or texts."""
        self._make_ready(dtype, samples.device)
        make = getattr(self.model, f"get_{of}_features")
        given = given_samples(self._read, samples) if of == "image" else {self._ids: samples}
        with one_sequence_each(), without_values([samples], self._token, self._first):
            return make(**given).pooler_output

    def _make_ready(self, dtype: torch.dtype, device: torch.device) -> None:
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
        if path in self._keep and path not in self._holders:
            return module
        if path in self._stubs:
            found = copy.copy(module)
            found._modules = dict(zip(module._modules, self._stubs_of(path, [*module.children()]), strict=True))
            return found
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


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """Within it a forward pass of transformers asks no values of samples, of which what follows is known.

    It does not search samples for several sequences packed together, since here there is one in each, nor for padding,
    since there is none, and does not draw whether it leaves a block out, since all blocks of a plan run. Threads may be
    within it at the same time.
    """
    global _num_within  # noqa: PLW0603  what is replaced is global, too
    with _within_lock:
        if not _num_within:
            for each in _REPLACED:
                each.start()
        _num_within += 1
    try:
        yield
    finally:
        with _within_lock:
            _num_within -= 1
            if not _num_within:
                for each in _REPLACED:
                    each.stop()


def _draw(*size: Any, **options: Any) -> Any:
    return 1.0 if size == ([],) else _rand(*size, **options)


def _nothing(*_places: Any, **_names: Any) -> None:
    """In the place of what has nothing to do where samples are not padded; a mock would keep what it was given."""


def _is_plain_causal(
    padding: Tensor | None, queries: int, keys: int, first_query: int, first_key: int, window: int | None = None
) -> bool:
    """Whether attention needs no mask: as in transformers, and where a window is as long as the sequence."""
    return _needs_no_mask(padding, queries, keys, first_query, first_key, None if window is None else window + 1)


def _listed(tensor: FakeTensor) -> Any:
    """What is known of a fake tensor, as a list; fake tensors ask for one entry after the other."""
    return known_of(tensor).tolist() if is_known(tensor) else _to_list(tensor)


_rand, _needs_no_mask = torch.rand, masking_utils._ignore_causal_mask_sdpa
_to_list = FakeTensor.tolist
_num_within, _within_lock = 0, threading.Lock()
_REPLACED = (
    mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", _nothing),
    mock.patch.object(masking_utils, "prepare_padding_mask", _nothing),
    mock.patch.dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {NO_MASK: _nothing}),
    mock.patch.object(masking_utils, "find_packed_sequence_indices", _nothing),
    mock.patch.object(masking_utils, "_ignore_causal_mask_sdpa", _is_plain_causal),
    mock.patch.object(torch, "rand", _draw),
    mock.patch.object(FakeTensor, "tolist", _listed),
)


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
        self._width, self._is_quantized = _width(module), hasattr(module, "quant_mode")  # which returns a scale, too
        self._is_own = _is_leaf_of_a_model(module)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._module = _Whole(module)
        self.__dict__.update({name: None for name, each in module._parameters.items() if each is None})
        self._is_empty = True

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """A blank of the shape that the module would return."""
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor)]
        if not tensors or self._is_quantized or (self._is_own and len(tensors) > 1):
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


class _ReachedError(Exception):
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


class _Stop(_Stub):
    def forward(self, *places: Any, **names: Any) -> Any:
        raise _ReachedError(self._call, (places, names))


class _Give(_Stub):
    hidden: Tensor | None = None

    def forward(self, *_places: Any, **_names: Any) -> Any:
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
            raise _ReachedError(self._call, (places, names))
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


def _records(split: ModelSplit, layers: Collection[int]) -> dict[int, _Record]:
    """Stubs for these layers that record what they are given; nothing behind the last is asked for."""
    found = {layer: _Record(split, layer) for layer in sorted(layers)}
    found[max(layers)].is_last = True
    return found


def tensors_in(arguments: BlockArguments) -> Iterator[Tensor]:
    """The tensors among a block's arguments."""
    leaves = pytree.tree_leaves(arguments)
    return (
        leaf.held if isinstance(leaf, PerSample) else leaf for leaf in leaves if isinstance(leaf, Tensor | PerSample)
    )


Read = tuple[int, int, int] | SplitFeatures | None
"""What the first layer reads: images of this shape, features, or token ids."""


def read_by(split: ModelSplit) -> Read:
    """What the first layer of a model reads."""
    return split.features or split.image


def ids_beside(task: Task) -> str:
    """What the model calls the token ids that its first layer does not read; empty where there are none."""
    return "decoder_input_ids" if task.has_decoder else "input_ids" if task.has_two_lists else ""


def first_tokens(read: Read) -> tuple[int | None, int]:
    """The token of a place of an image, with which a sample begins, and how many; None where there is none."""
    return (read.token, read.places) if isinstance(read, SplitFeatures) else (None, 0)


def given_samples(read: Read, samples: Tensor | None) -> dict[str, Tensor]:
    """What the model's first layer reads, as it is given it: token ids, images, or features [B, ...] by their name."""
    if samples is None:
        return {}
    if isinstance(read, SplitFeatures):
        return {read.name: samples.flatten(0, 1) if read.grid else samples}
    return {"pixel_values" if read else "input_ids": samples}


def beside_features(model: nn.Module, read: Read, ids: Tensor | None) -> dict[str, Tensor]:
    """What a model is told beside patches: the grid of each image, and which of the token ids [B, S] are its places."""
    if not isinstance(read, SplitFeatures) or read.grid is None:
        return {}
    assert ids is not None
    types = torch.zeros(ids.shape, dtype=torch.int, device=ids.device)
    types[:, : read.places] = 1
    found = {"image_grid_thw": torch.tensor([read.grid] * len(ids), device=ids.device), "mm_token_type_ids": types}
    known = inspect.signature(type(model).forward).parameters
    return {name: each for name, each in found.items() if name in known}


def blank(read: Read, samples: int, tokens: int, device: torch.device) -> Tensor:
    """What the first layer reads, of zeros: token ids [B, S], images [B, C, H, W], or features."""
    if read:
        return torch.zeros((samples, *(read.shape if isinstance(read, SplitFeatures) else read)), device=device)
    return torch.zeros((samples, tokens), dtype=torch.long, device=device)


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """What the model's forward pass is told beside the token ids: to keep nothing, and to give logits alone.

    A model of pairs gives its loss, too, which follows from the samples.
    """
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    configs = (model.config, model.config.get_text_config(decoder=True))
    known = "use_cache" in parameters or (takes_any and any(hasattr(each, "use_cache") for each in configs))
    told = {"use_cache": known, ROUTER_LOSS: ROUTER_LOSS in parameters}
    loss = {"return_loss": True} if "return_loss" in parameters else {}
    return {name: False for name, is_known in told.items() if is_known} | loss
