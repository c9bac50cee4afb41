r"""Structure of a model: its `Layout`, the chain of layers and layer types, and its `Family`, their modules.

This module does not import torch, so that the planner can use it. Only the runtime and the tracer use the values that
the types `Tensor` and `Layer` stand for.

`Routing` computes the number of places (ranks or nodes) that a token is sent to. A token is sent once to each place
that has any of its experts. With the experts in order over $r$ places, each equally likely, the $t$ experts of a token
are on

$$r\,\Big(1 - \big(1 - \tfrac{1}{r}\big)^t\Big)$$

of them. If the router first chooses $g$ of $G$ groups of experts (node-limited routing) and a place has $c = G/r$
groups, the number is

$$r \sum_j \frac{\binom{c}{j}\binom{G-c}{g-j}}{\binom{G}{g}}\, \Big(1 - \big(1 - \tfrac{j}{g}\big)^t\Big)$$

If a group lies on several places, the first formula holds with $rg/G$ for $r$. Groups are ignored if neither the
number of places divides the number of groups nor the reverse.

Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2. Not modelled: the experts of a token are distinct, which
raises the number of places by a few percent if there are few experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import comb
from typing import Any

from steelyard.errors import InvalidModelError

TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_top_k", "num_experts_per_token", "top_k_experts", "moe_topk")
"""Config keys for the number of experts of a token."""

ROUTER_LOSS = "output_router_logits"
"""Key that, if true, makes models of transformers add the auxiliary loss of their routers to the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Number of experts of a token, and of the expert groups that they are chosen from."""

    top_k: int
    num_groups: int = 1
    chosen_groups: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Routing":
        """Read the routing from a config. Raises `InvalidModelError` if it lacks the number of experts of a token."""
        top_k = next((config[key] for key in TOP_K_KEYS if isinstance(config.get(key), int)), None)
        if top_k is None:
            raise InvalidModelError(
                field="config.json",
                found="no number of experts per token",
                expected="one of " + ", ".join(TOP_K_KEYS),
                hint="add the key to config.json",
            )
        groups = config.get("n_group") or 1
        return cls(top_k=top_k, num_groups=groups, chosen_groups=config.get("topk_group") or groups)

    def places(self, count: int) -> float:
        """Mean number of places that a token is sent to, of ``count`` places."""
        groups, chosen = self.num_groups, self.chosen_groups
        if groups % count == 0:
            each = groups // count
            of_place = ((j, comb(each, j) * comb(groups - each, chosen - j)) for j in range(min(each, chosen) + 1))
            reached = sum(ways * (1 - (1 - j / chosen) ** self.top_k) for j, ways in of_place)
            return count * reached / comb(groups, chosen)
        open_places = count * chosen / groups if count % groups == 0 else count
        return open_places * (1 - (1 - 1 / open_places) ** self.top_k)


Tensor = Any
"""Torch tensor."""
Layer = Any
"""Layer of the chain: its modules are attributes, named as in `Family.modules`."""
Context = Any
"""Data that a forward pass carries in addition to the hidden state: `steelyard.modules.layers.LayerContext`."""
Run = Callable[[Layer, Any, Context], Any]
"""Function from the input of a layer to its output: token ids or images, then hidden states, then logits."""


QUERY_HEADS, KV_HEADS = "attention heads", "key-value heads"
"""Names of head counts among the sizes that a tp degree divides, or that divide it (`LayerType.tp_shares`)."""


BEGIN_WITH_THE_LAST = frozenset(("fsmt", "mbart", "plbart"))
"""Model types whose decoders read the last token of the labels first."""
NO_CP = "only causal attention in one kernel can be divided by tokens"


class Task(StrEnum):
    """Task of a model: its class in transformers, the contents of a sample, and what the loss counts."""

    SPEECH_SEQ2SEQ = "speech-seq2seq"
    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    IMAGE_TEXT = "image-text-to-text"
    IMAGE_CLASSIFICATION = "image-classification"
    OWN = "own"
    """Defined by the loss of a user's own module."""

    @property
    def auto_class(self) -> str:
        """Class of transformers that builds the model from its config."""
        return _AUTO_CLASSES[self]

    @property
    def has_decoder(self) -> bool:
        """Whether the model is an encoder and a decoder that reads the encoder's output in every block."""
        return self in (Task.SEQ2SEQ_LM, Task.SPEECH_SEQ2SEQ)

    @property
    def has_two_lists(self) -> bool:
        """Whether the model has two lists of blocks in sequence, with a layer between them that reads token ids."""
        return self.has_decoder or self is Task.IMAGE_TEXT

    @property
    def reads_text(self) -> bool:
        """Whether samples hold token ids, with a sequence length that the user may choose."""
        return self not in (Task.IMAGE_CLASSIFICATION, Task.OWN)

    @property
    def reads_features(self) -> bool:
        """Whether samples hold, besides token ids, features that the first layer reads."""
        return self in (Task.SPEECH_SEQ2SEQ, Task.IMAGE_TEXT)


_AUTO_CLASSES = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
    Task.SPEECH_SEQ2SEQ: "AutoModelForSpeechSeq2Seq",
    Task.IMAGE_TEXT: "AutoModelForImageTextToText",
    Task.OWN: "",
}
"""Class of transformers per task; `steelyard.modules.model_inputs` defines the samples."""


class LayerRole(StrEnum):
    """Role of a layer in the chain, which decides how it is built and what flows in and out."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerType:
    """Type of interchangeable layers: the same module, the same sizes, the same costs."""

    name: str
    role: LayerRole
    tp_divides: tuple[tuple[str, int], ...] = ()
    """Sizes that a tensor-parallel degree must divide, each with its name for messages."""
    tp_shares: tuple[str, ...] = ()
    """Names in ``tp_divides`` of the sizes that ranks replicate if the degree is a multiple of the size."""
    no_tp: str = ""
    """Reason why the layer type cannot be tensor-parallel; empty if it can."""
    no_sp: str = ""
    """Reason why the layer type cannot be sequence-parallel; empty if it can."""
    no_cp: str = NO_CP
    """Reason why the layer type cannot be context-parallel (compute part of a sequence); empty if it can."""
    num_experts: int = 0
    """Number of routed experts of a layer; 0 without experts."""
    hidden: tuple[int, int] | None = None
    """Sequence length and width of the output, if they differ from those of the whole model."""
    tokens: tuple[int, int] = (1, 0)
    """Length of the hidden state that flows out: positions per token of a sample, and additional positions."""
    num_streams: int = 1
    """Number of hidden states that flow out: 2 if an encoder's output goes along with the decoder's state."""
    attention: str = "full_attention"
    """Key of the mask and of the rotary embedding that a block reads, as in ``layer_types`` of a config."""
    likeness: str = ""
    """Name of the corresponding layer type with nothing frozen in it or before it; empty if nothing is frozen."""
    needs_gradient: tuple[bool, ...] = ()
    """Whether each tensor that flows in depends on trained parameters; empty if all do."""

    def has_matrix(self, shape: Sequence[float]) -> bool:
        """Return whether a weight of this shape that multiplies tokens is a hidden matrix: in a block, not a router."""
        return self.role is LayerRole.BLOCK and len(shape) == _MATRIX_DIMS and self.num_experts not in shape

    def shared_by(self, degree: int) -> tuple[str, int] | None:
        """Return name and size of what tensor-parallel ranks of this degree replicate; None if there is nothing."""
        return next((each for each in self.tp_divides if each[0] in self.tp_shares and each[1] % degree), None)

    @property
    def plain_name(self) -> str:
        """Name of the layer type without freezing."""
        return self.likeness or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """Parameter that several layers hold, as (layer, path in the layer) of each copy.

    The first copy has the parameter's name in the unmodified model. Every layer keeps a copy; copies share gradients.
    """

    copies: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Split of a model into a chain of layers."""

    layer_types: tuple[LayerType, ...]
    layers: tuple[int, ...]
    """Index of each layer's type in ``layer_types``."""
    hidden_size: int
    """Width of the hidden state between blocks; the first width if it changes along the chain."""
    vocab_size: int
    """Number of classes of the head: tokens of the vocabulary, or image classes."""
    max_seq_len: int
    """Maximum sequence length; for images, the only one: the length of the first hidden state."""
    tied_embeddings: bool = False
    """Whether the head's projection is the embedding matrix itself."""
    shared: tuple[SharedWeight, ...] = ()
    """Parameters that several layers hold, including tied embeddings."""
    rotary_size: int = 0
    """Width of a rotary embedding; 0 without one."""
    learned_positions: bool = False
    """Whether positions are a learned table, whose length no sequence may exceed."""
    image: tuple[int, int, int] | None = None
    """Channels, height and width of the image that the first layer reads; None if it reads token ids."""
    sample_bytes: int | None = None
    """Bytes of a sample of a user's own module; None for other models, whose inputs determine them."""
    side_bytes: tuple[int, int] = (0, 0)
    """Bytes of other inputs of the blocks of a user's own module: constant, and per sample of a microbatch."""

    def fields(self) -> dict[str, Any]:
        """Return all fields by name, for a chain to be built from them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


_MATRIX_DIMS = 2


SINKS = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
"""Model types whose attention has sinks, which fused kernels of PyTorch and of transformers do not train. transformers
runs them eagerly; our runtime, in a fused kernel (`steelyard.modules.attention_sinks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Modules of the layers of a model, for the runtime; the chain itself is its `Layout`."""

    model_type: str
    task: Task
    modules: Callable[[int], Mapping[str, str]] = field(compare=False)
    """Function from a layer to the paths of its modules in the model, by their names in the layer."""
    tp: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Styles of the modules that tensor parallelism divides, by layer type and path in the layer; the names of styles
    are those of `steelyard.modules.dimensions.tp.STYLES`."""
    rotary_by_attention: bool = False
    """Whether the rotary embedding differs between attention types."""
    fused_attention: bool = True
    """Whether attention runs in one fused kernel; if not, masks and scores of sequence length squared are in memory."""

    @property
    def fuses_sinks(self) -> bool:
        """Whether the fused kernel of attention is our own, because attention has sinks."""
        return self.fused_attention and self.model_type in SINKS

    def styles(self, layer_type: LayerType) -> Mapping[str, str]:
        """Return the entry of a layer type in `tp`."""
        return self.tp.get(layer_type.plain_name, {})
