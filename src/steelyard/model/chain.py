"""A model as a chain of layers: what is trained, without batch, devices or precision.

The chain of a decoder-only model is the embedding, then the blocks in order, then the head (final norm, projection to
the vocabulary, loss). Layer 0 is the embedding and the last layer is the head in every plan and table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from steelyard.model.families import Family


class LayerRole(StrEnum):
    """What a layer does in the chain, which decides how it is built and what flows in and out."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of one kind are interchangeable: the same module, the same sizes, the same costs."""

    name: str
    role: LayerRole
    tp_divides: tuple[tuple[str, int], ...]
    """Sizes that a tensor-parallel degree must divide, each with its name for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain:
    """The layers of a model in order. ``config`` is the Hugging Face config as read; ``config_hash`` identifies it."""

    name: str
    family: Family
    config: Mapping[str, Any]
    config_hash: str
    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    """For each layer the index of its kind."""
    hidden_size: int
    vocab_size: int
    max_seq_len: int
    tied_embeddings: bool
    """Whether the head's projection is the embedding matrix itself."""

    @property
    def num_layers(self) -> int:
        """Layers of the chain, embedding and head included."""
        return len(self.layers)

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of one layer of the chain."""
        return self.kinds[self.layers[layer]]

    def layer_name(self, layer: int) -> str:
        """A name for messages: ``embedding``, ``block 3`` (counted from 0) or ``head``."""
        kind = self.kind_of(layer)
        return f"block {layer - 1}" if kind.role is LayerRole.BLOCK else kind.name
