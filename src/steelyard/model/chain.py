"""Model as a chain of layers, independent of batch, devices and precision.

The chain of a decoder-only model is the embedding, the blocks in order, and the head (final norm, projection to the
vocabulary, loss). Layer 0 is the embedding and the last layer is the head in every plan and table. An encoder and its
decoder form one chain: the encoder's layers, the decoder's embedding, which reads its own token ids, and its blocks.

Layers of one type do the same work. Frozen layers, and layers whose input needs no gradient, do less work, so
`frozen_chain` gives them separate layer types, which are traced and priced like any other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol

from pydantic import Field

from steelyard.errors import InvalidModelError
from steelyard.files import FilePart
from steelyard.model.family import ROUTER_LOSS, Family, LayerRole, LayerType, Layout, SharedWeight, Task
from steelyard.model.own import Count, Split
from steelyard.model.split import TEXT_PART, ModelSplit, SplitFeatures
from steelyard.units import format_count

__all__ = ["LayerRole", "LayerType", "ModelChain", "SharedWeight"]

_USUAL_TOKENS = 4096


class ModelChange(Protocol):
    """Change that a lever makes to a model: a frozen value, completely described by its text."""

    name: ClassVar[str]
    adds_parameters: ClassVar[bool]

    @property
    def without_chance(self) -> "ModelChange":
        """The change without randomness."""

    def warning(self, chain: "ModelChain", /) -> str:
        """Return a warning about a changed model; empty if there is none."""


class FrozenLayers(FilePart):
    """Consecutive layers of the chain with the same frozen parts."""

    layers: tuple[Count, Count]
    """First and last layer, both included."""
    paths: tuple[str, ...] = ()
    """Paths in the layer of the frozen modules or parameters; empty if the whole layer is frozen."""


class Freeze(FilePart):
    """Frozen parts of a model, as data that travels in the plan file.

    A frozen parameter keeps its value: it has no gradient and no optimizer state. Layers before the first trained layer
    have no backward pass; a frozen layer after it passes gradients on to its inputs.
    """

    patterns: tuple[str, ...] = ()
    """Patterns of the request; empty if the module itself came with frozen parameters."""
    num_params: Count | None = None
    """Number of frozen parameters; absent if they were not counted."""
    of_params: Count | None = None
    """Number of parameters of the whole model."""
    parts: tuple[FrozenLayers, ...] = Field(min_length=1)

    def paths(self, layer: int) -> tuple[str, ...] | None:
        """Return the frozen paths of a layer, as `FrozenLayers.paths`; None if nothing in it is frozen."""
        return next((each.paths for each in self.parts if each.layers[0] <= layer <= each.layers[1]), None)

    def holds(self, layer: int, path: str) -> bool:
        """Return whether the module or parameter at a path of a layer is frozen."""
        paths = self.paths(layer)
        return paths is not None and (not paths or any(path == each or path.startswith(f"{each}.") for each in paths))

    def is_whole(self, layer: int) -> bool:
        """Return whether all of a layer is frozen."""
        return self.paths(layer) == ()

    @property
    def of(self) -> str:
        """Description of what is frozen: the patterns of the request."""
        return " and ".join(self.patterns) or "parameters with requires_grad=False"

    def of_layers(self, kept: Sequence[int]) -> "Freeze | None":
        """Return the frozen parts of a model with only some of the layers; None if nothing in them is frozen."""
        found = ((place, self.paths(layer)) for place, layer in enumerate(kept))
        parts = tuple(FrozenLayers(layers=(place, place), paths=paths) for place, paths in found if paths is not None)
        return Freeze(patterns=self.patterns, parts=parts) if parts else None

    def __str__(self) -> str:
        if self.num_params is None or self.of_params is None:
            return self.of
        return f"{self.of}, {format_count(self.num_params)} of {format_count(self.of_params)} parameters"


class FlowTensor(NamedTuple):
    """Tensor that flows from layer to layer."""

    shape: tuple[int, ...]
    """Shape for one sample."""
    needs_gradient: bool
    """Whether it depends on trained parameters."""
    whole: str = ""
    """Integer dtype if it holds integers; empty for states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain(Layout):
    """Layers of a model in order.

    ``config`` is the Hugging Face config as read; it is empty for a user's own module. ``config_hash`` identifies the
    config, or the structure of the module.
    """

    name: str
    family: Family
    config: Mapping[str, Any]
    config_hash: str
    sizes: Mapping[str, int]
    """Sizes read from the config, by key."""
    split: Split
    """Split of the model, found from its structure."""
    freeze: Freeze | None = None
    """Frozen parts, set by `frozen_chain`; None if everything is trained."""
    changes: tuple[ModelChange, ...] = ()
    """Changes that levers make to the model of the config."""

    def __str__(self) -> str:
        counts = Counter(self.type_of(layer).name for layer in range(self.num_layers))
        return f"{self.name}: {', '.join(f'{count} × {name}' for name, count in counts.items())}"

    @property
    def summed(self) -> tuple[SharedWeight, ...]:
        """Shared weights that are trained, so that their gradients are summed."""
        return tuple(each for each in self.shared if not self.freeze or not self.freeze.holds(*each.copies[0]))

    @property
    def sums_tied(self) -> bool:
        """Whether the gradients of a matrix tied between embedding and head are summed."""
        return self.tied_embeddings and self.shared[0] in self.summed

    @property
    def ties_ends(self) -> bool:
        """Whether the first and the last layer alone share the vocabulary matrix."""
        ends = [0, self.num_layers - 1]
        return self.tied_embeddings and [layer for layer, _ in self.shared[0].copies] == ends

    @property
    def trains_routers(self) -> bool:
        """Whether the routers' auxiliary loss is trained alongside the main loss."""
        return self.config.get(ROUTER_LOSS) is True

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Entries of the config's part for text, which is the whole config of a model of text alone."""
        part = self.config.get(TEXT_PART)
        return part if isinstance(part, Mapping) else self.config

    @property
    def features(self) -> SplitFeatures | None:
        """Input of the first layer, if samples hold it alongside the token ids of a later layer; otherwise None."""
        return self.split.features

    @property
    def has_experts(self) -> bool:
        """Whether any layer has routed experts."""
        return any(each.num_experts for each in self.layer_types)

    @property
    def has_adapters(self) -> bool:
        """Whether levers add parameters and leave all others untrained."""
        return any(change.adds_parameters for change in self.changes)

    @property
    def differences(self) -> tuple[str, ...]:
        """Differences from training the whole unchanged model of the config, in words."""
        frozen = (f"freeze {self.freeze.of}",) if self.freeze else ()
        return (*(f"{change.name} {change}" for change in self.changes), *frozen)

    @property
    def unchanged(self) -> "ModelChain":
        """Model with the modules of the config itself, without changes by levers."""
        return replace(self, changes=())

    @property
    def num_layers(self) -> int:
        """Number of layers of the chain, embedding and head included."""
        return len(self.layers)

    @property
    def num_streams(self) -> int:
        """Maximum number of hidden states that flow between two layers of the chain."""
        return max(layer_type.num_streams for layer_type in self.layer_types)

    def type_of(self, layer: int) -> LayerType:
        """Return the layer type of a layer."""
        return self.layer_types[self.layers[layer]]

    def first_of_each_type(self, count: int) -> list[int]:
        """Return the first layers of each type in chain order, at most ``count`` per type."""
        return [layer for layer, number in enumerate(self.layers) if self.layers[:layer].count(number) < count]

    def hidden_shape(self, layer: int, seq_len: int) -> tuple[int, int]:
        """Sequence length and width of a layer's output, for samples of ``seq_len`` tokens."""
        layer_type = self.type_of(layer)
        times, beside = layer_type.tokens
        return layer_type.hidden or (times * seq_len + beside, self.hidden_size)

    def state_shapes(self, layer: int, seq_len: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the hidden states that flow out of a layer, for one sample of ``seq_len`` tokens."""
        fixed = self.split.fixed_shapes(layer)
        if fixed is not None:
            return fixed
        encoded = (self._encoded_shape(seq_len),) * (self.type_of(layer).num_streams - 1)
        return (self.hidden_shape(layer, seq_len), *encoded)

    def _encoded_shape(self, seq_len: int) -> tuple[int, ...]:
        """Shape of an encoder's output, for one sample."""
        encoder = self.split.encoder
        return encoder.shape if encoder and encoder.shape else (seq_len, self.hidden_size)

    def flow(self, layer: int, seq_len: int = 1) -> tuple[FlowTensor, ...]:
        """Return all tensors that flow out of a layer: hidden states, then the streams that later layers read."""
        return self._flow(layer, self.split.past(layer), seq_len)

    def flow_shapes(self, layer: int, seq_len: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of `flow`."""
        return tuple(each.shape for each in self.flow(layer, seq_len))

    def read(self, layer: int, seq_len: int = 1) -> tuple[FlowTensor, ...]:
        """Return the tensors that a layer after the first one reads, of all that flow into it."""
        return self._flow(layer - 1, self.split.read_by(layer), seq_len)

    def _flow(self, layer: int, streams: Iterable[int], seq_len: int) -> tuple[FlowTensor, ...]:
        """Return the states that flow out of a layer, and the given streams."""
        is_trained, fixed = self._is_trained_up_to(layer), self.split.fixed_shapes(layer)
        num_own = 1 if fixed is None else len(fixed)
        states = (
            FlowTensor(shape, is_trained if place < num_own else self._is_encoder_trained())
            for place, shape in enumerate(self.state_shapes(layer, seq_len))
        )
        beside = (self.split.streams[number] for number in streams)
        return *states, *(
            FlowTensor(each.of_tokens(seq_len), not each.whole and self._is_trained_up_to(each.maker), each.whole)
            for each in beside
        )

    def has_backward(self, layer: int) -> bool:
        """Return whether a layer has a backward pass: whether it is trained or its input needs a gradient."""
        if self.freeze is None or not self.freeze.is_whole(layer):
            return True
        return layer > 0 and any(each.needs_gradient for each in self.read(layer))

    def _is_trained_up_to(self, layer: int) -> bool:
        """Return whether anything in a layer or the layers before it is trained."""
        return self.freeze is None or not all(map(self.freeze.is_whole, range(layer + 1)))

    def _is_encoder_trained(self) -> bool:
        """Return whether an encoder's output depends on trained parameters.

        If the modules that make it are not known, any trained parameter of the decoder's embedding counts.
        """
        split, freeze = self.split, self.freeze
        assert isinstance(split, ModelSplit), "a user's own module has no encoder"
        assert split.encoder is not None, "asked for a chain with one"
        between, calls = split.between, split.encoder.between_calls
        if freeze is None or self._is_trained_up_to(between - 1):
            return True
        if calls is None:
            return not freeze.is_whole(between)
        held = [path for path in calls[1] if any(path == each for each in split.encoder.between)]
        return not all(freeze.holds(between, split.local_path(between, path)) for path in held)

    def num_made(self, layer: int, seq_len: int) -> int:
        """Number of entries that a layer makes, for one sample of ``seq_len`` tokens."""
        return self._num_states(layer, seq_len) + self._num_entries(self.split.made_by(layer), seq_len)

    def num_flowing(self, layer: int, seq_len: int) -> int:
        """Number of entries of all tensors that flow out of a layer, for one sample of ``seq_len`` tokens."""
        return self._num_states(layer, seq_len) + self._num_entries(self.split.past(layer), seq_len)

    def _num_states(self, layer: int, seq_len: int) -> int:
        encoded = prod(self._encoded_shape(seq_len)) * (self.type_of(layer).num_streams - 1)
        return prod(self.hidden_shape(layer, seq_len)) + encoded

    def most_in_states(self, seq_len: int) -> int:
        """Maximum number of entries of the hidden states between two layers, for one sample."""
        longest = max(times * seq_len + beside for times, beside in (each.tokens for each in self.layer_types))
        fixed = max((prod(each.hidden) for each in self.layer_types if each.hidden and self.features), default=0)
        encoded = prod(self._encoded_shape(seq_len)) * (self.num_streams - 1)
        return max(longest * self.hidden_size + encoded, fixed)

    def most_past(self, seq_len: int) -> int:
        """Maximum number of entries that flow between two layers in addition to hidden states, for one sample."""
        return max(self._num_entries(self.split.past(layer), seq_len) for layer in range(self.num_layers - 1))

    def num_read_behind(self, layers: Sequence[int], seq_len: int) -> Iterator[tuple[int, int]]:
        """Yield for each of these layers its place and the entries of the streams that later ones of them read.

        Each stream counts once. Streams that flow past all of these layers count too, because their gradients wait
        until all of these layers have run.
        """
        split = self.split
        if not split.streams:
            return
        read = {*split.past(layers[-1])} & {*(split.past(layers[0] - 1) if layers[0] else ())}
        for place in reversed(range(len(layers))):
            if read:
                yield place, self._num_entries(read, seq_len)
            read.update(split.read_by(layers[place]))

    def _num_entries(self, streams: Iterable[int], seq_len: int) -> int:
        return sum(self.split.streams[number].entries(seq_len) for number in streams)

    def window(self, layer_type: LayerType) -> int | None:
        """Maximum number of tokens that a token of a block type attends to, itself included; None without a window.

        If the layer types do not distinguish sliding from full attention, the window applies to all blocks.
        """
        window = self.text_config.get("sliding_window")
        if (
            not isinstance(window, int)
            or layer_type.role is not LayerRole.BLOCK
            or not self.text_config.get("use_sliding_window", 1)
        ):
            return None
        slides = {each.attention for each in self.layer_types} - {"full_attention"}
        return window if layer_type.attention in slides or not slides else None

    def attended_share(self, layer_type: LayerType, seq_len: int) -> float:
        """Fraction of the token pairs of a sample that attention of a block type computes.

        1/2 for causal attention, less within a window, 1 for bidirectional attention. A decoder's block attends
        causally to its own tokens, and to all of the encoder's output.
        """
        if not self.is_causal(layer_type):
            return 1.0
        part = min(self.window(layer_type) or seq_len, seq_len) / seq_len
        causal = part - part**2 / 2
        crossed = self._encoded_shape(seq_len)[0] / seq_len if layer_type.num_streams > 1 else 0
        return (causal + crossed) / (1 + crossed)

    def is_causal(self, layer_type: LayerType) -> bool:
        """Return whether a token of a block type attends to no later token.

        True for a decoder's block, whose tokens also attend to all of the encoder's output.
        """
        of_text = self.family.task is Task.IMAGE_TEXT and layer_type.hidden is None
        return of_text or self.family.task is Task.CAUSAL_LM or layer_type.num_streams > 1

    def attention_words(self, seq_len: int) -> str:
        """Describe the attention of blocks: ``causal``, ``bidirectional``, ``sliding over 4096 tokens``, or several.

        Empty for a user's own module, whose FLOPs are counted as traced.
        """
        if self.family.task is Task.OWN:
            return ""
        words = []
        for layer_type in self.layer_types:
            window = self.window(layer_type)
            if layer_type.role is not LayerRole.BLOCK:
                continue
            if not self.is_causal(layer_type):
                words.append("bidirectional")
            elif window is not None and window < seq_len:
                words.append(f"sliding over {window} tokens")
            else:
                words.append("causal")
        return " and ".join(dict.fromkeys(words))

    def warnings(self, seq_len: int, *, has_flash: bool = False) -> tuple[str, ...]:
        """Return warnings about the model and about sequences of this length, none of which prevents training.

        ``has_flash``: whether an engine runs its own fused attention in place of the model's.
        """
        of_changes = (change.warning(self) for change in self.changes)
        drops = ", ".join(self.split.layerdrop)
        runs_all = f"every block runs in every step: layerdrop ({drops}) is ignored" if drops else ""
        of_model = (self.left_out(), runs_all, "" if has_flash else self._unfused_attention(seq_len))
        told = tuple(filter(None, (*of_model, *of_changes)))
        if not self.family.task.reads_text or seq_len <= self.max_seq_len:
            return told
        longest = [key for key, value in self.config.items() if "position" in key and value == self.max_seq_len]
        return (
            *told,
            f"sequences of {seq_len:,} tokens are longer than the {self.max_seq_len:,} positions that {self.name} was "
            f"made for ({(longest[0] if longest else 'by default')}): training runs, but pretrained weights may not "
            "generalize to this length unless positions are rescaled (RoPE scaling)",
        )

    def left_out(self) -> str:
        """Describe the parts of the config's model that its task leaves out; empty if there are none."""
        task, config = self.family.task, self.config
        planned = f"planned and trained as {task.auto_class}"
        if task is Task.IMAGE_CLASSIFICATION and "text_config" in config:
            return f"{planned}: the image tower with a classifier, without the text tower"
        if task is Task.CAUSAL_LM and config.get("is_encoder_decoder") is True:
            return f"{planned} (decoder only): to train the encoder too, name its class in the config's architectures"
        if self.split.text_alone:
            return f"{planned} of {TEXT_PART} only, without images or sound: {self.split.text_alone}"
        if self.features is None and task.reads_text and ({"vision_config", "audio_config"} & {*config}):
            return f"{planned} on text only: modules for images or sound are not trained"
        return ""

    def _unfused_attention(self, seq_len: int) -> str:
        """Return a warning that attention is not one fused kernel; empty if it is, or if the config has no heads."""
        has_heads = any("attention_heads" in key or key in ("n_head", "n_heads") for key in self.config)
        if self.family.fused_attention or not has_heads or not self.family.task.reads_text:
            return ""
        return (
            f"attention of {self.family.model_type} has no fused kernel (attn_implementation eager): the "
            f"{seq_len:,} × {seq_len:,} scores of every head are stored, which costs time and memory"
        )

    def known_seq_len(self, given: int | None) -> int:
        """Number of tokens of a sample: the given one, or the only length that the model reads.

        Raises `InvalidModelError` if none is given and the model reads more than one length.
        """
        if given is not None:
            return given
        if not self.family.task.reads_text:
            return self.max_seq_len
        raise InvalidModelError(
            field="--seq-len",
            found=f"nothing for {self.name}",
            expected="the number of tokens per sample",
            hint=f"give for example --seq-len {min(_USUAL_TOKENS, self.max_seq_len)}",
        )

    def check_seq_len(self, seq_len: int) -> None:
        """Raise `InvalidModelError` if the model cannot read sequences of this length."""
        longest, places = self.max_seq_len, self.features.places if self.features else 0
        if not self.family.task.reads_text and seq_len != longest:
            what = "length of its sample" if self.family.task is Task.OWN else "patches of an image"
            expected, hint = f"{longest}, the {what}", f"give --seq-len {longest}, or leave it out"
        elif self.learned_positions and seq_len > longest:
            expected, hint = f"at most {longest}, the number of position embeddings", "give a shorter --seq-len"
        elif seq_len <= places:
            expected, hint = f"more than {places}, the tokens of an image", f"give --seq-len {2 * places}"
        elif seq_len % self.split.multiple:
            expected = f"a multiple of {self.split.multiple}, to which the model pads its input"
            hint = f"give --seq-len {-(-seq_len // self.split.multiple) * self.split.multiple}"
        else:
            return
        raise InvalidModelError(field="--seq-len", found=f"{seq_len} for {self.name}", expected=expected, hint=hint)

    def layer_name(self, layer: int) -> str:
        """Name of a layer in messages: ``embedding``, ``block 3`` (from 0 after each embedding) or ``head``."""
        layer_type = self.type_of(layer)
        if layer_type.role is not LayerRole.BLOCK:
            return layer_type.plain_name
        first = layer
        while self.type_of(first - 1).role is LayerRole.BLOCK:
            first -= 1
        return f"{layer_type.plain_name} {layer - first}"


_Trained = tuple[int, tuple[str, ...] | None, tuple[bool, ...]]
"""Layer type, its frozen paths, and whether each tensor that it reads needs a gradient."""


def frozen_chain(chain: ModelChain, freeze: Freeze | None) -> ModelChain:
    """Return the chain with parts frozen.

    Raises `InvalidModelError` for layers that the chain does not have, or if nothing is left to train.
    """
    if freeze is None:
        return chain
    for part in freeze.parts:
        first, last = part.layers
        if not 0 <= first <= last < chain.num_layers:
            raise InvalidModelError(
                field="model.frozen.parts",
                found=f"layers [{first}, {last}]",
                expected=f"layers within 0 to {chain.num_layers - 1} of {chain.name}",
                hint="plan again with --freeze",
            )
    if all(map(freeze.is_whole, range(chain.num_layers))):
        raise nothing_left(chain.name)
    chain = replace(chain, freeze=freeze)
    trained: list[_Trained] = []
    for layer in range(chain.num_layers):
        paths = freeze.paths(layer)
        needed = tuple(each.needs_gradient for each in chain.read(layer)) if layer else (paths != (),)
        trained.append((chain.layers[layer], paths, () if all(needed) else needed))
    distinct = sorted(set(trained), key=lambda each: (each[0], trained.index(each)))
    layer_types = tuple(_layer_types(chain, distinct))
    layers = tuple(distinct.index(each) for each in trained)
    return replace(chain, layer_types=layer_types, layers=layers)


def nothing_left(name: str) -> InvalidModelError:
    """Return the error for freezing everything that the loss depends on."""
    return InvalidModelError(
        field="--freeze",
        found=f"every parameter of {name} that affects its loss",
        expected="a part, so that some parameters are trained",
        hint="freeze less",
    )


def _layer_types(chain: ModelChain, trained: list[_Trained]) -> Iterator[LayerType]:
    names: list[str] = []
    for number, paths, needed in trained:
        layer_type = chain.layer_types[number]
        if paths is None and not needed:
            yield layer_type
            continue
        of_it = "" if paths is None else "partly frozen" if paths else "frozen"
        before = "after frozen layers" if needed and paths != () else ""
        beside = "" if needed or paths != () else "after trained layers"
        names.append(f"{layer_type.name}, {' '.join(filter(None, (of_it, before, beside)))}")
        count = names.count(names[-1])
        name = f"{names[-1]} {count}" if count > 1 else names[-1]
        yield replace(layer_type, name=name, likeness=layer_type.name, needs_gradient=needed)
