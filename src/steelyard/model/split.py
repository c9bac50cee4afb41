"""A model of transformers, split by its structure: what the planner must know of it, as data.

The split is found from the real modules (`steelyard.modules.splitting`, with torch), travels in the plan file beside
the config, and is kept with the traces; so reading a plan or planning again needs no torch. Each number in it that
stands for a layer type, a layer, or a place in what flows is checked as it is read. How layers run is not said here:
the embedding and the head are the model's own forward pass, stubbed, and blocks are called as the model calls them
(`steelyard.modules.pieces`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from steelyard.errors import InvalidModelError
from steelyard.limits import MOST_LAYERS, MOST_SIZE
from steelyard.model.family import LayerRole, LayerType, Layout, SharedWeight, Task, Tensor
from steelyard.model.small import PADDED_TO, WIDTH_KEYS, heads_in, patches_of, sizes_of


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Of paths, each once, those that lie in no other of them."""
    distinct = list(dict.fromkeys(paths))
    return tuple(path for path in distinct if not any(is_below(path, other) for other in distinct if other != path))


def is_below_any(path: str, outers: Iterable[str]) -> bool:
    """Whether a path is one of others or lies in one of them."""
    return any(is_below(path, outer) for outer in outers)


def is_below(path: str, outer: str) -> bool:
    """Whether a path of a module is another one or lies in it."""
    return path.startswith(f"{outer}.") or path == outer


Place = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]
"""A layer, a layer type, a block, an argument or a result; in the file alone, no more is known of it."""
Token = Annotated[int, Field(ge=0, lt=MOST_SIZE)]


def _permutation(order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"every number from 0 to {len(order) - 1} once")
    return order


Order = Annotated[tuple[Place, ...], AfterValidator(_permutation)]
"""Dims of a tensor in another order."""


def check_place(field: str, place: int, known: range, of: str) -> None:
    """Raises `InvalidModelError` where a number of a split is not among those known, which are ``of`` something."""
    if place not in known:
        raise wrong_split(field, str(place), f"{known[0]} to {known[-1]}, {of}" if known else f"none: no {of}")


def check_layers(field: str, layers: Sequence[int], roles: Sequence[LayerRole], num_embeddings: int) -> None:
    """Raises `InvalidModelError` where layers are of layer types that are not there, or no chain from embedding to
    head.

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
        raise wrong_split(f"{field}.kinds[{min(unused)}]", "a layer type that no layer is of", "layer types")


def wrong_split(field: str, found: str, expected: str) -> InvalidModelError:
    """The error for a part of a split that contradicts another."""
    return InvalidModelError(field=field, found=found, expected=expected, hint="plan again: the split was changed")


TEXT_PART = "text_config"
"""What the config of a model of several parts calls that of its text."""

SPLIT_VERSION = 8
"""Raised whenever models are split differently."""

Count = Annotated[int, Field(ge=1, lt=2**53)]


class SplitPart(BaseModel):
    """A part of a split; methods of splits of any model."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class SplitLayerType(SplitPart):
    """One layer type; see the fields of the same names of `LayerType`."""

    name: str
    role: LayerRole
    tp_divides: tuple[tuple[str, Count], ...] = ()
    no_tp: str = ""
    tp_shares: tuple[str, ...] = ()
    no_sp: str = ""
    no_cp: str = ""
    unread_plan: str = ""
    """Why tp is supposed from structure: styles of the model's own plan that are not read, or why it is not proved."""
    num_experts: Annotated[int, Field(ge=0, lt=2**53)] = 0
    attention: str = "full_attention"
    styles: dict[str, str] = {}
    """The style of the modules that tensor parallelism divides, by their path in the layer: as `Family.tp`."""
    tokens: tuple[Annotated[int, Field(ge=0, lt=2**53)], Annotated[int, Field(ge=0, lt=2**53)]] = (1, 0)
    shape: tuple[Count, ...] = ()
    """Of one sample of what flows out, where that does not follow from the number of tokens."""
    returns_state: bool = False
    """Whether blocks return the hidden state alone where others of their list return more."""


_OF_LAYER_TYPE = tuple(each.name for each in fields(LayerType) if each.name in SplitLayerType.model_fields)


def layer_type_of(layer_type: SplitLayerType, *, hidden: tuple[int, int] | None, num_streams: int = 1) -> LayerType:
    """A layer type of the chain."""
    return LayerType(
        **{name: getattr(layer_type, name) for name in _OF_LAYER_TYPE}, hidden=hidden, num_streams=num_streams
    )


def length_of(shape: tuple[int, ...]) -> int:
    """The places of a hidden state [S, H] or [H, rows, columns]."""
    return shape[0] if len(shape) == 2 else prod(shape[1:])


def width_of(shape: tuple[int, ...]) -> int:
    """The entries at each place of a hidden state [S, H] or [H, rows, columns]."""
    return shape[-1] if len(shape) == 2 else shape[0]


def _resized(shape: tuple[int, ...], width: int, before: int, patches: tuple[int, int]) -> tuple[int, ...]:
    """The shape [S, H] or [H, rows, columns] where a model of the width ``before`` has another.

    [S, H] may have another number of patches, too: ``patches`` now and before.
    """
    if len(shape) == 2:
        return shape[0] * patches[0] // patches[1], shape[1] * width // before
    return (shape[0] * width // before, *shape[1:]) if shape else ()


class BlockCall(SplitPart):
    """How the model calls its blocks: where the hidden state goes in, and where it comes out."""

    argument: Place | str = 0
    """Place or name of the hidden state among the arguments."""
    result: Place | str | None = None
    """Place or name of the hidden state in what is returned; None where it is all."""
    num_results: Place | None = None
    """How many things are returned; None where it is the hidden state alone."""
    number: Place | str | None = None
    """Place or name of the argument that counts the blocks from 0; None where there is none."""
    order: Order = ()
    """The dims of the hidden state that are samples, tokens, and all others; empty where they stand in that order."""
    inner: tuple[Count, ...] = ()
    """The sizes of all others, where they are several."""
    places: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """The places of each sample where samples and places are one dim of the hidden state; else 0."""
    lone: bool = False
    """Whether a dim of one stands before that."""

    def hidden(self, arguments: "BlockArguments") -> Tensor:
        """The hidden state [B, S, H] among a block's arguments."""
        places, names = arguments
        return self._flat(names[self.argument] if isinstance(self.argument, str) else places[self.argument])

    def with_hidden(self, arguments: "BlockArguments", hidden: Tensor | None) -> "BlockArguments":
        """The arguments with another hidden state [B, S, H]."""
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
        """The arguments as they are for another block of the layer type."""
        return arguments if self.number is None else BlockCall(argument=self.number).with_hidden(arguments, block)

    def returned(self, hidden: Tensor) -> Any:
        """The hidden state in the form in which blocks return it."""
        hidden = self._ordered(hidden)
        if isinstance(self.result, str):
            return {self.result: hidden}
        return hidden if self.result is None else _with((None,) * (self.num_results or 1), self.result, hidden)

    def result_of(self, outputs: Any) -> Tensor:
        """The hidden state [B, S, H] in what a block returns."""
        return self._flat(self.state_in(outputs))

    def state_in(self, outputs: Any) -> Tensor:
        """The hidden state as a block returns it, alone or among more."""
        is_alone = self.result is None or not isinstance(outputs, tuple | list | dict)
        return outputs if is_alone else outputs[self.result]


BlockArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""What a block is given, by place and by name."""


def _with(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


class SplitEncoder(SplitPart):
    """Of a model of two lists of blocks the first: an encoder that the decoder's blocks read, or a tower for images."""

    blocks: str
    """Path of the list of the encoder's blocks."""
    call: BlockCall
    between: tuple[str, ...]
    """Paths of the modules called behind those and before the decoder's: its embedding, and the encoder's last norm."""
    encoded: Place | str | None = None
    """Place or name of the encoder's output among the arguments of the decoder's blocks; None where they read none."""
    order: Order = ()
    """The order of its dims: as `BlockCall.order`."""
    shape: tuple[Count, ...] = ()
    """Of one sample of that output, where it does not follow from the number of tokens."""
    between_calls: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """As `ModelSplit.embedding_calls`: what makes the decoder's first hidden state of its token ids, and the encoder's
    output of what its last block returns; None where more is done than that."""

    @property
    def reads(self) -> BlockCall:
        """Where the decoder's blocks are given the encoder's output."""
        assert self.encoded is not None
        return BlockCall(argument=self.encoded, order=self.order)


class SplitFeatures(SplitPart):
    """Of a model whose samples hold more than token ids: what the first layer reads."""

    name: str
    """What the model calls it."""
    shape: tuple[Count, ...]
    """Of one sample."""
    token: Token | None = None
    """The token in whose places the first blocks' output stands among the token ids; None where it does not."""
    places: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """The first tokens of a sample, so many, are that one."""
    grid: tuple[Count, Count, Count] | None = None
    """Frames, rows and columns of the patches of an image, which the model takes as one list of all samples'."""

    def words(self, seq_len: int) -> str:
        """What a sample holds."""
        read = f"a sample: {self.name} of {' × '.join(map(str, self.shape))}"
        read += f" ({' × '.join(map(str, self.grid[1:]))} patches)" if self.grid else ""
        if self.token is None:
            return f"{read} for the encoder, {seq_len} tokens for the decoder"
        return f"{read}; {seq_len} tokens, of which the first {self.places} are the image's and the others text"


class SplitStream(SplitPart):
    """What depends on parameters and flows past the hidden state to the blocks that read it."""

    argument: Place | str
    """Its place or name among the arguments of those blocks."""
    entry: tuple[str, Place] | None = None
    """Where that is a mapping of tuples: its key and its place there."""
    result: Place | None = None
    """Its place in what the block returns that makes it; None of its hidden state, and of what is in a mapping."""
    maker: Place = 0
    """The layer that makes it: the embedding, or a block."""
    readers: tuple[Place, ...]
    """The layers that read it."""
    shape: tuple[Annotated[int, Field(gt=-(2**53), lt=2**53)], ...]
    """Of one sample; 0 stands for its tokens, and -n for n more than these."""
    most: tuple[Annotated[int, Field(ge=0, lt=2**53)], ...] = ()
    """For each of these sizes what it never exceeds, 0 where there is no such number; empty where there is none."""
    whole: str = ""
    """The type of the whole numbers that it holds, which have no gradient; empty where it is a state."""

    @property
    def reads(self) -> BlockCall:
        """Where those blocks are given it, or the mapping."""
        return BlockCall(argument=self.argument)

    def made(self, names: Mapping[str, Any], outputs: Any, hidden: Tensor | None = None) -> Tensor:
        """The stream among what the block that makes it was given by name, and what it returned: its hidden state."""
        if self.entry is None:
            return hidden if self.result is None else outputs[self.result]
        key, place = self.entry
        return names[str(self.argument)][key][place]

    def of_tokens(self, seq_len: int) -> tuple[int, ...]:
        """The shape for a sample of so many tokens."""
        sizes = (size if size > 0 else seq_len - size for size in self.shape)
        most = self.most or (0,) * len(self.shape)
        return tuple(min(size, limit or size) for size, limit in zip(sizes, most, strict=True))

    def entries(self, seq_len: int) -> int:
        """The entries of a state that take as much memory, in bf16."""
        width = {"": 1, "int32": 2}.get(self.whole, 4)
        return width * prod(self.of_tokens(seq_len))

    def of_layers(self, kept: Sequence[int]) -> "SplitStream":
        """The same where some layers are kept, the one that makes it among them."""
        readers = tuple(kept.index(layer) for layer in self.readers if layer in kept)
        return self.model_copy(update={"maker": kept.index(self.maker), "readers": readers})

    def resized(self, sizes: Mapping[int, int]) -> "SplitStream":
        """The same with other sizes in the place of those that are there."""
        return self.model_copy(update={"shape": tuple(sizes.get(size, size) for size in self.shape)})


class SplitLayers(SplitPart):
    """Questions that every split answers, of a model of transformers and of a user's own module."""

    if TYPE_CHECKING:

        @property
        def streams(self) -> tuple[SplitStream, ...]: ...  # noqa: D102

        def modules(self, layer: int) -> Mapping[str, str]: ...  # noqa: D102

    def read_by(self, layer: int) -> tuple[int, ...]:
        """The streams, by their number, that a layer reads."""
        return tuple(number for number, each in enumerate(self.streams) if layer in each.readers)

    def made_by(self, layer: int) -> tuple[int, ...]:
        """The streams that a layer makes."""
        return tuple(number for number, each in enumerate(self.streams) if layer == each.maker)

    def past(self, layer: int) -> tuple[int, ...]:
        """The streams that flow out of a layer beside its hidden state: those that layers behind it read."""
        return tuple(n for n, each in enumerate(self.streams) if each.maker <= layer < max(each.readers))

    def model_path(self, layer: int, path: str) -> str:
        """The path in the model of what has this path in a layer."""
        name, dot, rest = path.partition(".")
        return (self.modules(layer)[name] + dot + rest).removeprefix(".")


class ModelSplit(SplitLayers):
    """The split of one model of transformers into a chain: embedding, blocks, head.

    With an encoder: its embedding and blocks, the decoder's embedding, of the role of embeddings too, and its blocks.
    """

    module: ClassVar[str] = ""
    no_bf16: ClassVar[str] = ""
    """What only a user's own module has: as in `steelyard.model.own.OwnSplit`."""
    model_type: str
    task: Task
    text_alone: str = ""
    """Why it is the model of a config's `TEXT_PART` alone: what the class of the whole lacks; else empty."""
    embedding: tuple[str, ...]
    """Paths in the model of the modules that hold the embedding's parameters."""
    blocks: str
    """Path of the list of blocks."""
    called: tuple[Place, ...] = ()
    """The places in that list of the blocks that are called; empty where all are."""
    head: tuple[str, ...]
    """Paths of the modules that hold the head's parameters."""
    holders: tuple[str, ...] = ()
    """Of these the modules that hold blocks, too: of them the parameters alone that are their own."""
    kinds: tuple[SplitLayerType, ...]
    layers: tuple[Place, ...]
    """For each layer of the chain, embedding and head included, the number of its type."""
    call: BlockCall
    embedding_calls: tuple[str, ...] = ()
    """Paths of the modules that, called one after another, make the first hidden state of token ids, and operations
    between them (`steelyard.modules.called`); empty where more is done than that."""
    head_calls: tuple[str, ...] = ()
    """The same of what makes logits of what the last block returns."""
    head_sees_shape: bool = False
    """Whether what follows the blocks depends on the shape of the token ids, and not on the hidden state alone."""
    sides_by_sample: bool = False
    """Whether what blocks are given beside the hidden state is wanted once for every sample of a microbatch."""
    asks_for_values: bool = False
    """Whether the model asks for values (how many tokens an expert has), which tensors without values do not have."""
    typed_buffers: tuple[str, ...] = ()
    """Buffers of blocks, by their path in the layer, that must be of the type of what flows."""
    hidden_size: Count
    vocab_size: Count
    max_seq_len: Count
    multiple: Count = 1
    """What divides the length of every sequence, to a multiple of which the model would pad it."""
    learned_positions: bool
    rotary_size: Annotated[int, Field(ge=0, lt=2**53)]
    rotary_by_attention: bool
    fused_attention: bool
    image: tuple[Count, Count, Count] | None = None
    """Channels, height and width of what the model reads; None where it reads token ids."""
    features: SplitFeatures | None = None
    """What the first layer reads, where the decoder's embedding reads the token ids of a sample."""
    resting: tuple[str, ...] = ()
    """Paths of what no sample trains, where token ids are read beside features: frozen, or read by nothing."""
    layerdrop: tuple[str, ...] = ()
    """Stacks that leave blocks out at random as they train in transformers: ``model.encoder: 0.05``."""
    shared: tuple[tuple[tuple[Place, str], ...], ...] = ()
    """Parameters that embeddings and the head share: for each copy its layer, and its path in the model."""
    encoder: SplitEncoder | None = None
    streams: tuple[SplitStream, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_layers(
            "model.split", self.layers, [layer_type.role for layer_type in self.kinds], 2 if self.encoder else 1
        )
        layers = range(len(self.layers))
        if self.called and len(self.called) != len(self.block_layers(self.blocks)):
            expected = f"{len(self.block_layers(self.blocks))}, one for each block"
            raise wrong_split("model.split.called", f"{len(self.called)} places", expected)
        for number, copies in enumerate(self.shared):
            where = f"model.split.shared[{number}]"
            for layer, path in copies:
                check_place(where, layer, layers, "the layers of the model")
                if not any(
                    path == each or path.startswith(f"{each}." * bool(each)) for each in self.modules(layer).values()
                ):
                    raise wrong_split(where, f"{path} in layer {layer}", "a path of what lies in the layer")
        for number, stream in enumerate(self.streams):
            where = f"model.split.streams[{number}]"
            check_place(f"{where}.maker", stream.maker, layers[:-1], "the layers before the head")
            for reader in stream.readers:
                check_place(f"{where}.readers", reader, layers[stream.maker + 1 :], "the layers behind its maker")
            if not stream.readers or len(stream.most) not in (0, len(stream.shape)):
                raise wrong_split(where, "no readers, or more limits than sizes", "readers, and a limit for each size")
        return self

    @property
    def between(self) -> int:
        """The layer of the decoder's embedding; 0 where there is no encoder."""
        embeddings = (place for place in range(len(self.layers)) if self.type_of(place).role is LayerRole.EMBEDDING)
        return next(filter(None, embeddings), 0)

    def type_of(self, layer: int) -> SplitLayerType:
        """The type of a layer."""
        return self.kinds[self.layers[layer]]

    def _is_of_ends(self, copies: tuple[tuple[int, str], ...]) -> bool:
        """Whether embeddings or the head, and not blocks, share a parameter."""
        return any(self.kinds[self.layers[layer]].role is not LayerRole.BLOCK for layer, _ in copies)

    def of_encoder(self, layer: int) -> SplitEncoder | None:
        """The encoder, if the layer is one of its blocks."""
        return self.encoder if 0 < layer < self.between else None

    def list_of(self, layer: int) -> str:
        """The path of the list in which a block lies."""
        return (self.of_encoder(layer) or self).blocks

    def call_of(self, layer: int) -> BlockCall:
        """How a block is called."""
        call = (self.of_encoder(layer) or self).call
        returns_state = self.kinds[self.layers[layer]].returns_state
        return call.model_copy(update={"result": None, "num_results": None}) if returns_state else call

    def block_layers(self, path: str) -> list[int]:
        """The layers of the blocks of a list."""
        of_encoder = self.encoder is not None and path == self.encoder.blocks
        return list(range(1, self.between) if of_encoder else range(self.between + 1, len(self.layers) - 1))

    @property
    def lists(self) -> tuple[str, ...]:
        """The paths of the lists of blocks, in the order of the chain."""
        return (self.encoder.blocks, self.blocks) if self.encoder else (self.blocks,)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all that lies in layers."""
        between = self.encoder.between if self.encoder else ()
        return (*self.embedding, *between, *self.head, *self.lists)

    def num_streams(self, layer: int) -> int:
        """The hidden states that flow out of a layer: the encoder's output goes along with the decoder's."""
        return 2 if self._is_encoded and self.between <= layer < len(self.layers) - 1 else 1

    @property
    def _is_encoded(self) -> bool:
        """Whether blocks behind an encoder read its output."""
        return self.encoder is not None and self.encoder.encoded is not None

    def reads_encoded(self, layer: int) -> SplitEncoder | None:
        """The encoder, if the layer is a block that reads its output."""
        encoder = self.encoder if layer > self.between else None
        return encoder if encoder and encoder.encoded is not None else None

    def fixed_shapes(self, layer: int) -> tuple[tuple[int, ...], ...] | None:
        """The shapes of one sample of the states that flow out of a layer; None where they follow from its tokens."""
        shape = self.type_of(layer).shape
        return (shape,) if shape else None

    def places(self, layer: int, before: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """The places of what a layer reads in what flows out of the layer ``before``, and of what flows on.

        What it makes itself beside its hidden state stands behind that. None where it reads all: a decoder behind an
        encoder whose blocks hand on more than one state.
        """
        if self._is_encoded and layer >= self.between:
            return None, ()
        known = (*self.past(before), *self.made_by(layer))
        read, past = self.read_by(layer), self.past(layer)
        return (0, *(1 + known.index(number) for number in read)), tuple(1 + known.index(number) for number in past)

    def with_layers(self, kept: Sequence[int]) -> "ModelSplit":
        """The same split with some layers alone, the ends among them."""
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
        """The same split at the sizes of another config than that ``before``, all of which ``divisor`` divides.

        What no config says stays: the classes of images, and widths that are given stage by stage.
        """
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
        }
        return self.model_copy(update=sizes)

    def layout(self) -> Layout:
        """The chain of layers."""
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
        """The path in the model of each module of a layer, by the name that it has in the layer."""
        between = self.encoder.between if self.encoder else ()
        ends = {self.between: between, 0: self.embedding, len(self.layers) - 1: self.head}
        if layer in ends:
            return {local_name(path): path for path in ends[layer]}
        return {"block": f"{self.list_of(layer)}.{self.place_of(layer)}"}

    def place_of(self, layer: int) -> int:
        """The place of a block in its list."""
        number = layer - 1 - (0 if self.of_encoder(layer) else self.between)
        return self.called[number] if self.called and not self.of_encoder(layer) else number

    def local_path(self, layer: int, path: str) -> str:
        """The path in a layer of what has this path in the model."""
        for name, module in self.modules(layer).items():
            if path == module or path.startswith(f"{module}."):
                return name + path.removeprefix(module)
        raise AssertionError(f"layer {layer} does not hold {path}")


def local_name(path: str) -> str:
    """The name in its layer of the module at a path of the model."""
    return path.replace(".", "__")
