"""A user's own module, as the planner must know it: what travels in the plan file where there is no config.

It is found by running the module once without values (`steelyard.modules.own_split`, with torch). The embedding is
all that the module does before its first block, the head all that it does after the last one, the loss included. What
flows from layer to layer is whatever tensors that depend on parameters a later layer reads: a hidden state, and beside
it what conditions it, or what a skip carries on.
"""

import hashlib
import re
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from steelyard.model.family import Layout, SharedWeight, Task
from steelyard.model.split import (
    ModelSplit,
    Place,
    SplitEncoder,
    SplitFeatures,
    SplitLayers,
    SplitLayerType,
    SplitPart,
    SplitStream,
    check_layers,
    check_place,
    layer_type_of,
    wrong_split,
)

Count = Annotated[int, Field(ge=0, lt=2**53)]
Shape = tuple[Count, ...]
"""The shape of a tensor of one sample: without the dim of samples, which is the first."""

BUILDER = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")
"""How the function is named that builds a user's own module."""


class OwnInput(SplitPart):
    """A tensor of a sample, by its path in what is read."""

    path: str
    shape: Shape
    dtype: str
    num_bytes: Count


class OwnLayerType(SplitLayerType):
    """One layer type: what it is given, what it makes of it, and what goes on."""

    no_tp: str = "what stands before and after the blocks of a module of one's own is not divided"
    no_sp: str = "that norms may see a part of the sequence is not known of a module of one's own"
    no_cp: str = "that every rank may compute its own tokens alone is not known of a module of one's own"
    fingerprint: str
    """Of the structure of its modules; see `steelyard.modules.own_split`."""
    reads: tuple[tuple[Place, Place], ...] = ()
    """Of a block, for each argument that flows: its place among all arguments, and in what flows in."""
    returns: tuple[bool, ...] | None = None
    """For each entry of the tuple that a block returns whether it is a tensor; None where it returns a tensor alone."""
    makes: tuple[Shape, ...] = ()
    """The shapes of the tensors that a block returns."""
    goes_on: tuple[tuple[Literal["given", "made"], Place], ...] = ()
    """For each tensor that flows out, whether it flowed in or was made here, and its place there."""
    shapes: tuple[Shape, ...] = ()
    """The shapes of what flows out."""
    reads_samples: bool = True
    """Whether it needs the samples themselves, and not only what flows."""


class OwnSplit(SplitLayers):
    """How a module splits into embedding, blocks and head."""

    task: ClassVar[Task] = Task.OWN
    fused_attention: ClassVar[bool] = True
    rotary_by_attention: ClassVar[bool] = False
    text_alone: ClassVar[str] = ""
    encoder: ClassVar[SplitEncoder | None] = None
    features: ClassVar[SplitFeatures | None] = None
    streams: ClassVar[tuple[SplitStream, ...]] = ()
    layerdrop: ClassVar[tuple[str, ...]] = ()
    holders: ClassVar[tuple[str, ...]] = ()
    multiple: ClassVar[int] = 1
    resting: ClassVar[tuple[str, ...]] = ()
    """What models of transformers have besides: as in `ModelSplit`."""
    module: str
    """The class of the module."""
    num_params: Count
    has_loss: bool
    """Whether samples are inputs and targets for a loss function; else the module returns its loss."""
    inputs: tuple[OwnInput, ...]
    seq_len: Annotated[int, Field(ge=1, lt=2**31)]
    """Length of the hidden state, in which plans count tokens."""
    blocks: tuple[str, ...]
    """Their paths, in the order of calls."""
    kinds: tuple[OwnLayerType, ...]
    layers: tuple[Place, ...]
    """For each layer of the chain, embedding and head included, the number of its type."""
    embedding: tuple[str, ...]
    """Paths of the parameters that are used before the first block."""
    head: tuple[str, ...]
    """Paths of those that are used after the last one."""
    first_read: tuple[tuple[Place, Place], ...]
    """For each tensor that flows out of the embedding the first block that reads it, and among which argument."""
    last_made: tuple[tuple[Literal["given", "made"], Place, Place], ...]
    """For each tensor that flows into the head: first given to a block, or made by it, and at which place there."""
    shared: tuple[tuple[tuple[Place, str], ...], ...] = ()
    """Parameters that layers share: for each copy its layer, and its path in the layer."""
    shared_entries: Count = 0
    """Entries of the largest of them."""
    no_bf16: str = ""
    """Why its layers cannot compute on parameters in bf16; empty where they can."""
    side_bytes: tuple[Count, Count] = (0, 0)
    """What blocks read beside what flows, in bytes: at all, and for each sample of a microbatch."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_layers("model.split", self.layers, [layer_type.role for layer_type in self.kinds], 1)
        if len(self.layers) != self.num_blocks + 2:
            expected = f"{self.num_blocks + 2}: embedding, blocks and head"
            raise wrong_split("model.split.layers", f"{len(self.layers)} layers", expected)
        for before, number in sorted({*pairwise(self.layers[:-1])}):
            _check_flow(f"model.split.kinds[{number}]", self.kinds[number], range(len(self.kinds[before].shapes)))
        blocks = range(self.num_blocks)
        for block, _ in self.first_read:
            check_place("model.split.first_read", block, blocks, "the blocks")
        for how, block, place in self.last_made:
            check_place("model.split.last_made", block, blocks, "the blocks")
            made = range(len(self.type_of(block + 1).makes))
            if how == "made":
                check_place("model.split.last_made", place, made, "the tensors that the block makes")
        for layer in (layer for copies in self.shared for layer, _ in copies):
            check_place("model.split.shared", layer, range(len(self.layers)), "the layers of the model")
        ends = (self.first_read, self.type_of(0)), (self.last_made, self.type_of(self.num_blocks))
        for name, (read, layer_type) in zip(("first_read", "last_made"), ends, strict=True):
            if len(read) != len(layer_type.shapes):
                expected = f"{len(layer_type.shapes)}, one for each tensor that flows"
                raise wrong_split(f"model.split.{name}", f"{len(read)} entries", expected)
        return self

    @property
    def model_type(self) -> str:
        """The class of the module."""
        return self.module

    @property
    def structure(self) -> str:
        """Identity of the structure of the module, whatever it is planned with."""
        parts = [self.num_params, self.blocks, *(self.type_of(layer).fingerprint for layer in range(len(self.layers)))]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def num_blocks(self) -> int:
        """Blocks of the chain."""
        return len(self.blocks)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample as it is read."""
        return sum(each.num_bytes for each in self.inputs)

    def type_of(self, layer: int) -> OwnLayerType:
        """The type of a layer of the chain."""
        return self.kinds[self.layers[layer]]

    def modules(self, layer: int) -> Mapping[str, str]:
        """The path of a block, or of the module itself, by its name in a layer."""
        return {"block": self.blocks[layer - 1]} if 0 < layer <= self.num_blocks else {"model": ""}

    def fixed_shapes(self, layer: int) -> tuple[Shape, ...]:
        """Shapes as `ModelSplit.fixed_shapes` has them."""
        return self.type_of(layer).shapes

    def layout(self) -> Layout:
        """The chain of layers."""
        widths = [-(-sum(prod(shape) for shape in layer_type.shapes) // self.seq_len) for layer_type in self.kinds]
        widest = max(1, *widths)
        return Layout(
            layer_types=tuple(
                layer_type_of(layer_type, hidden=(self.seq_len, max(1, width)))
                for layer_type, width in zip(self.kinds, widths, strict=True)
            ),
            layers=self.layers,
            hidden_size=widest,
            vocab_size=max(1, -(-self.shared_entries // widest)),
            max_seq_len=self.seq_len,
            tied_embeddings=bool(self.shared),
            shared=tuple(SharedWeight(copies=copies) for copies in self.shared),
            sample_bytes=self.sample_bytes,
            side_bytes=self.side_bytes,
        )


def _check_flow(field: str, layer_type: OwnLayerType, given: range) -> None:
    """Whether a block reads of what flows in, and hands on what was given to it or what it made."""
    for _, place in layer_type.reads:
        check_place(f"{field}.reads", place, given, "the tensors that flow in")
    for how, place in layer_type.goes_on:
        made = range(len(layer_type.makes))
        check_place(f"{field}.goes_on", place, given if how == "given" else made, "the tensors given, or made")
    if len(layer_type.goes_on) != len(layer_type.shapes):
        expected = f"{len(layer_type.shapes)}, one for each shape of what flows out"
        raise wrong_split(f"{field}.goes_on", f"{len(layer_type.goes_on)} entries", expected)


def _class_of(value: Any) -> str:
    is_own = isinstance(value, OwnSplit) or (isinstance(value, dict) and "module" in value)
    return (OwnSplit if is_own else ModelSplit).__name__


Split = Annotated[
    Annotated[ModelSplit, Tag(ModelSplit.__name__)] | Annotated[OwnSplit, Tag(OwnSplit.__name__)],
    Discriminator(_class_of),
]
"""How a model splits: one of transformers, which its config builds, or a user's own module, which has none."""
