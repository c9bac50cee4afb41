"""Split of a model of transformers by its structure: the data that the planner needs.

`steelyard.modules.splitting` finds the split from the real modules, with torch. The split travels in the plan file
alongside the config, and is cached with the traces, so reading a plan or planning again needs no torch. Numbers of
layer types, layers and places are validated when a split is read. Splits do not describe how layers run: the embedding
and the head are the model's own forward pass, stubbed, and blocks are called as the model calls them
(`steelyard.modules.pieces`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from steelyard.errors import InvalidModelError
from steelyard.files import FilePart
from steelyard.limits import MOST_LAYERS, MOST_SIZE
from steelyard.model.family import LayerRole, LayerType, Layout, SharedWeight, Task, Tensor
from steelyard.model.small import PADDED_TO, WIDTH_KEYS, heads_in, patches_of, sizes_of


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct paths that lie in no other of these paths."""
    distinct = list(dict.fromkeys(paths))
    return tuple(path for path in distinct if not any(is_below(path, other) for other in distinct if other != path))


def is_below_any(path: str, outers: Iterable[str]) -> bool:
    """Return whether a path is one of ``outers`` or lies in one of them."""
    return any(is_below(path, outer) for outer in outers)


def is_below(path: str, outer: str) -> bool:
    """Return whether a module path equals ``outer`` or lies in it."""
    return path.startswith(f"{outer}.") or path == outer


Place = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]
"""Index of a layer, layer type, block, argument or result. The file alone gives no tighter range."""
Token = Annotated[int, Field(ge=0, lt=MOST_SIZE)]


def _permutation(order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"each number from 0 to {len(order) - 1} once")
    return order


Order = Annotated[tuple[Place, ...], AfterValidator(_permutation)]
"""Permutation of the dims of a tensor."""


def check_place(field: str, place: int, known: range, of: str) -> None:
    """Raise `InvalidModelError` if a number of a split is not in ``known``; ``of`` says in words what is known."""
    if place not in known:
        raise wrong_split(field, str(place), f"{known[0]} to {known[-1]}, {of}" if known else f"none: no {of}")


def check_layers(field: str, layers: Sequence[int], roles: Sequence[LayerRole], num_embeddings: int) -> None:
    """Raise `InvalidModelError` if types are unknown or unused, or layers form no chain from embedding to head.

    The chain of an encoder and a decoder has two embeddings.
    """
    for layer, layer_type in enumerate(layers):
        check_place(f"{field}.layers[{layer}]", layer_type, range(len(roles)), "the numbers of its types")
    found = [roles[layer_type] for layer_type in layers]
    num_others = len(found) - found.count(LayerRole.BLOCK)
    if found[:1] + found[-1:] != [LayerRole.EMBEDDING, LayerRole.HEAD] or num_others != num_embeddings + 1:
        expected = f"an embedding first, the head last, blocks between, {num_embeddings} embeddings in all"
        raise wrong_split(f"{field}.layers", f"layers of the roles {', '.join(found):.100}", expected)
    unused = {*range(len(roles))} - {*layers}
    if unused:
        raise wrong_split(f"{field}.kinds[{min(unused)}]", "a layer type without layers", "layer types")


def wrong_split(field: str, found: str, expected: str) -> InvalidModelError:
    """Return the error for a part of a split that contradicts another part."""
    return InvalidModelError(field=field, found=found, expected=expected, hint="plan again: the split was changed")


TEXT_PART = "text_config"
"""Key of the text part in the config of a model of several parts."""

SPLIT_VERSION = 10
"""Version of the splitting algorithm. Bump when the algorithm changes."""

Count = Annotated[int, Field(ge=1, lt=2**53)]


class SplitLayerType(FilePart):
    """Layer type of a split; see `LayerType` for the fields of the same names."""

    name: str
    role: LayerRole
    tp_divides: tuple[tuple[str, Count], ...] = ()
    no_tp: str = ""
    tp_shares: tuple[str, ...] = ()
    no_sp: str = ""
    no_cp: str = ""
    unread_plan: str = ""
    """Reason why tp is inferred from structure: unread styles of the model's own plan, or why it is not proved."""
    num_experts: Annotated[int, Field(ge=0, lt=2**53)] = 0
    attention: str = "full_attention"
    styles: dict[str, str] = Field(default={})
    """Styles of the modules that tensor parallelism divides, by path in the layer, as in `Family.tp`."""
    tokens: tuple[Annotated[int, Field(ge=0, lt=2**53)], Annotated[int, Field(ge=0, lt=2**53)]] = (1, 0)
    shape: tuple[Count, ...] = ()
    """Shape of the output for one sample, if it does not follow from the number of tokens."""
    returns_state: bool = False
    """Whether blocks return only the hidden state although others of their list return more."""


_OF_LAYER_TYPE = tuple(each.name for each in fields(LayerType) if each.name in SplitLayerType.model_fields)


def layer_type_of(layer_type: SplitLayerType, *, hidden: tuple[int, int] | None, num_streams: int = 1) -> LayerType:
    """Return the layer type of the chain for a layer type of a split."""
    return LayerType(
        **{name: getattr(layer_type, name) for name in _OF_LAYER_TYPE}, hidden=hidden, num_streams=num_streams
    )


def length_of(shape: tuple[int, ...]) -> int:
    """Number of positions of a hidden state [S, H] or [H, rows, columns]."""
    return shape[0] if len(shape) == 2 else prod(shape[1:])


def width_of(shape: tuple[int, ...]) -> int:
    """Number of entries per position of a hidden state [S, H] or [H, rows, columns]."""
    return shape[-1] if len(shape) == 2 else shape[0]


def _rescaled(calls: Sequence[str], known: Mapping[int, int]) -> tuple[str, ...]:
    """Return calls with the numbers that are roots of sizes, by which T5 scales its decoder's result, at new sizes."""
    roots = {repr(size**power): repr(new**power) for size, new in known.items() for power in (0.5, -0.5)}
    parts = (step.rpartition(":") for step in calls)
    return tuple(f"{path}{colon}{roots.get(last, last)}" for path, colon, last in parts)


def _resized(shape: tuple[int, ...], width: int, before: int, patches: tuple[int, int]) -> tuple[int, ...]:
    """Return a shape [S, H] or [H, rows, columns] of a model of width ``before``, scaled to ``width``.

    For [S, H] the length is also scaled by the number of patches: ``patches`` now and before.
    """
    if len(shape) == 2:
        return shape[0] * patches[0] // patches[1], shape[1] * width // before
    return (shape[0] * width // before, *shape[1:]) if shape else ()


class BlockCall(FilePart):
    """Calling convention of blocks: where the hidden state is passed in and returned."""

    argument: Place | str = 0
    """Place or name of the hidden state among the arguments."""
    result: Place | str | None = None
    """Place or name of the hidden state in the result; None if the result is the hidden state."""
    num_results: Place | None = None
    """Number of returned values; None if only the hidden state is returned."""
    number: Place | str | None = None
    """Place or name of the argument that counts the blocks from 0; None if there is none."""
    order: Order = ()
    """Dims of the hidden state in the order samples, tokens, all others; empty if they have that order."""
    inner: tuple[Count, ...] = ()
    """Sizes of the other dims, if there are several."""
    places: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Positions per sample, if samples and positions are one dim of the hidden state; otherwise 0."""
    lone: bool = False
    """Whether the hidden state has a leading dim of size 1."""

    def hidden(self, arguments: "BlockArguments") -> Tensor:
        """Return the hidden state [B, S, H] among a block's arguments."""
        places, names = arguments
        return self._flat(names[self.argument] if isinstance(self.argument, str) else places[self.argument])

    def with_hidden(self, arguments: "BlockArguments", hidden: Tensor | None) -> "BlockArguments":
        """Return the arguments with another hidden state [B, S, H]."""
        places, names = arguments
        hidden = hidden if hidden is None else self._ordered(hidden)
        if isinstance(self.argument, str):
            return places, {**names, self.argument: hidden}
        return _with(places, self.argument, hidden), names

    def _flat(self, hidden: Tensor) -> Tensor:
        hidden = hidden.squeeze(0) if self.lone else hidden
        hidden = hidden.unflatten(0, (-1, self.places)) if self.places else hidden
        hidden = hidden.permute(self.order) if self.order else hidden
        return hidden.flatten(2) if self.inner else hidden

    def _ordered(self, hidden: Tensor) -> Tensor:
        hidden = hidden.unflatten(2, self.inner) if self.inner else hidden
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        hidden = hidden.permute(places).contiguous() if places else hidden
        hidden = hidden.flatten(0, 1) if self.places else hidden
        return hidden.unsqueeze(0) if self.lone else hidden

    def with_number(self, arguments: "BlockArguments", block: int) -> "BlockArguments":
        """Return the arguments with the number of another block of the layer type."""
        return arguments if self.number is None else BlockCall(argument=self.number).with_hidden(arguments, block)

    def returned(self, hidden: Tensor) -> Any:
        """Return the hidden state in the form in which blocks return it."""
        hidden = self._ordered(hidden)
        if isinstance(self.result, str):
            return {self.result: hidden}
        return hidden if self.result is None else _with((None,) * (self.num_results or 1), self.result, hidden)

    def result_of(self, outputs: Any) -> Tensor:
        """Return the hidden state [B, S, H] in a block's result."""
        return self._flat(self.state_in(outputs))

    def state_in(self, outputs: Any) -> Tensor:
        """Return the hidden state in a block's result, as the block returns it."""
        is_alone = self.result is None or not isinstance(outputs, tuple | list | dict)
        return outputs if is_alone else outputs[self.result]


BlockArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments of a block, positional and by name."""


def _with(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


class SplitEncoder(FilePart):
    """First of two lists of blocks: an encoder that the decoder's blocks read, or an image tower."""

    blocks: str
    """Path of the list of the encoder's blocks."""
    call: BlockCall
    between: tuple[str, ...]
    """Paths of the modules between these blocks and the decoder's: the decoder's embedding, the encoder's last norm."""
    encoded: Place | str | None = None
    """Place or name of the encoder's output among the arguments of the decoder's blocks; None if they read none."""
    order: Order = ()
    """Order of the dims of the encoder's output, as in `BlockCall.order`."""
    shape: tuple[Count, ...] = ()
    """Shape of the encoder's output for one sample, if it does not follow from the number of tokens."""
    between_calls: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Calls, as in `ModelSplit.embedding_calls`, that make the decoder's first hidden state from its token ids, and the
    encoder's output from the result of its last block; None if more than such calls is done."""

    @property
    def reads(self) -> BlockCall:
        """Place of the encoder's output among the arguments of the decoder's blocks."""
        assert self.encoded is not None
        return BlockCall(argument=self.encoded, order=self.order)


class SplitFeatures(FilePart):
    """Input of the first layer of a model whose samples hold more than token ids."""

    name: str
    """Name of the input in the model."""
    shape: tuple[Count, ...]
    """Shape for one sample."""
    token: Token | None = None
    """Placeholder token that the first blocks' output replaces among the token ids; None if there is none."""
    places: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Number of leading tokens of a sample that are the placeholder token."""
    grid: tuple[Count, Count, Count] | None = None
    """Frames, rows and columns of an image's patches, if the model reads the patches of all samples as one list."""

    def words(self, seq_len: int) -> str:
        """Describe the contents of a sample."""
        read = f"a sample: {self.name} of {' × '.join(map(str, self.shape))}"
        read += f" ({' × '.join(map(str, self.grid[1:]))} patches)" if self.grid else ""
        if self.token is None:
            return f"{read} for the encoder, {seq_len} tokens for the decoder"
        return f"{read}; {seq_len} tokens, of which the first {self.places} are the image's and the others text"


class SplitStream(FilePart):
    """Cross-layer input: a tensor that flows past blocks alongside the hidden state to the blocks that read it."""

    argument: Place | str
    """Place or name among the arguments of the blocks that read it."""
    entry: tuple[str, Place] | None = None
    """Key and place in the argument, if that is a mapping of tuples."""
    result: Place | None = None
    """Place in the result of the block that makes it; None if it is the hidden state or lies in a mapping."""
    maker: Place = 0
    """Layer that makes it: the embedding, or a block."""
    readers: tuple[Place, ...]
    """Layers that read it."""
    shape: tuple[Annotated[int, Field(gt=-(2**53), lt=2**53)], ...]
    """Shape for one sample; 0 stands for its number of tokens, and -n for n more than that."""
    most: tuple[Annotated[int, Field(ge=0, lt=2**53)], ...] = ()
    """Upper limit of each of these sizes, 0 for no limit; empty if no size has a limit."""
    whole: str = ""
    """Integer dtype if it holds integers, which have no gradient; empty for states."""

    @property
    def reads(self) -> BlockCall:
        """Place of the stream, or of its mapping, among the arguments of the blocks that read it."""
        return BlockCall(argument=self.argument)

    def made(self, names: Mapping[str, Any], outputs: Any, hidden: Tensor | None = None) -> Tensor:
        """Return the stream from the named arguments, the outputs or the hidden state of the block that makes it."""
        if self.entry is None:
            return hidden if self.result is None else outputs[self.result]
        key, place = self.entry
        return names[str(self.argument)][key][place]

    def of_tokens(self, seq_len: int) -> tuple[int, ...]:
        """Shape for a sample of ``seq_len`` tokens."""
        sizes = (size if size > 0 else seq_len - size for size in self.shape)
        most = self.most or (0,) * len(self.shape)
        return tuple(min(size, limit or size) for size, limit in zip(sizes, most, strict=True))

    def entries(self, seq_len: int) -> int:
        """Number of bf16 entries of the same total size."""
        width = {"": 1, "int32": 2}.get(self.whole, 4)
        return width * prod(self.of_tokens(seq_len))

    def of_layers(self, kept: Sequence[int]) -> "SplitStream":
        """Return the stream in a model with only the kept layers, which include the layer that makes it."""
        readers = tuple(kept.index(layer) for layer in self.readers if layer in kept)
        return self.model_copy(update={"maker": kept.index(self.maker), "readers": readers})

    def resized(self, sizes: Mapping[int, int]) -> "SplitStream":
        """Return the stream with sizes replaced: ``sizes`` maps old sizes to new ones."""
        return self.model_copy(update={"shape": tuple(sizes.get(size, size) for size in self.shape)})


class SplitLayers(FilePart):
    """Queries on the split of any model, of transformers or a user's own module."""

    if TYPE_CHECKING:

        @property
        def streams(self) -> tuple[SplitStream, ...]: ...  # noqa: D102

        def modules(self, layer: int) -> Mapping[str, str]: ...  # noqa: D102

    def read_by(self, layer: int) -> tuple[int, ...]:
        """Return the numbers of the streams that a layer reads."""
        return tuple(number for number, each in enumerate(self.streams) if layer in each.readers)

    def made_by(self, layer: int) -> tuple[int, ...]:
        """Return the numbers of the streams that a layer makes."""
        return tuple(number for number, each in enumerate(self.streams) if layer == each.maker)

    def past(self, layer: int) -> tuple[int, ...]:
        """Return the numbers of the streams that flow out of a layer, because later layers read them."""
        return tuple(n for n, each in enumerate(self.streams) if each.maker <= layer < max(each.readers))

    def model_path(self, layer: int, path: str) -> str:
        """Return the path in the model for a path in a layer."""
        name, dot, rest = path.partition(".")
        return (self.modules(layer)[name] + dot + rest).removeprefix(".")


class ModelSplit(SplitLayers):
    """Split of a model of transformers into a chain: embedding, blocks, head.

    With an encoder, its embedding and blocks come first, then the decoder's embedding, whose role is also embedding,
    and the decoder's blocks.
    """

    module: ClassVar[str] = ""
    no_bf16: ClassVar[str] = ""
    """Fields of `steelyard.model.own.OwnSplit` that only a user's own module has, as constants."""
    model_type: str
    task: Task
    text_alone: str = ""
    """Reason why only the model of the config's `TEXT_PART` is planned: what the whole class lacks; else empty."""
    embedding: tuple[str, ...]
    """Paths in the model of the modules that hold the embedding's parameters."""
    blocks: str
    """Path of the list of blocks."""
    called: tuple[Place, ...] = ()
    """Places in that list of the blocks that are called; empty if all are."""
    head: tuple[str, ...]
    """Paths of the modules that hold the head's parameters."""
    holders: tuple[str, ...] = ()
    """Paths among ``embedding`` and ``head`` of modules that also hold blocks; only their direct parameters count."""
    kinds: tuple[SplitLayerType, ...]
    layers: tuple[Place, ...]
    """Index of each layer's type in ``kinds``, embedding and head included."""
    call: BlockCall
    embedding_calls: tuple[str, ...] = ()
    """Paths of modules, and operations between them (`steelyard.modules.called`), that called in order make the first
    hidden state from token ids; empty if more than such calls is done."""
    head_calls: tuple[str, ...] = ()
    """Calls, as in ``embedding_calls``, that make logits from the result of the last block."""
    head_sees_shape: bool = False
    """Whether the computation after the blocks depends on the shape of the token ids, not only on the hidden state."""
    sides_by_sample: bool = False
    """Whether the other inputs of blocks, besides the hidden state, are needed once per sample of a microbatch."""
    asks_for_values: bool = False
    """Whether the model reads values (such as the token count of an expert), which tensors without values lack."""
    typed_buffers: tuple[str, ...] = ()
    """Buffers of blocks, by path in the layer, that must have the dtype of the activations."""
    hidden_size: Count
    vocab_size: Count
    max_seq_len: Count
    multiple: Count = 1
    """Required divisor of every sequence length, because the model would pad sequences to a multiple of it."""
    learned_positions: bool
    rotary_size: Annotated[int, Field(ge=0, lt=2**53)]
    rotary_by_attention: bool
    fused_attention: bool
    image: tuple[Count, Count, Count] | None = None
    """Channels, height and width of the input image; None if the model reads token ids."""
    features: SplitFeatures | None = None
    """Input of the first layer, if the decoder's embedding reads the token ids of a sample."""
    resting: tuple[str, ...] = ()
    """Paths of modules that no sample trains, in models with ``features``: frozen, or not used by the logits."""
    layerdrop: tuple[str, ...] = ()
    """Stacks that skip blocks at random when they are trained in transformers: ``model.encoder: 0.05``."""
    shared: tuple[tuple[tuple[Place, str], ...], ...] = ()
    """Parameters that several layers hold, as (layer, path in the model) of each copy."""
    encoder: SplitEncoder | None = None
    streams: tuple[SplitStream, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_layers(
            "model.split", self.layers, [layer_type.role for layer_type in self.kinds], 2 if self.encoder else 1
        )
        layers = range(len(self.layers))
        if self.called and len(self.called) != len(self.block_layers(self.blocks)):
            expected = f"{len(self.block_layers(self.blocks))}, one per block"
            raise wrong_split("model.split.called", f"{len(self.called)} places", expected)
        for number, copies in enumerate(self.shared):
            where = f"model.split.shared[{number}]"
            for layer, path in copies:
                check_place(where, layer, layers, "the layers of the model")
                if not any(
                    path == each or path.startswith(f"{each}." * bool(each)) for each in self.modules(layer).values()
                ):
                    raise wrong_split(where, f"{path} in layer {layer}", "the path of a module of the layer")
        for number, stream in enumerate(self.streams):
            where = f"model.split.streams[{number}]"
            check_place(f"{where}.maker", stream.maker, layers[:-1], "the layers before the head")
            for reader in stream.readers:
                check_place(f"{where}.readers", reader, layers[stream.maker + 1 :], "the layers after its maker")
            if not stream.readers or len(stream.most) not in (0, len(stream.shape)):
                raise wrong_split(where, "no readers, or more limits than sizes", "readers, and one limit per size")
        return self

    @property
    def between(self) -> int:
        """Layer of the decoder's embedding; 0 without an encoder."""
        embeddings = (place for place in range(len(self.layers)) if self.type_of(place).role is LayerRole.EMBEDDING)
        return next(filter(None, embeddings), 0)

    def type_of(self, layer: int) -> SplitLayerType:
        """Return the type of a layer."""
        return self.kinds[self.layers[layer]]

    def _is_of_ends(self, copies: tuple[tuple[int, str], ...]) -> bool:
        """Return whether an embedding or the head holds a copy of a shared parameter."""
        return any(self.kinds[self.layers[layer]].role is not LayerRole.BLOCK for layer, _ in copies)

    def of_encoder(self, layer: int) -> SplitEncoder | None:
        """Return the encoder if the layer is one of its blocks."""
        return self.encoder if 0 < layer < self.between else None

    def list_of(self, layer: int) -> str:
        """Return the path of the list that contains a block."""
        return (self.of_encoder(layer) or self).blocks

    def call_of(self, layer: int) -> BlockCall:
        """Return the calling convention of a block."""
        call = (self.of_encoder(layer) or self).call
        returns_state = self.kinds[self.layers[layer]].returns_state
        return call.model_copy(update={"result": None, "num_results": None}) if returns_state else call

    def block_layers(self, path: str) -> list[int]:
        """Return the layers of the blocks of a list."""
        of_encoder = self.encoder is not None and path == self.encoder.blocks
        return list(range(1, self.between) if of_encoder else range(self.between + 1, len(self.layers) - 1))

    @property
    def lists(self) -> tuple[str, ...]:
        """Paths of the lists of blocks, in the order of the chain."""
        return (self.encoder.blocks, self.blocks) if self.encoder else (self.blocks,)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all modules that layers are made of."""
        between = self.encoder.between if self.encoder else ()
        return (*self.embedding, *between, *self.head, *self.lists)

    def num_streams(self, layer: int) -> int:
        """Number of hidden states that flow out of a layer: 2 if the encoder's output goes along with the decoder's."""
        return 2 if self._is_encoded and self.between <= layer < len(self.layers) - 1 else 1

    @property
    def _is_encoded(self) -> bool:
        """Whether the blocks after an encoder read its output."""
        return self.encoder is not None and self.encoder.encoded is not None

    def reads_encoded(self, layer: int) -> SplitEncoder | None:
        """Return the encoder if the layer comes after it and its blocks read the encoder's output."""
        encoder = self.encoder if layer > self.between else None
        return encoder if encoder and encoder.encoded is not None else None

    def fixed_shapes(self, layer: int) -> tuple[tuple[int, ...], ...] | None:
        """Shapes for one sample of the states that flow out of a layer; None if they follow from its tokens."""
        shape = self.type_of(layer).shape
        return (shape,) if shape else None

    def places(self, layer: int, before: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """Return the places of a layer's inputs in the output of the layer ``before``, and the places of what flows on.

        Streams that the layer itself makes are numbered after those of that output. The first result is None if the
        layer reads everything: a decoder after an encoder, whose blocks hand on more than one state.
        """
        if self._is_encoded and layer >= self.between:
            return None, ()
        known = (*self.past(before), *self.made_by(layer))
        read, past = self.read_by(layer), self.past(layer)
        return (0, *(1 + known.index(number) for number in read)), tuple(1 + known.index(number) for number in past)

    def with_layers(self, kept: Sequence[int]) -> "ModelSplit":
        """Return the split with only the kept layers, which include the ends."""
        layer_types, blocks = sorted({self.layers[layer] for layer in kept}), self.block_layers(self.blocks)
        found = self.model_copy(
            update={
                "kinds": tuple(self.kinds[layer_type] for layer_type in layer_types),
                "layers": tuple(layer_types.index(self.layers[layer]) for layer in kept),
                "called": tuple(self.place_of(layer) for layer in blocks if layer in kept) if self.called else (),
            }
        )
        shared = tuple(
            tuple(
                (kept.index(layer), found.model_path(kept.index(layer), self.local_path(layer, path)))
                for layer, path in copies
                if layer in kept
            )
            for copies in self.shared
        )
        streams = tuple(
            each.of_layers(kept) for each in self.streams if each.maker in kept and {*each.readers} & {*kept}
        )
        return found.model_copy(
            update={"shared": tuple(copies for copies in shared if len(copies) > 1), "streams": streams}
        )

    def resized(self, before: Mapping[str, Any], config: Mapping[str, Any], divisor: int) -> "ModelSplit":
        """Return the split at the sizes of another config than ``before``; ``divisor`` divides all of its sizes.

        Sizes that no config gives do not change: the number of image classes, and widths that are given per stage.
        """
        before, config = ({**(each.get(TEXT_PART) or {}), **each} for each in (before, config))
        width = next((config[key] for key in WIDTH_KEYS if key in config), self.hidden_size)
        heads, patches = heads_in(config), (patches_of(config), patches_of(before))
        layer_types = tuple(
            layer_type.model_copy(
                update={
                    "tp_divides": tuple((name, heads.get(name, divisor)) for name, _ in layer_type.tp_divides),
                    "num_experts": divisor if layer_type.num_experts else 0,
                    "shape": _resized(layer_type.shape, width, self.hidden_size, patches),
                }
            )
            for layer_type in self.kinds
        )
        vocabulary = config["vocab_size"] if self.image is None else self.vocab_size
        if patches[0] != patches[1] and self.image is not None:
            image = (self.image[0], config["image_size"], config["image_size"])
            of_image = {"image": image, "max_seq_len": self.max_seq_len * patches[0] // patches[1]}
            return self.model_copy(update={**of_image, "hidden_size": width, "kinds": layer_types})
        known = sizes_of(before, config)
        streams = tuple(each.resized(known) for each in self.streams)
        call = self.call.model_copy(update={"inner": tuple(known.get(size, size) for size in self.call.inner)})
        width = prod(call.inner) if call.inner else width
        sizes: dict[str, object] = {"multiple": min(self.multiple, PADDED_TO)}
        sizes |= {
            "hidden_size": width,
            "vocab_size": vocabulary,
            "kinds": layer_types,
            "streams": streams,
            "call": call,
            "head_calls": _rescaled(self.head_calls, known),
        }
        return self.model_copy(update=sizes)

    def layout(self) -> Layout:
        """Return the chain of layers."""
        return Layout(
            layer_types=tuple(
                layer_type_of(
                    layer_type,
                    hidden=(length_of(layer_type.shape), width_of(layer_type.shape)) if layer_type.shape else None,
                    num_streams=self.num_streams(self.layers.index(number)),
                )
                for number, layer_type in enumerate(self.kinds)
            ),
            layers=self.layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            tied_embeddings=any(self._is_of_ends(copies) for copies in self.shared),
            shared=tuple(
                SharedWeight(copies=tuple((layer, self.local_path(layer, path)) for layer, path in copies))
                for copies in sorted(self.shared, key=self._is_of_ends, reverse=True)
            ),
            rotary_size=self.rotary_size,
            learned_positions=self.learned_positions,
            image=self.image,
        )

    def modules(self, layer: int) -> Mapping[str, str]:
        """Return the path in the model of each module of a layer, by its name in the layer."""
        between = self.encoder.between if self.encoder else ()
        ends = {self.between: between, 0: self.embedding, len(self.layers) - 1: self.head}
        if layer in ends:
            return {local_name(path): path for path in ends[layer]}
        return {"block": f"{self.list_of(layer)}.{self.place_of(layer)}"}

    def place_of(self, layer: int) -> int:
        """Return the place of a block in its list."""
        number = layer - 1 - (0 if self.of_encoder(layer) else self.between)
        return self.called[number] if self.called and not self.of_encoder(layer) else number

    def local_path(self, layer: int, path: str) -> str:
        """Return the path in a layer for a path in the model."""
        for name, module in self.modules(layer).items():
            if path == module or path.startswith(f"{module}."):
                return name + path.removeprefix(module)
        raise AssertionError(f"layer {layer} does not hold {path}")


def local_name(path: str) -> str:
    """Return the name in its layer of the module at a path of the model."""
    return path.replace(".", "__")
