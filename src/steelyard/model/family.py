r"""How a model is taken apart: its `Layout`, the chain of layers and layer types, and its `Family`, their modules.

Nothing here imports torch, so that the planner can read it. What the types `Tensor` and `Layer` stand for is used by
the runtime and the tracer alone.

A layer type with experts also says to how many places a token goes (`Routing`), where those who send it send it once to
each place, a rank or a node, that has experts of it. With the experts in order over $r$ places, each as likely as
another, the $t$ experts of a token are on

$$r\,\Big(1 - \big(1 - \tfrac{1}{r}\big)^t\Big)$$

of them. A router that first chooses $g$ of $G$ groups of experts (node-limited routing) leaves, where a place has
$c = G/r$ groups,

$$r \sum_j \frac{\binom{c}{j}\binom{G-c}{g-j}}{\binom{G}{g}}\, \Big(1 - \big(1 - \tfrac{j}{g}\big)^t\Big)$$

and where a group lies on several places the first with their $rg/G$. Groups that are not whole on places or places on
groups count as none.

Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2. Not modelled: that experts of a token differ, which makes
the places a few percent more where experts are few.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import comb
from typing import Any, TypeGuard

from steelyard.errors import InvalidModelError
from steelyard.limits import MOST_LAYERS, MOST_SIZE

TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_top_k", "num_experts_per_token", "top_k_experts", "moe_topk")
"""Keys of configs that count the experts of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Experts of a token, and from how many of the groups of experts they come."""

    top_k: int
    num_groups: int = 1
    chosen_groups: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Routing":
        """As a config says; raises `InvalidModelError` where it does not say how many experts a token has."""
        top_k = next((config[key] for key in TOP_K_KEYS if isinstance(config.get(key), int)), None)
        if top_k is None:
            raise InvalidModelError(
                field="config.json",
                found="no number of experts of a token",
                expected="one of " + ", ".join(TOP_K_KEYS),
                hint="give it, or price an exchange that sends a token to each of its experts",
            )
        groups = config.get("n_group") or 1
        return cls(top_k=top_k, num_groups=groups, chosen_groups=config.get("topk_group") or groups)

    def places(self, count: int) -> float:
        """Of so many places, those that a token goes to on average."""
        groups, chosen = self.num_groups, self.chosen_groups
        if groups % count == 0:
            each = groups // count
            of_place = ((j, comb(each, j) * comb(groups - each, chosen - j)) for j in range(min(each, chosen) + 1))
            reached = sum(ways * (1 - (1 - j / chosen) ** self.top_k) for j, ways in of_place)
            return count * reached / comb(groups, chosen)
        open_places = count * chosen / groups if count % groups == 0 else count
        return open_places * (1 - (1 - 1 / open_places) ** self.top_k)


Tensor = Any
"""A torch tensor."""
Layer = Any
"""A layer of the chain: its modules are attributes, under the names that `Family.modules` gives them."""
Context = Any
"""What a forward pass carries beside the hidden state: `steelyard.modules.layers.LayerContext`."""
Run = Callable[[Layer, Any, Context], Any]
"""Maps what flows into a layer to what flows on: token ids or images, then hidden states, then logits."""


QUERY_HEADS, KV_HEADS = "attention heads", "key-value heads"
"""Their names among the sizes that a tensor-parallel degree divides, or that divide it (`LayerType.tp_shares`)."""


BEGIN_WITH_THE_LAST = frozenset(("fsmt", "mbart", "plbart"))
"""Types whose decoders read the last token of the labels first."""
NO_CP = "only causal attention in one kernel can be divided by tokens"


class Task(StrEnum):
    """What a model is trained for: which class of transformers it is, what a sample holds, and what the loss counts."""

    SPEECH_SEQ2SEQ = "speech-seq2seq"
    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    IMAGE_TEXT = "image-text-to-text"
    IMAGE_CLASSIFICATION = "image-classification"
    OWN = "own"
    """Whatever the loss of a user's own module says."""

    @property
    def auto_class(self) -> str:
        """The class of transformers that builds the model from its config."""
        return _AUTO_CLASSES[self]

    @property
    def has_decoder(self) -> bool:
        """Whether the model is an encoder and a decoder, which reads the output of the encoder in every block."""
        return self in (Task.SEQ2SEQ_LM, Task.SPEECH_SEQ2SEQ)

    @property
    def has_two_lists(self) -> bool:
        """Whether blocks are two lists, one behind the other, and the layer between them reads token ids."""
        return self.has_decoder or self is Task.IMAGE_TEXT

    @property
    def reads_text(self) -> bool:
        """Whether samples hold token ids of a sequence length that the user may choose."""
        return self not in (Task.IMAGE_CLASSIFICATION, Task.OWN)

    @property
    def reads_features(self) -> bool:
        """Whether samples hold something else beside them, which the first layer reads."""
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
"""Samples are what `steelyard.modules.model_inputs` says."""


class LayerRole(StrEnum):
    """What a layer does in the chain, which decides how it is built and what flows in and out."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerType:
    """Layers of one type are interchangeable: the same module, the same sizes, the same costs."""

    name: str
    role: LayerRole
    tp_divides: tuple[tuple[str, int], ...] = ()
    """Sizes that a tensor-parallel degree must divide, each with its name for messages."""
    tp_shares: tuple[str, ...] = ()
    """Names among ``tp_divides`` of what several ranks hold alike where the degree is a multiple of the size."""
    no_tp: str = ""
    """Why the layer type cannot be tensor-parallel; empty where it can."""
    no_sp: str = ""
    """Why the layer type cannot be sequence-parallel; empty where it can."""
    no_cp: str = NO_CP
    """Why the layer type cannot work on a part of the tokens of a sequence; empty where it can."""
    num_experts: int = 0
    """Routed experts of a layer; 0 where it has none."""
    hidden: tuple[int, int] | None = None
    """Sequence length and width of what flows out, where these are not those of the whole model."""
    tokens: tuple[int, int] = (1, 0)
    """How many places a hidden state that flows out has for each token of a sample, and how many beside them."""
    num_streams: int = 1
    """Hidden states that flow out: two where an encoder's output goes along with the decoder's state."""
    attention: str = "full_attention"
    """Key of the mask and of the rotary embedding that a block reads: as in ``layer_types`` of a config."""
    likeness: str = ""
    """The name of the layer type that it is but for what is frozen, of it or before it; empty where that is nothing."""
    needs_gradient: tuple[bool, ...] = ()
    """For each tensor that flows in whether it depends on what is trained; empty where all of them do."""

    def has_matrix(self, shape: Sequence[float]) -> bool:
        """Whether a weight of this shape that multiplies tokens is a hidden matrix: of a block, and no router's."""
        return self.role is LayerRole.BLOCK and len(shape) == _MATRIX_DIMS and self.num_experts not in shape

    def shared_by(self, degree: int) -> tuple[str, int] | None:
        """Return name and number of what tensor-parallel ranks, being more, hold alike; None where nothing is so."""
        return next((each for each in self.tp_divides if each[0] in self.tp_shares and each[1] % degree), None)

    @property
    def plain_name(self) -> str:
        """The name of the layer type where nothing is frozen."""
        return self.likeness or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A parameter that several layers hold: for each, its place in the chain and its path in the layer.

    The first has the parameter's name in the unmodified model. Every layer keeps a copy, and copies share gradients.
    """

    copies: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model splits into a chain of layers."""

    layer_types: tuple[LayerType, ...]
    layers: tuple[int, ...]
    """For each layer the index of its type."""
    hidden_size: int
    """Width of the hidden state between blocks; the first one where it changes along the chain."""
    vocab_size: int
    """Classes that the head tells apart: tokens of the vocabulary, or kinds of images."""
    max_seq_len: int
    """The longest sequence; for images, the length of the first hidden state, which is the only one."""
    tied_embeddings: bool = False
    """Whether the head's projection is the embedding matrix itself."""
    shared: tuple[SharedWeight, ...] = ()
    """The parameters that several layers hold, tied embeddings among them."""
    rotary_size: int = 0
    """Width of a rotary embedding; 0 where there is none."""
    learned_positions: bool = False
    """Whether there is a table of positions, which no sequence may outgrow."""
    image: tuple[int, int, int] | None = None
    """Channels, height and width of what the first layer reads; None where it reads token ids."""
    sample_bytes: int | None = None
    """Bytes of a sample of a user's own module; None where they follow from what is read."""
    side_bytes: tuple[int, int] = (0, 0)
    """Bytes that blocks of a user's own module read beside what flows: at all, and for each sample of a microbatch."""

    def fields(self) -> dict[str, Any]:
        """All of this by its name, for a chain that is made of it."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


_MATRIX_DIMS = 2
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "depths")
"""Keys that count layers."""


def _most(key: str) -> int:
    return MOST_LAYERS if key in _LAYERS else MOST_SIZE


def is_size(value: object, key: str) -> TypeGuard[int]:
    """Whether a value is a whole number of 1 or more that a size of this key may be."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _most(key)


def wrong_size(key: str, value: object) -> InvalidModelError:
    """The error for a size that is missing or wrong."""
    return InvalidModelError(
        field=key,
        found="nothing" if value is None else repr(value),
        expected=f"a whole number of 1 or more in config.json, at most {_most(key)}",
        hint="use the complete config that the model was published with",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the runtime takes a model apart: the chain itself is its `Layout`."""

    model_type: str
    task: Task
    modules: Callable[[int], Mapping[str, str]] = field(compare=False)
    """For a layer of a chain, the path in the model of each of its modules, by its name in the layer."""
    tp: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each layer type, the style of the modules that tensor parallelism divides, by their path in the
    layer; the names of styles are those of `steelyard.modules.dimensions.tp.STYLES`."""
    rotary_by_attention: bool = False
    """Whether the rotary embedding differs between kinds of attention."""
    fused_attention: bool = True
    """Whether attention runs in one kernel; else step by step, with a mask and the square of the sequence in memory."""

    def styles(self, layer_type: LayerType) -> Mapping[str, str]:
        """The entry of a layer type in `tp`."""
        return self.tp.get(layer_type.plain_name, {})
