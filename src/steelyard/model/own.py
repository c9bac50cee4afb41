"""Split of a user's own module: what the planner needs, and what the plan file carries in place of a config.

`steelyard.modules.own_split` finds the split by running the module once without values, with torch. The embedding is
everything that the module does before its first block, and the head everything after the last block, including the
loss. The tensors that flow from layer to layer are those that depend on parameters and that a later layer reads: a
hidden state, and also conditioning or skip connections.
"""

import hashlib
import re
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from steelyard.files import FilePart
from steelyard.model.family import Layout, SharedWeight, Task
from steelyard.model.split import (
    ModelSplit,
    Place,
    SplitEncoder,
    SplitFeatures,
    SplitLayers,
    SplitLayerType,
    SplitStream,
    check_layers,
    check_place,
    layer_type_of,
    wrong_split,
)

Count = Annotated[int, Field(ge=0, lt=2**53)]
Shape = tuple[Count, ...]
"""Shape of a tensor for one sample, without the leading dim of samples."""

BUILDER = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")
"""Reference to the function that builds a user's own module: ``FILE.py:FUNCTION``."""


class OwnInput(FilePart):
    """Tensor of a sample, with its path in the sample."""

    path: str
    shape: Shape
    dtype: str
    num_bytes: Count


class OwnLayerType(SplitLayerType):
    """Layer type: its inputs, its results, and the tensors that flow on."""

    no_tp: str = "modules before and after the blocks of your own module are not divided"
    no_sp: str = "it is unknown whether the norms of your own module may see a part of the sequence"
    no_cp: str = "it is unknown whether ranks of your own module may compute their tokens independently"
    fingerprint: str
    """Fingerprint of the structure of its modules; see `steelyard.modules.own_split`."""
    reads: tuple[tuple[Place, Place], ...] = ()
    """Place of each argument that flows, among all arguments of the block and among the tensors that flow in."""
    returns: tuple[bool, ...] | None = None
    """Whether each entry of the tuple that a block returns is a tensor; None if it returns a single tensor."""
    makes: tuple[Shape, ...] = ()
    """Shapes of the tensors that a block returns."""
    goes_on: tuple[tuple[Literal["given", "made"], Place], ...] = ()
    """Origin of each tensor that flows out: whether it flowed in or was made here, and its place there."""
    shapes: tuple[Shape, ...] = ()
    """Shapes of the tensors that flow out."""
    reads_samples: bool = True
    """Whether it needs the samples themselves in addition to the tensors that flow in."""


class OwnSplit(SplitLayers):
    """Split of a module into embedding, blocks and head."""

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
    """Fields of `ModelSplit` that only models of transformers have, as constants."""
    module: str
    """Class of the module."""
    num_params: Count
    has_loss: bool
    """Whether samples are inputs and targets of a loss function; if not, the module returns its loss."""
    inputs: tuple[OwnInput, ...]
    seq_len: Annotated[int, Field(ge=1, lt=2**31)]
    """Length of the hidden state, in which plans count tokens."""
    blocks: tuple[str, ...]
    """Paths of the blocks, in the order of calls."""
    kinds: tuple[OwnLayerType, ...]
    layers: tuple[Place, ...]
    """Index of each layer's type in ``kinds``, embedding and head included."""
    embedding: tuple[str, ...]
    """Paths of the parameters that are used before the first block."""
    head: tuple[str, ...]
    """Paths of the parameters that are used after the last block."""
    first_read: tuple[tuple[Place, Place], ...]
    """First reader of each tensor that flows out of the embedding: the block, and the place among its arguments."""
    last_made: tuple[tuple[Literal["given", "made"], Place, Place], ...]
    """Origin of each tensor that flows into the head: given to a block or made by it, the block, its place there."""
    shared: tuple[tuple[tuple[Place, str], ...], ...] = ()
    """Parameters that layers share, as (layer, path in the layer) of each copy."""
    work: str = Field("", exclude_if=lambda digest: not digest)
    """Digest of the operations of the forward pass and the loss; empty in older files."""
    shared_entries: Count = 0
    """Number of entries of the largest shared parameter."""
    no_bf16: str = ""
    """Reason why its layers cannot compute with bf16 parameters; empty if they can."""
    side_bytes: tuple[Count, Count] = (0, 0)
    """Bytes of the inputs of blocks that do not flow from layer to layer: constant, and per sample of a microbatch."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_layers("model.split", self.layers, [layer_type.role for layer_type in self.kinds], 1)
        if len(self.layers) != self.num_blocks + 2:
            expected = f"{self.num_blocks + 2} layers: embedding, blocks and head"
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
        """Class of the module."""
        return self.module

    @property
    def structure(self) -> str:
        """Hash of the structure of the module, independent of what it is planned with."""
        parts = [self.num_params, self.blocks, *(self.type_of(layer).fingerprint for layer in range(len(self.layers)))]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the chain."""
        return len(self.blocks)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one input sample."""
        return sum(each.num_bytes for each in self.inputs)

    def type_of(self, layer: int) -> OwnLayerType:
        """Return the type of a layer of the chain."""
        return self.kinds[self.layers[layer]]

    def modules(self, layer: int) -> Mapping[str, str]:
        """Return the path of the layer's block, or of the module itself for the ends, by its name in the layer."""
        return {"block": self.blocks[layer - 1]} if 0 < layer <= self.num_blocks else {"model": ""}

    def fixed_shapes(self, layer: int) -> tuple[Shape, ...]:
        """Shapes for one sample of the tensors that flow out of a layer; see `ModelSplit.fixed_shapes`."""
        return self.type_of(layer).shapes

    def layout(self) -> Layout:
        """Return the chain of layers."""
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
    """Check that a block reads tensors that flow in, and hands on tensors that it was given or made."""
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
"""Split of a model: of transformers, built from a config, or a user's own module, which has no config."""
