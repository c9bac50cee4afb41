"""Finds how a model of transformers splits into embedding, blocks and head, from its modules and one forward pass.

The model is built on the meta device from its config and run once, with hooks, on tensors without values. The blocks
are the list of modules, each called once and in order, that holds the most parameters. Before the first of them the
embedding's modules are called, after the last the head's; none may be called in between. Each block must be given the
result of the one before, in one place; whatever else it is given must not depend on parameters and be the same for all
blocks of a kind. Blocks are of one kind if they have the same structure and are given the same.

A model of an encoder and a decoder has two such lists, the encoder's blocks called first; each of the decoder's blocks
must be given the same one tensor that depends on parameters, the encoder's output.

What does not split so is an error that names the place. So is control flow that depends on values, which tensors
without values cannot follow. What is found here is believed only when it is proved (`steelyard.modules.split_proof`).
"""

from collections import UserDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from steelyard.errors import InvalidModelError
from steelyard.model.family import BIDIRECTIONAL, LayerRole, Task
from steelyard.model.split import (
    BlockCall,
    ModelSplit,
    SplitEncoder,
    SplitFeatures,
    SplitKind,
    SplitStream,
    length_of,
    width_of,
)
from steelyard.modules.build import auto_class_of, build_from_config, table_of_tokens
from steelyard.modules.called import CalledModules
from steelyard.modules.experts import routed_experts
from steelyard.modules.failed_at import failed_at, frames_of
from steelyard.modules.features import features_of
from steelyard.modules.holes import (
    IMAGES,
    Read,
    beside_features,
    blank,
    first_tokens,
    forward_options,
    given_samples,
    holds_parameters,
    ids_beside,
    one_sequence_each,
)
from steelyard.modules.known_values import plain_token, values_of, without_values
from steelyard.modules.prepared import prepare
from steelyard.modules.structure import signature

_SAMPLES, _TOKENS, _LONGER, _LONGEST = 2, 16, 24, 8192
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"),
    "max_target_positions",
)
_SPLIT_TASKS = tuple(task for task in Task if task is not Task.OWN)
_IMAGE = (3, 224, 224)
"""What a model of images reads whose config does not say it, as those of convolutions alone."""
NO_TP = "how its modules divide is not known"


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a block: what it was given and what it returned."""

    places: tuple[Any, ...]
    names: Mapping[str, Any]
    outputs: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one forward pass showed: the modules called, in order, by path, and the calls of the blocks."""

    called: Sequence[str]
    chains: Mapping[str, Sequence[_Call]]
    """The calls of the blocks of each list, by its path: of an encoder first."""
    places: Mapping[str, Sequence[int]]
    """The places of these blocks in each list."""
    samples: Tensor
    """What the first layer reads."""
    tokens: int
    """The tokens of each sample."""
    decoder_ids: Tensor
    """The samples, where there is no encoder."""
    logits: Tensor
    beside: Tensor | None
    """What the head reads beside the result of the last block: of a pair the image."""
    modules: CalledModules
    keywords: Mapping[str, str | None]
    """Of every module called with a tensor, the name by which it is given its first; None where by place."""
    named: Mapping[str, Mapping[str, Any]]
    """What every module called is given by name."""
    asks_for_values: bool

    def blocks(self, model: nn.Module, path: str) -> dict[str, nn.Module]:
        """The blocks of a list that are called, by their names in it."""
        named = list(model.get_submodule(path).named_children())
        return dict(named[place] for place in self.places[path][: len(self.chains[path])])

    def entering(self, encoded: object) -> dict[str, str | None]:
        """The keywords; behind a plus sign each that gives a module the encoder's output beside its first tensor."""
        found = dict(self.keywords)
        for path, names in self.named.items():
            for name in (name for name, each in names.items() if each is encoded and name != found[path]):
                found[path] = f"{found[path] or ''}+{name}"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A split, the config and the model on the meta device that it was found in, and how its modules are called."""

    split: ModelSplit
    config: PreTrainedConfig
    model: PreTrainedModel
    keywords: Mapping[str, str | None]
    attention_drops: bool
    """Whether attention drops entries inside its kernel."""


def find_split(config: PreTrainedConfig, *, keeps_results: bool = False) -> Found:
    """How the model of a config splits; raises `InvalidModelError` naming what stands in the way.

    With ``keeps_results`` all that blocks return and hand on flows along, not the hidden state alone.
    """
    task = task_of(config)
    fused_attention = _has_fused_attention(config, task)
    model = build_from_config(config, task, fused_attention=fused_attention)
    prepare(model, config.model_type)
    image = _image(config) if task is Task.IMAGE_CLASSIFICATION else None
    features = features_of(model, task) if task.reads_features else None
    read = features or image
    seen = _record(model, config, task, read)
    (_, *sizes) = _first_state(seen).shape
    if not read and _TOKENS not in sizes and (padded := sizes[0]) > _TOKENS:
        of_padded = _record(model, config, task, read, padded)
        seen = of_padded if _first_state(of_padded).shape[1] == padded else seen
    options = {"fused_attention": fused_attention, "keeps_results": keeps_results}
    split = _split_of(model, seen, config, task, read, **options)
    keywords = seen.keywords
    if split.encoder and split.encoder.encoded is not None:
        first = seen.chains[split.blocks][0]
        keywords = seen.entering(_argument(first, split.encoder.encoded))
    drops = seen.modules.attention_drops
    return Found(split=split, config=config, model=model, keywords=keywords, attention_drops=drops)


def _first_state(seen: Recording) -> Tensor:
    """What the first block is given first."""
    (first, *_) = next(iter(seen.chains.values()))
    return next(each for each in (*first.places, *first.names.values()) if isinstance(each, Tensor))


def _split_of(
    model: PreTrainedModel,
    seen: Recording,
    config: PreTrainedConfig,
    task: Task,
    read: Read,
    *,
    fused_attention: bool,
    keeps_results: bool,
) -> ModelSplit:
    first, blocks = next(iter(seen.chains)), list(seen.chains)[-1]
    fixed = {first: read} if read else {}
    calls = {path: _block_call(each, config, seen.tokens, fixed.get(path)) for path, each in seen.chains.items()}
    first_call, call = calls[first], calls[blocks]
    image, features = (None, read) if isinstance(read, SplitFeatures) else (read, None)
    entering = _argument(seen.chains[first][0], first_call.argument)
    (embedding, *between, head), holders = _ends(model, seen, entering, config, task)
    if task is Task.IMAGE_TEXT:
        embedding, between[0] = _by_use(model, seen, entering, embedding, between[0])
    encoder = _encoder_of(seen, calls, config, task, between[0], features) if between else None
    streams = [] if read else _all_streams(model, seen, first_call, config, task, keeps_results=keeps_results)
    streams = [*_past_a_tower(*seen.chains.values(), first_call)] if task is Task.IMAGE_TEXT else streams
    if seen.beside is not None:
        last, maker = sum(map(len, seen.chains.values())) + 2, len(seen.chains[first]) + 1
        streams = [SplitStream(argument=IMAGES, maker=maker, readers=(last,), shape=tuple(seen.beside.shape[1:]))]
    lengths = {} if image else _lengths(model, seen, calls, config, task, features)
    hidden = [first_call.hidden((seen.chains[first][0].places, seen.chains[first][0].names))]
    hidden += [each.result_of(one.outputs) for path, each in calls.items() for one in seen.chains[path]]
    fixed = len(hidden) if image else 1 + len(seen.chains[first]) if features else 0
    shapes = [tuple(each.shape[1:]) if place < fixed else () for place, each in enumerate(hidden)]
    kinds, layers, rotary = _kinds(model, seen, config, calls, encoder, streams, lengths, shapes)
    starts = [place for place, kind in enumerate(layers) if kinds[kind].role is LayerRole.EMBEDDING]
    ends = [tuple(path for path in each if path not in holders) for each in (embedding, *between, head)]
    by_layer = dict(zip([*starts, len(layers) - 1], ends, strict=True))
    by_layer |= {
        (starts[-1] if path == blocks else 0) + 1 + number: (f"{path}.{place}",)
        for path in seen.chains
        for number, place in enumerate(seen.blocks(model, path))
    }
    text = config.get_text_config() if task is Task.CONTRASTIVE else config
    positions = length_of(shapes[0]) if image else _most_positions(text)
    return ModelSplit(
        model_type=config.model_type,
        task=task,
        embedding=embedding,
        blocks=blocks,
        called=() if _is_whole(places := seen.places[blocks]) else tuple(places),
        head=head,
        holders=holders,
        kinds=tuple(kinds),
        layers=tuple(layers),
        call=call,
        embedding_calls=(seen.modules.between(seen.samples, hidden[0]) or ()) if not streams else (),
        head_calls=(seen.modules.between(hidden[-1], seen.logits) or ()) if seen.beside is None else (),
        encoder=encoder,
        hidden_size=width_of(shapes[0]) if image else hidden[fixed].shape[-1],
        vocab_size=seen.logits.shape[-1] if seen.beside is None else text.vocab_size,
        max_seq_len=positions,
        multiple=1 if read or seen.tokens == _TOKENS else seen.tokens,
        image=image,
        features=features,
        resting=_resting(model, seen.logits) if features else (),
        learned_positions=not image and _has_table(model, ends[1 if features else 0], positions),
        rotary_size=max((pair[0].shape[-1] for pair in rotary if pair), default=0),
        rotary_by_attention=len({id(pair[0]) for pair in rotary if pair}) > 1,
        fused_attention=fused_attention,
        asks_for_values=seen.asks_for_values,
        typed_buffers=_typed_buffers(model, config, task, list(seen.chains)),
        shared=tuple(_shared(model, by_layer, seen.called, config)),
        streams=tuple(streams),
    )


def _encoder_of(
    seen: Recording,
    calls: Mapping[str, BlockCall],
    config: PreTrainedConfig,
    task: Task,
    between: tuple[str, ...],
    features: SplitFeatures | None,
) -> SplitEncoder:
    """The first of two lists of blocks, and what those of the second read of it."""
    first, blocks = calls
    encoder = SplitEncoder(blocks=first, call=calls[first], between=between, encoded=None)
    if not task.has_decoder:
        return encoder
    encoded = _encoded(seen.chains[blocks], calls[blocks], config)
    output = _argument(seen.chains[blocks][0], encoded)
    order, _ = ((), ()) if features else _order(output, config, seen.tokens)
    shape = tuple(output.shape[1:]) if features else ()
    calls_between = _between_calls(seen, calls, encoded)
    found = {"encoded": encoded, "order": order, "shape": shape, "between_calls": calls_between}
    return encoder.model_copy(update=found)


def _between_calls(
    seen: Recording, calls: Mapping[str, BlockCall], encoded: int | str
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """What alone is done between the blocks of an encoder and those of its decoder, if that is all."""
    (of_encoder, call), (of_decoder, reading) = calls.items()
    first = seen.chains[of_decoder][0]
    entering = reading.hidden((first.places, first.names))
    of_ids = seen.modules.between(seen.decoder_ids, entering)
    of_encoded = seen.modules.between(call.result_of(seen.chains[of_encoder][-1].outputs), _argument(first, encoded))
    return None if of_ids is None or of_encoded is None else (of_ids, of_encoded)


def _most_positions(config: PreTrainedConfig) -> int:
    """The longest sequence that a config says, or the part of it that is of text."""
    found = (getattr(part, key, None) for part in (config, config.get_text_config(decoder=True)) for key in _POSITIONS)
    return next((int(each) for each in found if isinstance(each, int | float) and each > 0), 2**31)


def _all_streams(
    model: PreTrainedModel,
    seen: Recording,
    call: BlockCall,
    config: PreTrainedConfig,
    task: Task,
    *,
    keeps_results: bool,
) -> list[SplitStream]:
    """What flows past the blocks of the first list, which are called so."""
    path, blocks = next(iter(seen.chains.items()))
    streams = list(_streams(blocks, call, keeps_results=keeps_results))
    if not streams:
        return []
    more = seen.tokens + (_LONGER - _TOKENS if seen.tokens == _TOKENS else seen.tokens)
    longer = _record(model, config, task, None, more).chains[path]
    found = [_of_tokens(each, blocks, longer, (seen.tokens, more), config) for each in streams]
    if not any(each.whole for each in streams):
        return found
    longest = _record(model, config, task, None, _LONGEST).chains[path]
    return [_with_most(each, longest) for each in found]


def _with_most(stream: SplitStream, longest: Sequence[_Call]) -> SplitStream:
    """The stream with what those of its dims never exceed that are shorter than many tokens."""
    sizes = dict(_given(longest[stream.readers[0] - 1]))[stream.argument, stream.entry].shape[1:]
    most = tuple(size if size < _LONGEST and known <= 0 else 0 for size, known in zip(sizes, stream.shape, strict=True))
    return stream.model_copy(update={"most": most if any(most) else ()})


def _kinds(
    model: PreTrainedModel,
    seen: Recording,
    config: PreTrainedConfig,
    calls: Mapping[str, BlockCall],
    encoder: SplitEncoder | None,
    streams: Sequence[SplitStream],
    lengths: Mapping[str, tuple[int, int]],
    shapes: Sequence[tuple[int, ...]],
) -> tuple[list[SplitKind], list[int], list[Any]]:
    """The kinds of layers, for each layer the index of its kind, and the rotary embedding of each kind of blocks."""
    first, blocks = next(iter(calls)), list(calls)[-1]
    tokens = lengths.get(first, (1, 0))
    kinds = [SplitKind(name="embedding", role=LayerRole.EMBEDDING, no_tp=NO_TP, tokens=tokens, shape=shapes[0])]
    layers, rotary, before = [0], list[Any](), 1
    for path, call in calls.items():
        tokens = lengths.get(path, (1, 0))
        if path == blocks and encoder:
            layers.append(len(kinds))
            name = "text embedding" if encoder.encoded is None else "decoder embedding"
            kinds.append(SplitKind(name=name, role=LayerRole.EMBEDDING, no_tp=NO_TP, tokens=tokens))
        parts = ("image ", "text ") if encoder and encoder.encoded is None else ("encoder ", "decoder ")
        words = parts[path == blocks] if encoder else ""
        given = {call.argument, call.number} | ({encoder.encoded} if encoder and path == blocks else set())
        modules, places = list(seen.blocks(model, path).values()), seen.places[path]
        passed = [each for one in seen.chains[path] for each in pytree.tree_leaves(one.outputs)]
        own_streams = streams if seen.beside is None else []
        own_layers = range(len(layers), len(layers) + len(modules))
        beside = [[one for one in own_streams if layer in (*one.readers, one.maker)] for layer in own_layers]
        keys = [
            (
                *own,
                *_key(one, given, (beside[number], own_layers[number]), passed, place, config),
                _attention(config, place),
            )
            for number, (place, own, one) in enumerate(
                zip(places, _signatures(modules, places), seen.chains[path], strict=False)
            )
        ]
        first_of = [keys.index(key) for key in dict.fromkeys(keys)]
        attention = [_attention(config, places[number]) for number in first_of]
        if seen.beside is not None and path == blocks and not seen.chains[path][0].names.get("is_causal"):
            attention = [BIDIRECTIONAL for _ in attention]
        names = _names([modules[place] for place in first_of], attention)
        layers += [len(kinds) + first_of.index(keys.index(key)) for key in keys]
        kinds += [
            SplitKind(
                name=words + name,
                role=LayerRole.BLOCK,
                no_tp=NO_TP,
                num_experts=max((each.num_experts for each in routed_experts(modules[place])), default=0),
                attention=attends,
                tokens=tokens,
                shape=shapes[before + place],
            )
            for name, place, attends in zip(names, first_of, attention, strict=True)
        ]
        before += len(keys)
        rotary += [_rotary(seen.chains[path][place]) for place in first_of]
    layers.append(len(kinds))
    kinds.append(SplitKind(name="head", role=LayerRole.HEAD, no_tp=NO_TP, shape=shapes[-1]))
    return kinds, layers, rotary


def _lengths(
    model: PreTrainedModel,
    seen: Recording,
    calls: Mapping[str, BlockCall],
    config: PreTrainedConfig,
    task: Task,
    features: SplitFeatures | None,
) -> dict[str, tuple[int, int]]:
    """For each list of blocks the places of a state for each token, and beside them, where they are not the tokens.

    The blocks that read features have states of one shape.
    """
    calls = dict(list(calls.items())[1 if features else 0 :])
    few = {path: _length(seen.chains[path], call) for path, call in calls.items()}
    if all(length == seen.tokens for length in few.values()):
        return {}
    longer = _record(model, config, task, features, seen.tokens - first_tokens(features)[1] + _LONGER)
    found = {}
    for path, call in calls.items():
        times = (_length(longer.chains[path], call) - few[path]) // _LONGER
        found[path] = times, few[path] - times * seen.tokens
    return found


def _length(chain: Sequence[_Call], call: BlockCall) -> int:
    """The places of the state that enters a list of blocks."""
    return call.hidden((chain[0].places, chain[0].names)).shape[1]


def _typed_buffers(
    model: PreTrainedModel, config: PreTrainedConfig, task: Task, lists: Sequence[str]
) -> tuple[str, ...]:
    """The buffers of blocks that a model in bf16 makes in bf16, if it does not run with those of one in fp32."""
    inside = {path: each for path, each in model.named_buffers() if _in(path, lists) and each.is_floating_point()}
    if not inside or task is Task.IMAGE_CLASSIFICATION:
        return ()
    typed = build_from_config(config, task, fused_attention=_has_fused_attention(config, task), dtype=torch.bfloat16)
    found = [path for path, each in typed.named_buffers() if path in inside and each.dtype == torch.bfloat16]
    for path in found:
        owner, _, name = path.rpartition(".")
        typed.get_submodule(owner)._buffers[name] = inside[path]
    try:
        _record(typed, config, task, None)
    except InvalidModelError:
        below = {
            path.removeprefix(f"{blocks}.").partition(".")[2]
            for path in found
            for blocks in lists
            if _below(path, blocks)
        }
        return tuple(sorted(f"block.{path}" for path in below))
    return ()


def task_of(config: PreTrainedConfig) -> Task:
    """What the model is trained for: as its config's architecture says, else the first task that its type has.

    One that says it is no decoder sees what follows a token, so that it fills in masked ones.
    """
    named = (getattr(config, "architectures", None) or [""])[0]
    of_transformers = sorted(
        (task for task in Task if task is not Task.OWN), key=lambda task: task is not Task.SEQ2SEQ_LM
    )  # some classes with an encoder are listed for masked models, too
    of_transformers = [task for task in of_transformers if not task.has_decoder or config.is_encoder_decoder]
    tasks = sorted((task for task in of_transformers if _classes(config, task)), key=_SPLIT_TASKS.__contains__)
    for task in tasks:
        if named in {each.__name__ for each in _classes(config, task)}:
            if task in _SPLIT_TASKS:
                return task
            raise _refused(config, f"{named}, of a task whose models do not split by their structure")
    tasks = [task for task in Task if task in tasks and task in _SPLIT_TASKS]
    if not tasks:
        raise _refused(
            config,
            "no class of transformers for text (causal, masked, encoder and decoder), speech to text, images with text "
            "or classes of images",
        )
    bare = {each.__name__ for each in _listed(config, transformers.AutoModel)}  # which say nothing of the task
    if named and named not in bare:
        classes = [each.__name__ for task in tasks for each in _classes(config, task)]
        raise InvalidModelError(
            field="architectures",
            found=f"{named}, of another task",
            expected=f"for a {config.model_type}: {', '.join(dict.fromkeys(classes))}",
            hint="name the class that is trained, or leave architectures out for the first",
        )
    is_encoder = getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
    return Task.MASKED_LM if is_encoder and Task.MASKED_LM in tasks else tasks[0]


def _has_fused_attention(config: PreTrainedConfig, task: Task) -> bool:
    """Whether attention may run in one kernel, through the registry of transformers: some read it and do not say so."""
    model = _classes(config, task)[0]
    return bool(model._supports_sdpa and (model._supports_attention_backend or model._can_set_attn_implementation()))


def _classes(config: PreTrainedConfig, task: Task) -> tuple[type[PreTrainedModel], ...]:
    """The classes of transformers for a config and a task."""
    return _listed(config, auto_class_of(config, task))


def _listed(config: PreTrainedConfig, auto_class: Any) -> tuple[type[PreTrainedModel], ...]:
    classes = auto_class._model_mapping.get(type(config), ()) if auto_class else ()
    return classes if isinstance(classes, tuple) else (classes,)


def _record(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    task: Task,
    read: Read,
    more: int = _TOKENS,
) -> Recording:
    """One forward pass on the meta device, with hooks on all modules, of so many tokens behind those of an image."""
    tokens = more + first_tokens(read)[1]
    paths = {module: path for path, module in model.named_modules()}
    lists = _lists(model)
    paths |= _in_blocks(model, lists, paths)
    called: list[str] = []
    calls: dict[str, list[tuple[int, _Call]]] = {path: [] for path in lists}
    place_of = {block: (path, place) for path, blocks in lists.items() for place, block in enumerate(blocks)}

    keywords: dict[str, str | None] = {}
    named: dict[str, Mapping[str, Any]] = {}

    def before(module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any]) -> None:
        called.append(paths[module])
        by_place = any(isinstance(each, Tensor) for each in places)
        first = None if by_place else next((name for name, each in names.items() if isinstance(each, Tensor)), None)
        keywords[paths[module]], named[paths[module]] = first, names

    def after(module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any], outputs: Any) -> None:
        path, place = place_of[module]
        calls[path].append((place, _Call(places, names, outputs)))

    def watched(_block: nn.Module, places: tuple[Any, ...], names: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return places, {n: _Watched(each) if isinstance(each, UserDict) else each for n, each in names.items()}

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in paths]
    handles += [block.register_forward_pre_hook(watched, with_kwargs=True) for block in place_of]
    handles += [block.register_forward_hook(after, with_kwargs=True) for block in place_of]
    try:
        with torch.device("meta"):
            given = given_samples(read, blank(read, _SAMPLES, tokens, torch.device("meta")))
            (samples,) = given.values()
            if beside := ids_beside(task):
                given[beside] = blank(None, _SAMPLES, tokens, torch.device("meta"))
        with (
            one_sequence_each(),
            torch.device("meta"),
            without_values(given.values(), plain_token(config), first_tokens(read)) as known,
            CalledModules(model) as modules,
            _called_with_hooks(place_of),
        ):
            of_features = beside_features(model, read, given.get(beside))
            outputs = model(**given, **of_features, **forward_options(model))
    except Exception as error:
        raise _failed(config, error) from error
    finally:
        for handle in handles:
            handle.remove()
    if any(isinstance(model.get_submodule(path), nn.modules.batchnorm._BatchNorm) for path in called):
        raise _refused(config, "batch norms, which would see one rank's microbatch in place of the whole batch")
    places = {path: [place for place, _ in each] for path, each in calls.items()}
    chosen = _chosen(model, _in_order(lists, calls), called, config, task)
    return Recording(
        called=called,
        chains=chosen,
        places={path: places[path] for path in chosen},
        samples=samples,
        tokens=tokens,
        decoder_ids=given[beside] if beside else samples,
        logits=outputs.logits_per_text if task is Task.CONTRASTIVE else outputs.logits,
        beside=outputs.image_embeds if task is Task.CONTRASTIVE else None,
        modules=modules,
        keywords=keywords,
        named=named,
        asks_for_values=known is not None and known.asked,
    )


def _in_order(
    lists: Mapping[str, Sequence[nn.Module]], calls: Mapping[str, Sequence[tuple[int, _Call]]]
) -> dict[str, Sequence[_Call]]:
    """The calls of the lists whose blocks are called one after another; where there are none, of those that skip some.

    Blocks are skipped that are for what no sample holds, as those of a text that read an image.
    """
    places = {path: [place for place, _ in each] for path, each in calls.items()}
    whole = [path for path, blocks in lists.items() if places[path] == list(range(len(blocks)))]
    part = [path for path, each in places.items() if len(each) > 1 and each == sorted(set(each))]
    return {path: [call for _, call in calls[path]] for path in whole or part}


def _is_whole(places: Sequence[int]) -> bool:
    return list(places) == list(range(len(places)))


def _chosen(
    model: nn.Module,
    chains: Mapping[str, Sequence[_Call]],
    called: Sequence[str],
    config: PreTrainedConfig,
    task: Task,
) -> dict[str, Sequence[_Call]]:
    """The largest list of those whose modules are called one after another, or for some tasks two, as they are run."""
    count = 2 if task.has_two_lists else 1
    if task is Task.IMAGE_TEXT:  # what reads several states of a tower may be a list, too
        chains = {path: each for path, each in chains.items() if _is_chain(each)}
    if len(chains) < count:
        lists_wanted = "two lists" if count > 1 else "list"
        raise _refused(config, f"no {lists_wanted} of modules that are called once each, one after another")
    chosen = sorted(list(chains)[:count], key=lambda path: next(n for n, e in enumerate(called) if _below(e, path)))
    found = {path: chains[path] for path in chosen}
    if task is Task.IMAGE_TEXT:
        (_, (entered, *_)) = found.values()
        found[chosen[0]] = _read_of(model, chosen[0], found[chosen[0]], entered)
    return found


def _is_chain(calls: Sequence[_Call]) -> bool:
    """Whether every module of a list is given something that the one before returned."""
    returned = [{id(leaf) for leaf in pytree.tree_leaves(call.outputs)} for call in calls]
    return all(
        {id(each) for each in _tensors_given(call)} & before for before, call in zip(returned, calls[1:], strict=False)
    )


def _past_a_tower(tower: Sequence[_Call], text: Sequence[_Call], how: BlockCall) -> Iterator[SplitStream]:
    """The states of a tower that are read beside the last one, and what the first blocks of text add that is made of
    them: both by the layer between, which takes the tower's blocks to be called so.
    """
    between = 1 + len(tower)
    for place in _states_read(tower, how, _tensors_given(text[0])):
        state = how.result_of(tower[place].outputs)
        yield SplitStream(argument=how.argument, maker=1 + place, readers=(between,), shape=tuple(state.shape[1:]))
    for layer, call in enumerate(text, between + 1):
        for (argument, entry), value in _given(call):
            if entry is not None and value.requires_grad:
                shape = tuple(value.shape[1:])
                yield SplitStream(argument=argument, entry=entry, maker=between, readers=(layer,), shape=shape)


def _tensors_given(call: _Call) -> list[Tensor]:
    """The tensors among the arguments of a block, and in mappings among them."""
    given = [each.data if isinstance(each, UserDict) else each for each in (*call.places, *call.names.values())]
    return [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]


def _states_read(tower: Sequence[_Call], how: BlockCall, given: Sequence[Tensor]) -> list[int]:
    """The blocks of a tower, but for the last, of whose result something is made that lies past it."""
    results = [each.outputs if how.result is None else each.outputs[how.result] for each in tower]
    place_of = {each.grad_fn: place for place, each in enumerate(results)}
    reached = _reached(given, set(place_of))
    return sorted({place for node, place in place_of.items() if node in reached} - {len(tower) - 1})


def _read_of(model: nn.Module, path: str, calls: Sequence[_Call], entered: _Call) -> Sequence[_Call]:
    """The calls of the first blocks of a list, up to the last of which the blocks of the next list read anything."""
    reached = _parameters_of(_tensors_given(entered))
    blocks = list(model.get_submodule(path).children())
    last = max((n for n, block in enumerate(blocks) if reached & {id(each) for each in block.parameters()}), default=0)
    return calls[: last + 1]


def _reached(results: Sequence[Tensor], last: Collection[object] = ()) -> set[Any]:
    """The nodes of autograd through which tensors were made, none of them behind those that are to be the ``last``."""
    left, seen = [each.grad_fn for each in results], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions] if node not in last else []
    return seen


def _parameters_of(results: Sequence[Tensor]) -> set[int]:
    """The identities of the parameters that tensors were made of."""
    return {id(getattr(node, "variable", None)) for node in _reached(results)}


def _resting(model: PreTrainedModel, logits: Tensor) -> tuple[str, ...]:
    """The outermost modules of which no parameter is trained: frozen, or nothing that the logits are made of."""
    reached = _parameters_of([logits])

    def rests(module: nn.Module) -> bool:
        own = list(module.parameters())
        return bool(own) and not any(id(each) in reached for each in own)

    found: list[str] = []
    for path, module in model.named_modules():
        if rests(module) and not _in(path, found):
            found.append(path)
    return tuple(found)


@contextmanager
def _called_with_hooks(blocks: Collection[nn.Module]) -> Iterator[None]:
    """Within it blocks are called with their hooks, though a model calls their ``forward`` itself."""

    called: set[nn.Module] = set()

    def forward(block: nn.Module, *places: Any, **names: Any) -> Any:
        return type(block).forward(block, *places, **names) if block in called else block(*places, **names)

    plain = [block for block in blocks if "forward" not in vars(block)]
    handles = [each.register_forward_pre_hook(lambda module, _given: called.add(module)) for each in plain]
    handles += [each.register_forward_hook(lambda module, *_: called.discard(module)) for each in plain]
    for block in plain:
        block.forward = partial(forward, block)
    try:
        yield
    finally:
        for block in plain:
            del block.forward
        for handle in handles:
            handle.remove()


def _in_blocks(
    model: nn.Module, lists: Mapping[str, Sequence[nn.Module]], paths: Mapping[nn.Module, str]
) -> dict[nn.Module, str]:
    """The paths in the largest list of modules that stand in another, too."""
    found: dict[nn.Module, str] = {}
    for path in list(lists)[:1]:
        for inner, module in model.get_submodule(path).named_modules(prefix=path):
            if not _below(paths[module], path) and _in(paths[module], list(lists)):
                found.setdefault(module, inner)
    return found


def _lists(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The lists of modules that lie in no other of their type, by their path; those with the most parameters first, of
    equal ones the last.

    Sequences of modules that call one another come behind all lists.
    """
    return _lists_of(nn.ModuleList, model) | _lists_of(nn.Sequential, model)


def _lists_of(list_type: type[nn.ModuleList | nn.Sequential], model: nn.Module) -> dict[str, list[nn.Module]]:
    found: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, list_type) and len(module) and not inside:
            found[path] = list(module)
    size = {path: sum(p.numel() for block in blocks for p in block.parameters()) for path, blocks in found.items()}
    place = {path: place for place, path in enumerate(found)}
    return {path: found[path] for path in sorted(found, key=lambda path: (-size[path], -place[path]))}


def _block_call(calls: Sequence[_Call], config: PreTrainedConfig, tokens: int, read: Read) -> BlockCall:
    """Where the result of a block goes into the next; the same for all.

    A state of one shape, of blocks behind what is ``read`` other than tokens, has no dim of tokens.
    """
    first = calls[0].outputs
    if isinstance(first, Tensor):
        candidates: list[tuple[int | str | None, int | None]] = [(None, None)]
    elif isinstance(first, dict):
        candidates = [(name, len(first)) for name, each in first.items() if isinstance(each, Tensor)]
    elif isinstance(first, tuple | list):
        candidates = [(place, len(first)) for place, each in enumerate(first) if isinstance(each, Tensor)]
    else:
        raise _refused(config, f"blocks that return {type(first).__name__}")
    for result, count in candidates:
        arguments: set[int | str] | None = None
        for call, following in pairwise(calls):
            hidden = call.outputs if result is None else call.outputs[result]
            places = {place for place, each in enumerate(following.places) if each is hidden}
            names = {name for name, each in following.names.items() if each is hidden}
            found = places | names
            arguments = found if arguments is None else arguments & found
        if arguments is None:
            arguments = {0} if calls[0].places else {"hidden_states"}
        if len(arguments) == 1:
            argument = arguments.pop()
            state = _argument(calls[0], argument)
            order, inner = ((), ()) if read else _order(state, config, tokens)
            is_list = isinstance(read, SplitFeatures) and read.grid is not None
            lone = is_list and state.ndim == 3 and len(state) == 1
            return BlockCall(
                argument=argument,
                result=result,
                num_results=count,
                number=_number(calls),
                order=order,
                inner=inner,
                places=state.shape[-2] // _SAMPLES if lone or (is_list and state.ndim == 2) else 0,
                lone=lone,
            )
    raise _refused(config, "something between its blocks, or more than one state that goes from block to block")


def _argument(call: _Call, name: int | str) -> Tensor:
    return call.names[name] if isinstance(name, str) else call.places[name]


def _order(state: Tensor, config: PreTrainedConfig, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of a hidden state that are samples and tokens, and the others, where these come first; the sizes of all
    others, where they are several.
    """
    sizes = list(state.shape)
    if state.ndim == 3 and sizes[:2] == [_SAMPLES, tokens]:
        return (), ()
    if state.ndim == 3 and sizes[0] == _SAMPLES and tokens not in sizes:
        return (), ()  # of another length
    if sizes.count(_SAMPLES) != 1 or sizes.count(tokens) != 1:
        raise _refused(config, f"a hidden state of {sizes} for {_SAMPLES} samples of {tokens} tokens")
    first = [sizes.index(_SAMPLES), sizes.index(tokens)]
    rest = [dim for dim in range(state.ndim) if dim not in first]
    order = (*first, *rest)
    inner = tuple(sizes[dim] for dim in rest) if len(rest) > 1 else ()
    return (() if order == tuple(range(state.ndim)) else order), inner


def _number(calls: Sequence[_Call]) -> int | str | None:
    """Where blocks are given their own number, of which there is more than one."""
    given = [dict(enumerate(each.places)) | dict(each.names) for each in calls]
    counts = (n for n in given[0] if all(type(each.get(n)) is int and each[n] == p for p, each in enumerate(given)))
    return next(counts, None) if len(calls) > 1 else None


def _encoded(calls: Sequence[_Call], how: BlockCall, config: PreTrainedConfig) -> int | str:
    """Where every block of a decoder is given the encoder's output."""
    given = [dict(enumerate(each.places)) | dict(each.names) for each in calls]
    found = [
        name
        for name, value in given[0].items()
        if isinstance(value, Tensor) and value.requires_grad and all(each.get(name) is value for each in given[1:])
    ]
    found = [name for name in found if name != how.argument]
    if len(found) != 1:
        raise _refused(config, "a decoder whose blocks do not all read one output of the encoder")
    return found[0]


class _Watched(UserDict[Any, Any]):
    """A mapping that blocks are given, as one of them sees it: what it reads there, and what it writes."""

    def __init__(self, mapping: UserDict[Any, Any]) -> None:
        super().__init__()
        self.data = mapping.data
        self.read: dict[Any, Any] = {}
        self.written: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        self.read[key] = super().__getitem__(key)
        return self.read[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.written[key] = value


_Where = tuple[int | str, tuple[str, int] | None]
"""The argument that a stream is, or the mapping and the entry there."""


def _given(call: _Call, *, written: bool = False) -> Iterator[tuple[_Where, Tensor]]:
    """What depends on parameters among the arguments of a block: itself, and what it reads, or writes, in mappings."""
    for name, value in (*enumerate(call.places), *call.names.items()):
        if isinstance(value, Tensor) and not written:
            yield (name, None), value
        elif isinstance(value, _Watched):
            entries = value.written if written else value.read
            for key, each in entries.items():
                yield from (((name, (key, place)), leaf) for place, leaf in enumerate(each))


def _streams(calls: Sequence[_Call], how: BlockCall, *, keeps_results: bool) -> Iterator[SplitStream]:
    """What depends on parameters and is given to blocks beside the hidden state, in the order of its reading.

    What blocks return they are given only with ``keeps_results``: some make it anew where they are given none. So are
    whole numbers that one of them returns, as the places of tokens that it has chosen.
    """
    returned = {id(leaf) for each in calls for leaf in pytree.tree_leaves(each.outputs)}
    makers = {
        id(value): (place, None) for place, call in enumerate(calls, 1) for _, value in _given(call, written=True)
    }
    if keeps_results:
        for place, call in reversed([*enumerate(calls, 1)]):  # of those that hand it on the first has made it
            outputs = call.outputs if isinstance(call.outputs, tuple | list) else ()
            makers |= {id(each): (place, number) for number, each in enumerate(outputs) if number != how.result}
    found: dict[tuple[_Where, int], SplitStream] = {}
    for layer, call in enumerate(calls, 1):
        for where, value in _given(call):
            is_known = id(value) in makers or id(value) not in returned
            is_chosen = id(value) in makers and not value.is_floating_point()
            if (value.requires_grad or is_chosen) and where[0] != how.argument and is_known:
                (maker, result), shape = makers.get(id(value), (0, None)), tuple(value.shape[1:])
                whole = str(value.dtype).removeprefix("torch.") if is_chosen else ""
                made = SplitStream(
                    argument=where[0], entry=where[1], result=result, maker=maker, readers=(), shape=shape, whole=whole
                )
                before = found.setdefault((where, id(value)), made)
                found[where, id(value)] = before.model_copy(update={"readers": (*before.readers, layer)})
    yield from found.values()


def _of_tokens(
    stream: SplitStream,
    calls: Sequence[_Call],
    longer: Sequence[_Call],
    tokens: tuple[int, int],
    config: PreTrainedConfig,
) -> SplitStream:
    """The stream with 0 in the place of the dims that are tokens, as calls with more tokens show."""
    seen = [dict(_given(each[stream.readers[0] - 1])) for each in (calls, longer)]
    samples, *sizes = zip(*(each[stream.argument, stream.entry].shape for each in seen), strict=True)
    beside = [one - tokens[0] for one, other in sizes if one != other]
    grow_alike = all(one == other or other - one == tokens[1] - tokens[0] for one, other in sizes)
    if samples != (_SAMPLES, _SAMPLES) or not grow_alike or min(beside, default=0) < 0:
        raise _refused(config, f"blocks that are given {stream.argument}, of another length than the samples are")
    return stream.model_copy(update={"shape": tuple(one if one == other else tokens[0] - one for one, other in sizes)})


def _ends(
    model: PreTrainedModel, seen: Recording, entering: Tensor, config: PreTrainedConfig, task: Task
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The paths of the modules that hold the parameters of the embedding, of what lies between two lists, and the head.

    And of these the modules that hold blocks: they are the embedding's where its result, ``entering``, depends on their
    own parameters, or nothing does. A module that is not called, and whose parameters another holds that is, belongs to
    neither. What reads states of a tower is called between its blocks, and lies behind them.
    """
    blocks_of = {path: seen.blocks(model, path) for path in seen.chains}
    of_blocks = {module for each in blocks_of.values() for block in each.values() for module in block.modules()}
    of_blocks |= {model.get_submodule(path) for path in seen.chains}
    owners = {path: module for path, module in model.named_modules() if holds_parameters(module)}
    outside = [path for path, module in owners.items() if module not in of_blocks]
    spans = []
    for path, blocks in blocks_of.items():
        paths = [f"{path}.{name}" for name in blocks]
        inside = [place for place, called in enumerate(seen.called) if _in(called, paths)]
        spans.append((inside[0], inside[-1]))
    held = {id(each) for path in outside if path in seen.called for each in _parameters(model, path)}
    ends: list[list[str]] = [[] for _ in range(len(spans) + 1)]
    tied: list[str] = []
    holders = [path for path in outside if any(_below(blocks, path) for blocks in seen.chains) or not path]
    if "" in holders and seen.beside is None:
        raise _refused(config, "parameters of the model itself, which holds the blocks")
    for path in (path for path in outside if path not in holders):
        if path not in seen.called and held.issuperset(map(id, _parameters(model, path))):
            tied.append(path)
            continue
        when = _calls(seen, path)
        when = [_past(place, spans[0]) for place in when] if task is Task.IMAGE_TEXT else when
        where = {sum(last < place for _, last in spans) for place in when}
        if any(first < place < last for first, last in spans for place in when) or len(where) > 1:
            raise _refused(config, f"{path}, which is called between blocks")
        ends[where.pop()].append(_at_rest(seen, path))
    in_head = {id(each) for path in ends[-1] for each in model.get_submodule(path).parameters()}
    leaving = [*pytree.tree_leaves(list(seen.chains.values())[-1][-1].outputs), seen.beside]
    for path in tied:
        own = _parameters(model, path)
        if in_head.isdisjoint(map(id, own)) and _depends(seen.logits, own, leaving):
            ends[-1].append(path)
    in_head |= {id(each) for path in ends[-1] for each in _parameters(model, path)}
    for path in (path for end in ends[:-1] for path in end):
        own = [each for each in model.get_submodule(path).parameters() if id(each) not in in_head]
        if _depends(seen.logits, own, leaving):
            raise _refused(config, f"{path}, which lies before its blocks and which its head reads past them")
    if not all(ends):
        raise _refused(config, f"no parameters {'before' if ends[-1] else 'behind'} its blocks")
    found = [_outermost(each) for each in ends]
    for path in holders:
        own = _parameters(model, path)
        end = -1 if _depends(seen.logits, own) and not _depends(entering, own) else 0
        found[end] = (*found[end], path)
    return found, tuple(holders)


def _past(place: int, span: tuple[int, int]) -> int:
    """The place of a call, which is behind all of a span where it is in it."""
    return span[1] + 1 if span[0] < place <= span[1] else place


def _by_use(
    model: PreTrainedModel, seen: Recording, entering: Tensor, embedding: Sequence[str], between: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The embedding's modules and those between two lists, where a table of tokens is read before the first list.

    The embedding's are those that its result is made of. Blocks of the first list that nothing reads lie between.
    """
    reached = _parameters_of([entering])
    early = [path for path in embedding if reached & {id(each) for each in model.get_submodule(path).parameters()}]
    first = next(iter(seen.chains))
    unread = [f"{first}.{name}" for name, _ in model.get_submodule(first).named_children()][len(seen.chains[first]) :]
    late = [*(path for path in embedding if path not in early), *between]
    return tuple(early), _outermost([next((block for block in unread if _below(path, block)), path) for path in late])


def _depends(result: Tensor, parameters: Collection[nn.Parameter], leaving: Collection[object] = ()) -> bool:
    """Whether a tensor was made of one of these parameters, other than by way of what is ``leaving`` the blocks."""
    wanted, left = {id(each) for each in parameters}, [result.grad_fn]
    seen = {each.grad_fn for each in leaving if isinstance(each, Tensor)} - {None}
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in wanted:
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


def _parameters(model: PreTrainedModel, path: str) -> list[nn.Parameter]:
    return list(model.get_submodule(path).parameters(recurse=False))


def _calls(seen: Recording, path: str) -> list[int]:
    """When a module is called; of one that is not, when the module first is that holds it: the two stay together.

    So lie with the embedding the parts that no sample reaches, as a tower for images in a model that reads text.
    """
    when = [place for place, called in enumerate(seen.called) if called == path]
    return when or _calls(seen, path.rpartition(".")[0])[:1]


def _at_rest(seen: Recording, path: str) -> str:
    """A module; where it is not called, the outermost that holds it and of which nothing is called."""
    while path not in seen.called and not any(_below(called, path.rpartition(".")[0]) for called in seen.called):
        path = path.rpartition(".")[0]
    return path


def _outermost(paths: list[str]) -> tuple[str, ...]:
    distinct = list(dict.fromkeys(paths))
    return tuple(path for path in distinct if not any(_below(path, other) for other in distinct if other != path))


def _in(path: str, outers: Sequence[str]) -> bool:
    return any(_below(path, outer) for outer in outers)


def _below(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.") or path == outer


def _key(
    call: _Call,
    hidden: Collection[object],
    flowing: tuple[Collection[SplitStream], int],
    passed: Sequence[object],
    block: int,
    config: PreTrainedConfig,
) -> tuple[Hashable, ...]:
    """Equal for blocks that are given the same; ``hidden`` says under what names they are given what flows along.

    ``flowing`` are the streams that the block reads or makes, and its layer. A mapping may have them by its number.

    What else of that which blocks return is ``passed`` on they are not given: a proof shows whether they make it anew.
    """
    given: list[Hashable] = []
    streams, layer = flowing
    for name, value in (*enumerate(call.places), *sorted(call.names.items())):
        if name in hidden:
            continue
        if any((each.argument, each.entry) == (name, None) for each in streams):
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                if any(leaf is each for each in passed):
                    given.append((name, repr(None)))
                    continue
                if leaf.requires_grad:
                    raise _refused(config, f"blocks that are given {name}, which depends on parameters")
                given.append((name, values_of(leaf) or id(leaf)))
            else:
                given.append((name, repr(leaf) if isinstance(leaf, int | float | str | bool | None) else type(leaf)))
    entries = [each.entry and (each.entry[0] == str(block) or each.entry[0], each.entry[1]) for each in streams]
    given += [
        (each.argument, entry, each.result, each.maker == layer, each.shape)
        for each, entry in zip(streams, entries, strict=True)
    ]
    return tuple(given)


def _signatures(blocks: Sequence[nn.Module], places: Sequence[int]) -> list[tuple[Hashable, ...]]:
    """The structure of each block, without the numbers that say where it, or what it holds, stands among all."""
    found = [signature(each, places=True) for each in blocks]
    seen: dict[Hashable, dict[int, int]] = {}
    for block, parts in zip(places, found, strict=False):
        for part in filter(_is_index, parts):
            seen.setdefault(part[:2], {})[block] = part[2]
    counting = {name for name, values in seen.items() if _is_counting(values)}

    def without_places(parts: tuple[Hashable, ...], block: int) -> tuple[Hashable, ...]:
        return tuple(p for p in parts if not (_is_index(p) and (p[2] == block or p[:2] in counting)))

    return [without_places(parts, block) for block, parts in zip(places, found, strict=False)]


def _is_index(part: Any) -> bool:
    is_number = isinstance(part, tuple) and len(part) == 3 and type(part[2]) is int
    return is_number and ("idx" in part[1] or "id" in part[1].split("_") or "index" in part[1])


def _is_counting(values: Mapping[int, int]) -> bool:
    """Whether numbers by block grow by as many from each block to the next, and name no block before it."""
    steps = {(values[after] - values[before]) / (after - before) for before, after in pairwise(sorted(values))}
    return len(steps) == 1 and min(steps) >= 1 and all(number >= block for block, number in values.items())


def _image(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width of what the model reads."""
    of_images = getattr(config, "vision_config", config)
    size = getattr(of_images, "image_size", None) or _IMAGE[1:]
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(of_images, "num_channels", None) or _IMAGE[0], height, width


def _attention(config: PreTrainedConfig, block: int) -> str:
    listed = getattr(config, "layer_types", None)
    if isinstance(listed, list | tuple) and block < len(listed):
        return str(listed[block])
    slides = isinstance(getattr(config, "sliding_window", None), int) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if slides else "full_attention"


def _names(blocks: Sequence[nn.Module], attention: Sequence[str]) -> list[str]:
    """A name for each kind of block: by what tells it from the others, where words do, else by number."""
    sparse = [bool(routed_experts(block)) for block in blocks]
    found = []
    for has_experts, attends in zip(sparse, attention, strict=True):
        words = [attends.removesuffix("_attention")] if len(set(attention)) > 1 else []
        words += [("sparse" if has_experts else "dense")] if len(set(sparse)) > 1 else []
        found.append(" ".join([*words, "block"]))
    return [
        name if found.count(name) == 1 else f"{name} of kind {found[:place].count(name) + 1}"
        for place, name in enumerate(found)
    ]


def _rotary(call: _Call) -> tuple[Tensor, Tensor] | None:
    """The pair of cosines and sines [.., S, D] that a block is given."""
    for value in (*call.places, *call.names.values()):
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, Tensor) for each in value):
            return value
    return None


def _has_table(model: PreTrainedModel, embedding: Sequence[str], positions: int) -> bool:
    """Whether positions are looked up in a table, which no sequence may outgrow."""
    tables = [m for path in embedding for m in model.get_submodule(path).modules() if isinstance(m, nn.Embedding)]
    ids = table_of_tokens(model)
    return any(table is not ids and positions <= table.num_embeddings <= positions + 8 for table in tables)


def _shared(
    model: PreTrainedModel,
    holders: Mapping[int, Sequence[str]],
    called: Collection[str],
    config: PreTrainedConfig,
) -> Iterator[tuple[tuple[int, str], ...]]:
    """The parameters that layers share; ``holders`` has the paths of a layer's modules by its number."""
    where: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if holds_parameters(model.get_submodule(path.rpartition(".")[0])):
            where.setdefault(parameter, []).append(path)
    for paths in (paths for paths in where.values() if len(paths) > 1):
        copies = sorted((layer, path) for layer, each in holders.items() for path in paths if _in(path, each))
        if len(copies) == len({layer for layer, _ in copies}):
            yield from [tuple(copies)] if len(copies) > 1 else []
        elif not _one_module(model, paths) and any(path.rpartition(".")[0] in called for path in paths):
            raise _refused(config, f"a parameter that {', '.join(paths[:3])} share")


def _one_module(model: PreTrainedModel, paths: Sequence[str]) -> bool:
    """Whether one module stands in several places, so that its parameters have several paths."""
    return len({model.get_submodule(path.rpartition(".")[0]) for path in paths}) == 1


def _failed(config: PreTrainedConfig, error: Exception) -> InvalidModelError:
    """Why a forward pass fails: a kind of layers that the model has no mask or positions for, or whatever it raises."""
    listed = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if isinstance(error, KeyError) and (frames := frames_of(error)) and error.args[0] in listed:
        mappings = [each for each in frames[-1][0].f_locals.values() if isinstance(each, Mapping)]
        known = sorted({key for each in mappings for key in each if key in ALLOWED_LAYER_TYPES})
        return InvalidModelError(
            field=f"layer_types.{list(listed).index(error.args[0])}",
            found=f"{error.args[0]!r}, which {config.model_type} does not know",
            expected=f"a kind of layers of {config.model_type}" + (f", as {', '.join(known)}" if known else ""),
            hint="compare with the config.json that the model was published with",
        )
    what = f"{type(error).__name__}: {_first_line(error)}"
    return _refused(config, f"its forward pass fails on tensors without values{failed_at(error)} ({what})")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


def _refused(config: PreTrainedConfig, found: str) -> InvalidModelError:
    return InvalidModelError(
        field="model_type",
        found=f"{config.model_type}: {found}",
        expected="a model of embedding, one list of blocks and head, with one hidden state between them; or of two "
        "lists, an encoder's and a decoder's, whose blocks read its output",
        hint="docs/adding-a-model.md says what splits by itself and how to write down what does not",
    )
