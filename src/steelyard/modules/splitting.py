"""Split of a transformers model into embedding, blocks and head, found from its modules and one forward pass.

The class of the model is the one that its config names, or the first of transformers for its task. It is built on the
meta device and run once, with hooks, on tensors without values. The blocks are the list of modules with the most
parameters whose modules are called once each, in order. Modules called before the first block belong to the embedding,
those called after the last one to the head; none may be called in between. Each block must be given the result of the
previous one, in one place; its other arguments must not depend on parameters and must be the same for all blocks of a
type. Blocks are of one type if they have the same structure and are given the same.

A model of an encoder and a decoder has two such lists, the encoder's blocks called first; each of the decoder's blocks
must be given the same single tensor that depends on parameters, the encoder's output.

A model that does not split so raises an error that names the place. So does control flow that depends on values, which
tensors without values cannot follow. A split found here counts only once it is proved
(`steelyard.modules.split_proof`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.family import SINKS, LayerRole, Task
from steelyard.model.split import (
    TEXT_PART,
    BlockCall,
    ModelSplit,
    SplitEncoder,
    SplitFeatures,
    is_below,
    is_below_any,
    length_of,
    outermost,
    width_of,
)
from steelyard.modules.build import auto_class_of, build_from_config
from steelyard.modules.model_inputs import features_of
from steelyard.modules.not_split import not_split
from steelyard.modules.prepared import prepare
from steelyard.modules.recording import (
    TOKENS,
    Recording,
    Subject,
    argument_of,
    depends,
    first_state,
    own_parameters,
    parameters_of,
    record_pass,
)
from steelyard.modules.split_layer_types import (
    all_streams,
    block_call,
    encoded_argument,
    order_of,
    state_lengths,
    streams_past_a_tower,
    types_of_layers,
)
from steelyard.modules.stubbed_model import holds_parameters


def resting_modules(model: PreTrainedModel, logits: Tensor) -> tuple[str, ...]:
    """Return the outermost modules without a trained parameter: frozen, or not used for the logits."""
    reached = parameters_of([logits])

    def rests(module: nn.Module) -> bool:
        own = list(module.parameters())
        return bool(own) and not any(id(each) in reached for each in own)

    found: list[str] = []
    for path, module in model.named_modules():
        if rests(module) and not is_below_any(path, found):
            found.append(path)
    return tuple(found)


def find_ends(seen: Recording, entering: Tensor) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the paths of the modules with the parameters of embedding, layer between two lists, and head.

    Return with them the modules that hold blocks: they belong to the embedding if its result, ``entering``, depends on
    parameters that they hold themselves, or if nothing does. A module that is not called belongs to neither if one that
    is called holds its parameters. Modules that read states of a tower are called between its blocks, and lie after
    them.
    """
    model = seen.model
    blocks_of = {path: seen.blocks(path) for path in seen.chains}
    of_blocks = {module for each in blocks_of.values() for block in each.values() for module in block.modules()}
    of_blocks |= {model.get_submodule(path) for path in seen.chains}
    owners = {path: module for path, module in model.named_modules() if holds_parameters(module)}
    outside = [path for path, module in owners.items() if module not in of_blocks]
    spans = []
    for path, blocks in blocks_of.items():
        paths = [f"{path}.{name}" for name in blocks]
        inside = [place for place, called in enumerate(seen.called) if is_below_any(called, paths)]
        spans.append((inside[0], inside[-1]))
    held = {id(each) for path in outside if path in seen.called for each in own_parameters(model, path)}
    ends: list[list[str]] = [[] for _ in range(len(spans) + 1)]
    tied: list[str] = []
    holders = [path for path in outside if any(is_below(blocks, path) for blocks in seen.chains) or not path]
    if "" in holders:
        raise seen.refusal("parameters directly in the model, outside its modules")
    for path in (path for path in outside if path not in holders):
        if path not in seen.called and held.issuperset(map(id, own_parameters(model, path))):
            tied.append(path)
            continue
        when = _calls(seen, path)
        when = [_past(place, spans[0]) for place in when] if seen.task is Task.IMAGE_TEXT else when
        where = {sum(last < place for _, last in spans) for place in when}
        if any(first < place < last for first, last in spans for place in when) or len(where) > 1:
            raise seen.refusal(f"{path}, which is called between blocks")
        ends[where.pop()].append(_at_rest(seen, path))
    in_head = {id(each) for path in ends[-1] for each in model.get_submodule(path).parameters()}
    leaving = pytree.tree_leaves(list(seen.chains.values())[-1][-1].outputs)
    for path in tied:
        own = own_parameters(model, path)
        if in_head.isdisjoint(map(id, own)) and depends(seen.logits, own, leaving):
            ends[-1].append(path)
    in_head |= {id(each) for path in ends[-1] for each in own_parameters(model, path)}
    for path in (path for end in ends[:-1] for path in end):
        own = [each for each in model.get_submodule(path).parameters() if id(each) not in in_head]
        if depends(seen.logits, own, leaving):
            raise seen.refusal(f"{path}, which lies before the blocks but is also read by the head")
    if not all(ends):
        raise seen.refusal(f"no parameters {('before' if ends[-1] else 'after')} its blocks")
    found = [outermost(each) for each in ends]
    for path in holders:
        own = own_parameters(model, path)
        end = -1 if depends(seen.logits, own) and not depends(entering, own) else 0
        found[end] = (*found[end], path)
    return found, tuple(holders)


def _past(place: int, span: tuple[int, int]) -> int:
    """Return the place of a call, or the one after the span if the call lies in it."""
    return span[1] + 1 if span[0] < place <= span[1] else place


def ends_by_use(
    seen: Recording, entering: Tensor, embedding: Sequence[str], between: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the embedding's modules and those between two lists, if a token table is read before the first list.

    The embedding has the modules that its result depends on. Unread blocks of the first list lie between.
    """
    model, reached = seen.model, parameters_of([entering])
    early = [path for path in embedding if reached & {id(each) for each in model.get_submodule(path).parameters()}]
    first = next(iter(seen.chains))
    unread = [f"{first}.{name}" for name, _ in model.get_submodule(first).named_children()][len(seen.chains[first]) :]
    late = [*(path for path in embedding if path not in early), *between]
    return tuple(early), outermost([next((block for block in unread if is_below(path, block)), path) for path in late])


def _calls(seen: Recording, path: str) -> list[int]:
    """Return the places of a module's calls; for an uncalled one, the first call of its holder: the two stay together.

    Parts that no sample reaches therefore belong to the embedding, such as an image tower in a model that reads text.
    """
    when = [place for place, called in enumerate(seen.called) if called == path]
    return when or _calls(seen, path.rpartition(".")[0])[:1]


def _at_rest(seen: Recording, path: str) -> str:
    """Return the path of a module, or if it is not called, of its outermost holder without called modules."""
    while path not in seen.called and not any(is_below(called, path.rpartition(".")[0]) for called in seen.called):
        path = path.rpartition(".")[0]
    return path


def shared_parameters(seen: Recording, holders: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, str], ...]]:
    """Yield the parameters that layers share; ``holders`` has the paths of a layer's modules by its number."""
    model, where = seen.model, dict[nn.Parameter, list[str]]()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if holds_parameters(model.get_submodule(path.rpartition(".")[0])):
            where.setdefault(parameter, []).append(path)
    for paths in (paths for paths in where.values() if len(paths) > 1):
        owners = {model.get_submodule(path.rpartition(".")[0]) for path in paths}
        copies = sorted((layer, path) for layer, each in holders.items() for path in paths if is_below_any(path, each))
        if len(copies) == len({layer for layer, _ in copies}):
            yield from [tuple(copies)] if len(copies) > 1 else []
        elif len(owners) > 1 and any(path.rpartition(".")[0] in seen.called for path in paths):
            raise seen.refusal(f"a parameter that {', '.join(paths[:3])} share")


def task_of(config: PreTrainedConfig) -> Task:
    """Return the task that the config's architecture names, or else the first task that its type has.

    A model that says it is no decoder sees the tokens that follow, so its task is to fill in masked ones.
    """
    named = (getattr(config, "architectures", None) or [""])[0]
    of_transformers = sorted(
        (task for task in Task if task is not Task.OWN), key=lambda task: task is not Task.SEQ2SEQ_LM
    )  # some classes with an encoder are listed for masked models, too
    of_transformers = [task for task in of_transformers if not task.has_decoder or config.is_encoder_decoder]
    tasks = [task for task in of_transformers if _classes(config, task)]
    for task in tasks:
        if named in {each.__name__ for each in _classes(config, task)}:
            return task
    tasks = [task for task in Task if task in tasks]
    if not tasks:
        raise not_split(
            config,
            "no transformers class for text (causal, masked, encoder-decoder), speech to text, images with "
            "text, or image classification",
        )
    bare = {each.__name__ for each in _listed(config, transformers.AutoModel)}  # these say nothing about the task
    if named and named not in bare:
        classes = [each.__name__ for task in tasks for each in _classes(config, task)]
        raise InvalidModelError(
            field="architectures",
            found=f"{named}, a class for another task",
            expected=f"for a {config.model_type}: {', '.join(dict.fromkeys(classes))}",
            hint="name the class to train, or leave architectures out for the first",
        )
    is_encoder = getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
    return Task.MASKED_LM if is_encoder and Task.MASKED_LM in tasks else tasks[0]


def has_fused_attention(config: PreTrainedConfig, task: Task) -> bool:
    """Return whether attention may run in one kernel through transformers' registry; some models use it unannounced."""
    model = _classes(config, task)[0]
    is_fused = model._supports_sdpa or config.model_type in SINKS
    return bool(is_fused and (model._supports_attention_backend or model._can_set_attn_implementation()))


def text_of(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the text config of a model of several parts, if there is a causal class for it; else None."""
    text = getattr(config, TEXT_PART, None)
    return text if isinstance(text, PreTrainedConfig) and auto_class_of(text, Task.CAUSAL_LM) else None


def _classes(config: PreTrainedConfig, task: Task) -> tuple[type[PreTrainedModel], ...]:
    """Return the classes of transformers for a config and a task."""
    return _listed(config, auto_class_of(config, task))


def _listed(config: PreTrainedConfig, auto_class: Any) -> tuple[type[PreTrainedModel], ...]:
    classes = auto_class._model_mapping.get(type(config), ()) if auto_class else ()
    return classes if isinstance(classes, tuple) else (classes,)


_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"),
    "max_target_positions",
)
_IMAGE = (3, 224, 224)
"""Default input (channels, height, width) of an image model whose config gives no size, such as a convolutional one."""


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
    """Return the split of the model of a config. Raise `InvalidModelError`, which names the obstacle, if there is none.

    With ``keeps_results`` all results that blocks hand on flow along, not only the hidden state.
    """
    task = task_of(config)
    fused_attention = has_fused_attention(config, task)
    model = build_from_config(config, task, fused_attention=fused_attention)
    prepare(model, config.model_type)
    image = _image(config) if task is Task.IMAGE_CLASSIFICATION else None
    features = features_of(model, task) if task.reads_features else None
    read = features or image
    of = Subject(model=model, config=config, task=task, read=read)
    seen = record_pass(of)
    (_, *sizes) = first_state(seen).shape
    if not read and TOKENS not in sizes and (padded := sizes[0]) > TOKENS:
        of_padded = record_pass(of, padded)
        seen = of_padded if first_state(of_padded).shape[1] == padded else seen
    split = _split_of(seen, fused_attention=fused_attention, keeps_results=keeps_results)
    keywords = seen.keywords
    if split.encoder and split.encoder.encoded is not None:
        first = seen.chains[split.blocks][0]
        keywords = seen.entering(argument_of(first, split.encoder.encoded))
    drops = seen.modules.attention_drops
    return Found(split=split, config=config, model=model, keywords=keywords, attention_drops=drops)


def _split_of(seen: Recording, *, fused_attention: bool, keeps_results: bool) -> ModelSplit:
    model, config, task, read = seen.model, seen.config, seen.task, seen.read
    first, blocks = next(iter(seen.chains)), list(seen.chains)[-1]
    calls = {path: block_call(seen, path) for path in seen.chains}
    first_call, call = calls[first], calls[blocks]
    image, features = (None, read) if isinstance(read, SplitFeatures) else (read, None)
    entering = argument_of(seen.chains[first][0], first_call.argument)
    (embedding, *between, head), holders = find_ends(seen, entering)
    if task is Task.IMAGE_TEXT:
        embedding, between[0] = ends_by_use(seen, entering, embedding, between[0])
    encoder = _encoder_of(seen, calls, between[0]) if between else None
    streams = [] if read else all_streams(seen, first_call, keeps_results=keeps_results)
    if task is Task.IMAGE_TEXT:
        tower, of_text = seen.chains.values()
        streams = [*streams_past_a_tower(tower, of_text, first_call)]
    lengths = {} if image else state_lengths(seen, calls)
    hidden = [first_call.hidden((seen.chains[first][0].places, seen.chains[first][0].names))]
    hidden += [each.result_of(one.outputs) for path, each in calls.items() for one in seen.chains[path]]
    fixed = len(hidden) if image else 1 + len(seen.chains[first]) if features else 0
    shapes = [tuple(each.shape[1:]) if place < fixed else () for place, each in enumerate(hidden)]
    layer_types, layers, rotary = types_of_layers(seen, calls, encoder, streams, lengths, shapes)
    starts = [place for place, layer_type in enumerate(layers) if layer_types[layer_type].role is LayerRole.EMBEDDING]
    ends = [tuple(path for path in each if path not in holders) for each in (embedding, *between, head)]
    by_layer = dict(zip([*starts, len(layers) - 1], ends, strict=True))
    by_layer |= {
        (starts[-1] if path == blocks else 0) + 1 + number: (f"{path}.{place}",)
        for path in seen.chains
        for number, place in enumerate(seen.blocks(path))
    }
    parts = (config, config.get_text_config(decoder=True))
    said = [getattr(part, key, None) for part in parts for key in _POSITIONS]
    longest = next((int(each) for each in said if isinstance(each, int | float) and each > 0), 2**31)
    table = None if image else _table_of_positions(model, ends[1 if features else 0], longest)
    return ModelSplit(
        model_type=config.model_type,
        task=task,
        embedding=embedding,
        blocks=blocks,
        called=() if list(places := seen.places[blocks]) == list(range(len(places))) else tuple(places),
        head=head,
        holders=holders,
        kinds=tuple(layer_types),
        layers=tuple(layers),
        call=call,
        embedding_calls=(seen.modules.between(seen.samples, hidden[0]) or ()) if not streams else (),
        head_calls=seen.modules.between(hidden[-1], seen.logits) or (),
        encoder=encoder,
        hidden_size=width_of(shapes[0]) if image else hidden[fixed].shape[-1],
        vocab_size=seen.logits.shape[-1],
        max_seq_len=length_of(shapes[0]) if image else table or longest,
        multiple=1 if read or seen.tokens == TOKENS else seen.tokens,
        image=image,
        features=features,
        resting=resting_modules(model, seen.logits) if features else (),
        layerdrop=tuple(_stacks_with_layerdrop(model)),
        learned_positions=table is not None,
        rotary_size=max((pair[0].shape[-1] for pair in rotary if pair), default=0),
        rotary_by_attention=len({id(pair[0]) for pair in rotary if pair}) > 1,
        fused_attention=fused_attention,
        asks_for_values=seen.asks_for_values,
        typed_buffers=_typed_buffers(model, config, task, list(seen.chains)),
        shared=tuple(shared_parameters(seen, by_layer)),
        streams=tuple(streams),
    )


def _stacks_with_layerdrop(model: PreTrainedModel) -> Iterator[str]:
    """Yield the stacks of a model that drop blocks at random, each with its rate."""
    for path, module in model.named_modules():
        often = vars(module).get("layerdrop")
        if isinstance(often, float) and often > 0:
            yield f"{path}: {often:.3g}"


def _encoder_of(seen: Recording, calls: Mapping[str, BlockCall], between: tuple[str, ...]) -> SplitEncoder:
    """Return the first of two lists of blocks, with the values that the blocks of the second read of it."""
    first, blocks = calls
    encoder = SplitEncoder(blocks=first, call=calls[first], between=between, encoded=None)
    if not seen.task.has_decoder:
        return encoder
    encoded = encoded_argument(seen, seen.chains[blocks], calls[blocks])
    output = argument_of(seen.chains[blocks][0], encoded)
    order, _ = ((), ()) if seen.read else order_of(output, seen)
    shape = tuple(output.shape[1:]) if seen.read else ()
    reader = seen.chains[blocks][0]
    of_ids = seen.modules.between(seen.decoder_ids, calls[blocks].hidden((reader.places, reader.names)))
    of_encoded = seen.modules.between(calls[first].result_of(seen.chains[first][-1].outputs), output)
    calls_between = None if of_ids is None or of_encoded is None else (of_ids, of_encoded)
    found = {"encoded": encoded, "order": order, "shape": shape, "between_calls": calls_between}
    return encoder.model_copy(update=found)


def _typed_buffers(
    model: PreTrainedModel, config: PreTrainedConfig, task: Task, lists: Sequence[str]
) -> tuple[str, ...]:
    """Return the buffers of blocks that a bf16 model makes in bf16, if it does not run with those of an fp32 model."""
    inside = {
        path: each for path, each in model.named_buffers() if is_below_any(path, lists) and each.is_floating_point()
    }
    if not inside or task is Task.IMAGE_CLASSIFICATION:
        return ()
    typed = build_from_config(config, task, fused_attention=has_fused_attention(config, task), dtype=torch.bfloat16)
    found = [path for path, each in typed.named_buffers() if path in inside and each.dtype == torch.bfloat16]
    for path in found:
        owner, _, name = path.rpartition(".")
        typed.get_submodule(owner)._buffers[name] = inside[path]
    try:
        record_pass(Subject(model=typed, config=config, task=task, read=None))
    except InvalidModelError:
        below = {
            path.removeprefix(f"{blocks}.").partition(".")[2]
            for path in found
            for blocks in lists
            if is_below(path, blocks)
        }
        return tuple(sorted(f"block.{path}" for path in below))
    return ()


def _image(config: PreTrainedConfig) -> tuple[int, int, int]:
    of_images = getattr(config, "vision_config", config)
    size = getattr(of_images, "image_size", None) or _IMAGE[1:]
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(of_images, "num_channels", None) or _IMAGE[0], height, width


def _table_of_positions(model: PreTrainedModel, embedding: Sequence[str], positions: int) -> int | None:
    """Return the number of tokens that a table of positions has entries for; None without a table.

    A plain table with a padding entry (roberta, mpnet) counts positions from the entry after it.
    """
    tables = [m for path in embedding for m in model.get_submodule(path).modules() if isinstance(m, nn.Embedding)]
    ids = model.get_input_embeddings()
    for table in tables:
        if table is not ids and positions <= table.num_embeddings <= positions + 8:
            is_padded = type(table) is nn.Embedding and table.padding_idx is not None
            return min(positions, table.num_embeddings - (table.padding_idx + 1 if is_padded else 0))
    return None
