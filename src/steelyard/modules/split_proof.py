"""Proof that a split is exact: the pieces of a small model, run one after another, give the result of the whole model.

Both have the same random weights in fp32. The logits and the gradient of every parameter are compared, on two inputs of
different length, so that control flow that depends on values or lengths shows. Tensor, sequence and context parallelism
of each layer type is proved likewise (`steelyard.modules.two_ranks`), or the reason against it is kept.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError, first_line
from steelyard.model.chain import ModelChain
from steelyard.model.family import KV_HEADS, NO_CP, SINKS, LayerRole, Task
from steelyard.model.read import chain_from_config, config_hash
from steelyard.model.small import small_config, structure_of, widths_of, with_entries, without_dropout
from steelyard.model.split import ModelSplit, SplitLayerType
from steelyard.modules.build import build_from_config, full_config, materialize_module, prepare_model, read_hub_config
from steelyard.modules.gpu_kernels import as_reference
from steelyard.modules.kept_splits import keep_split, kept_split
from steelyard.modules.known_values import plain_token
from steelyard.modules.model_inputs import (
    UnknownInputError,
    beside_features,
    decoder_inputs,
    fitting_tokens,
    forward_options,
    given_samples,
    ids_beside,
    random_samples,
    read_by,
)
from steelyard.modules.not_split import not_split
from steelyard.modules.split_tp import Styles, block_of, divided_sizes, end_suppositions
from steelyard.modules.splitting import Found, find_split, text_of
from steelyard.modules.two_ranks import (
    ThreadedProof,
    difference,
    gradients_of,
    loss_of,
    parameters_by_path,
    run_pieces,
    tried,
    undivided,
)
from steelyard.plan.shrink import config_of_blocks

_EXACT = "pieces that give the logits and gradients of the whole model"
IMAGE_NO_SP = "the places of an image are not divided"
ENCODER_NO_SP = "two sequences flow along the decoder"
LENGTH_NO_SP = "its states are of another length than the samples"
STREAM_NO_SP = "what its blocks share is not divided by tokens"


def divided_types(
    model: PreTrainedModel,
    split: ModelSplit,
    keywords: Mapping[str, str | None],
    prove: Callable[[Mapping[str, Styles], bool], str],
) -> tuple[SplitLayerType, ...]:
    """Return the layer types with their proved styles, or the reason why they have none.

    ``keywords`` gives the name under which modules get their tensor, by path in the model; ``prove`` returns why styles
    by layer type, with or without sequence parallelism, do not hold, and an empty text if they do.
    """

    def divided(number: int, layer_type: SplitLayerType) -> SplitLayerType:
        layer = split.layers.index(number)
        block = block_of(model, split, layer, keywords) if layer_type.role is LayerRole.BLOCK else None
        supposed = block.suppositions() if block else end_suppositions(model, split, layer_type, layer)
        unread = block.unread_plan() if block else ""
        ways = tried(supposed, lambda styles: prove({layer_type.name: styles}, False))
        if not ways or ways[-1][1]:
            return undivided(layer_type, filter(None, [unread, *(reason for _, reason in ways)]))
        own = [reason for styles, reason in ways if block and block.follows(styles)]
        unproved = f"its own tp plan is not proved on two ranks: {'; '.join(dict.fromkeys(own))}" if all(own) else ""
        styles, known = ways[-1][0], _no_sp(split)
        no_sp = known or prove({layer_type.name: styles}, True)
        return layer_type.model_copy(
            update={
                "styles": dict(styles),
                "no_tp": "",
                "no_sp": known or (f"not proved: {no_sp}" if no_sp else ""),
                "unread_plan": unread or (unproved if own else ""),
            }
        )

    return tuple(divided(number, layer_type) for number, layer_type in enumerate(split.kinds))


def no_cp(split: ModelSplit, layer_type: SplitLayerType, *, attention_drops: bool = False) -> str:
    """Return why no layer of a type can be under cp; empty if it is to be tried."""
    if split.task is not Task.CAUSAL_LM:
        return NO_CP
    blocks = [each for each in split.kinds if each.role is LayerRole.BLOCK]
    found = {each.attention for each in ([layer_type] if layer_type.role is LayerRole.BLOCK else blocks)}
    if any(found) and found.isdisjoint(("full_attention", "sliding_attention")):  # such as a recurrence
        return f"{NO_CP}, and its blocks are of {', '.join(sorted(found))}"
    reasons = {
        "its attention runs step by step, with a mask of the whole sequence": not split.fused_attention,
        "its attention has sinks": split.model_type in SINKS,
        LENGTH_NO_SP: any(layer_type.tokens != (1, 0) for layer_type in split.kinds),
        STREAM_NO_SP: split.streams,
        "attention drops entries at random, which ranks with parts of a sequence cannot do alike": attention_drops,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _no_sp(split: ModelSplit) -> str:
    """Return why no layer of a model can be sequence-parallel; empty if it is to be tried."""
    known = IMAGE_NO_SP if split.image else ENCODER_NO_SP if split.encoder else ""
    if split.encoder and split.encoder.encoded is None:
        known = IMAGE_NO_SP
    if any(layer_type.tokens != (1, 0) for layer_type in split.kinds):
        known = known or LENGTH_NO_SP
    by_tokens = all(each.shape[0] == 0 and not each.whole for each in split.streams)
    return known or ("" if by_tokens else STREAM_NO_SP)


_LENGTHS = (16, 24)
_KEY_VALUE_HEADS = "num_key_value_heads"
_KEEPS_RESULTS = "all that blocks return flows along"
"""Entry of the identity of a small model."""
_SAMPLES = 2
TOLERANCE = 1e-4
"""Largest difference of a logit or gradient, relative to the largest entry of its tensor."""


def split_model(model_type: str, config: Mapping[str, Any], folder: Path | None = None) -> ModelSplit:
    """Return the split of the model of a config.json, proved at small width. Raise `InvalidModelError` if it has none.

    The proof of a small model holds for every model of the same structure; it is kept in ``folder``.
    """
    with as_reference():
        return split_and_structure(model_type, config, folder)[0]


def split_and_structure(
    model_type: str, config: Mapping[str, Any], folder: Path | None = None
) -> tuple[ModelSplit, str, ModelSplit]:
    """Return the split of a model, and the identity and the proved split of the small model of its structure.

    If its class needs a package that is not installed, or its config does not give the size of its images or sound,
    split its text alone, if there is a causal class for that.
    """
    full = read_hub_config(model_type, config)
    try:
        return _split_and_structure(full, folder)
    except InvalidModelError as error:
        cause = error.__cause__
        if isinstance(cause, ImportError):
            lacking, *_ = first_line(cause).split(". ")  # the rest says how to install it
        elif isinstance(error, UnknownInputError):
            lacking, *_ = error.found.split(" (")
        else:
            raise
        if (text := text_of(full)) is None:
            raise
        split, structure, small = _split_and_structure(text, folder)
        return split.model_copy(update={"text_alone": lacking}), structure, small


def _split_and_structure(full: PreTrainedConfig, folder: Path | None) -> tuple[ModelSplit, str, ModelSplit]:
    found = find_split(full)
    try:
        structure, small = _proved(found, folder)
    except InvalidModelError:
        found = find_split(full, keeps_results=True)
        if all(each.result is None for each in found.split.streams):
            raise
        structure, small = _proved(found, folder, keeps_results=True)
    layer_types = tuple(
        layer_type.model_copy(
            update={
                "styles": proved.styles,
                "no_tp": proved.no_tp,
                "no_sp": proved.no_sp,
                "unread_plan": proved.unread_plan,
                "no_cp": no_cp(found.split, layer_type, attention_drops=found.attention_drops) or proved.no_cp,
                "tp_shares": proved.tp_shares,
                "tp_divides": divided_sizes(found.model, found.split, number, proved.styles),
            }
        )
        for number, (layer_type, proved) in enumerate(zip(found.split.kinds, small.kinds, strict=True))
    )
    options = {"sides_by_sample": small.sides_by_sample, "head_sees_shape": small.head_sees_shape}
    return found.split.model_copy(update={**options, "kinds": layer_types}), structure, small


def _proved(found: Found, folder: Path | None, *, keeps_results: bool = False) -> tuple[str, ModelSplit]:
    """Return the identity and the proved split of the first small model that splits like a model."""
    wrong: InvalidModelError | None = None
    for config, layers in _small_models(found):
        expected = _parts(found.split.with_layers(layers))
        trained = {"architectures": config.get("architectures") or [type(found.model).__name__]}
        structure = config_hash({**config, **trained, _KEEPS_RESULTS: keeps_results})
        known = kept_split(structure, folder)
        if known is not None and _parts(known) == expected:
            return structure, known
        try:
            small = find_split(read_hub_config(found.split.model_type, config), keeps_results=keeps_results)
        except InvalidModelError as error:
            wrong = wrong or error
            continue
        if _parts(small.split) == expected:
            proved = _prove(small)
            keep_split(structure, proved, folder)
            return structure, proved
        wrong = wrong or not_split(found.split, "at small width, where it is proved, it splits otherwise", _EXACT)
    assert wrong is not None, "there is a small model of every model"
    raise wrong


def _small_models(found: Found) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield configs of small models that may split like a model, each with the layers of the model that it has.

    The first has two blocks of each type, if the config says how; the next has all of them; in the last, everything
    that is a width of the full model is small.
    """
    given = full_config(found.config)
    plain, wide = (structure_of(without_dropout(small_config(given, widths=each))) for each in ((), widths_of(given)))
    chain = chain_from_config(given, name=found.split.model_type, split=found.split)
    few = chain.first_of_each_type(2)
    if found.split.read_by(found.split.between):  # the last state of a tower as well as others
        few = sorted({*few, found.split.between - 1})
    blocks = config_of_blocks(chain, few, is_compared=True)
    if blocks is not None:
        yield with_entries(plain, {key: value for key, value in blocks.items() if key != "sliding_window"}), few
    for config in (plain, wide):
        yield config, list(range(chain.num_layers))


def _prove(small: Found) -> ModelSplit:
    """Prove the split of a small model and return it, with how its layers divide."""
    proofs, options = _first_proof(small)
    small = replace(small, split=small.split.model_copy(update=options))
    divided = divided_types(small.model, small.split, small.keywords, proofs)
    one_head = _proof_of_one_head(small, training=proofs.model.training)
    # whether each rank may compute layers for its own tokens: all types together, or else each type by itself
    without_cp = {layer_type.name: no_cp(small.split, layer_type) for layer_type in small.split.kinds}
    untried = [name for name, reason in without_cp.items() if not reason]
    for name in untried if untried and proofs.by_tokens(untried) else ():
        reason = proofs.by_tokens([name])
        without_cp[name] = f"not proved: {reason}" if reason else ""

    def shares_heads(proved: SplitLayerType) -> bool:
        """Return whether ranks may share key-value heads if there are more ranks than heads."""
        is_divided = proved.role is LayerRole.BLOCK and bool(proved.styles)
        return is_divided and one_head is not None and not one_head({proved.name: proved.styles}, False)

    layer_types = tuple(
        proved.model_copy(
            update={"no_cp": without_cp[proved.name], "tp_shares": (KV_HEADS,) if shares_heads(proved) else ()}
        )
        for proved in divided
    )
    return small.split.model_copy(update={"kinds": layer_types})


def _proof_of_one_head(small: Found, *, training: bool) -> ThreadedProof | None:
    """Return the proof of a model that has one key-value head for all.

    None if the config gives no number of these, or if such a model does not split the same way.
    """
    config, split = small.config.to_dict(), small.split
    if not isinstance(config.get(_KEY_VALUE_HEADS), int):
        return None
    try:
        found = find_split(read_hub_config(split.model_type, {**config, _KEY_VALUE_HEADS: 1}))
    except InvalidModelError:
        return None
    options = {name: getattr(split, name) for name in ("sides_by_sample", "head_sees_shape")}
    proof = _proof(replace(found, split=found.split.model_copy(update=options)), training=training)[0]
    return proof if _parts(found.split) == _parts(split) else None


def _first_proof(found: Found) -> tuple[ThreadedProof, dict[str, bool]]:
    """Return the proof of the first exact way to run the pieces, and its options; cheap ways come first."""
    wrong = ""
    for training, sides_by_sample, head_sees_shape in product((False, True), repeat=3):
        options = {"sides_by_sample": sides_by_sample, "head_sees_shape": head_sees_shape}
        proof, found_wrong = _proof(replace(found, split=found.split.model_copy(update=options)), training=training)
        if proof is not None:
            return proof, options
        wrong = wrong or found_wrong
    raise not_split(found.split, f"its pieces together differ from the whole model: {wrong}", _EXACT)


def _parts(split: ModelSplit) -> tuple[object, ...]:
    """Return the properties that the splits of all models of one structure share."""
    streams = [(each.argument, each.readers, len(each.shape)) for each in split.streams]
    layer_types = [(each.name, each.role, each.attention, each.num_experts > 0) for each in split.kinds]
    call = split.call.model_copy(update={"inner": ()})
    encoder = split.encoder
    if encoder:  # without what its sizes set, and the numbers of blocks that nothing reads, or of what reads a state
        unread = f"{encoder.blocks}."
        between = (unread if path.startswith(unread) else re.sub(r"\.\d+\.", ".", path) for path in encoder.between)
        of_encoder = encoder.call.model_copy(update={"places": min(encoder.call.places, 1)})
        changes = {"shape": (), "between_calls": None, "call": of_encoder, "between": tuple(dict.fromkeys(between))}
        encoder = encoder.model_copy(update=changes)
    ends = split.embedding, split.blocks, split.head, split.layers
    return *ends, call, encoder, streams, layer_types, split.fused_attention


def _proof(found: Found, *, training: bool) -> tuple[ThreadedProof | None, str]:
    """Return the proof of the split in one process, where those of tensor parallelism start; else why it fails."""
    split = found.split
    chain = chain_from_config(full_config(found.config), name=split.model_type, split=split)
    whole = build_from_config(found.config, split.task, fused_attention=split.fused_attention).train(training)
    materialize_module(whole, whole, seed=1, device=torch.device("cpu"))
    whole.tie_weights()
    parts = copy.deepcopy(whole)
    prepare_model(parts, chain)
    trained = parameters_by_path(parts, split)
    lengths = _LENGTHS if split.multiple == 1 else (split.multiple, 2 * split.multiple)
    places = split.features.places if split.features else 0
    for seed, length in enumerate(places + length for length in lengths):
        ids, labels = _samples(chain, whole.config, length, seed)
        decoder_ids = decoder_inputs(labels, whole.config, chain.features) if split.encoder else None
        given = given_samples(read_by(split), ids)
        given |= {} if decoder_ids is None else {ids_beside(split.task): decoder_ids}
        given |= beside_features(whole, read_by(split), decoder_ids)
        try:
            made = whole(**given, **forward_options(whole)).logits
            expected = _results(whole, _as_in_parts(whole, parts, split), made, labels)
            expected |= {path: expected[path].view_as(each) for path, each in trained.items() if path in expected}
            pieces = run_pieces(parts, chain, range(chain.num_layers), ids, decoder_ids)
            logits = pieces.view_as(expected["logits"])
            wrong = difference(expected, _results(parts, trained, logits, labels), chain, TOLERANCE)
        except Exception as error:
            wrong = f"they raise {type(error).__name__} ({first_line(error)[:160]})"
        if wrong:
            return None, wrong
    few = chain.first_of_each_type(2)
    few = few if _is_chain(chain, few) else list(range(chain.num_layers))
    short = _results(parts, trained, run_pieces(parts, chain, few, ids, decoder_ids), labels)
    parts.zero_grad()
    for path in split.lists:
        blocks = parts.get_submodule(path)
        for layer in (each for each in split.block_layers(path) if each not in few):
            name = str(split.place_of(layer))
            empty = copy.copy(blocks.get_submodule(name))  # keeps its attributes; ranks copy nothing of it
            empty._modules, empty._parameters, empty._buffers = {}, {}, {}
            setattr(blocks, name, empty)
    options = {"ids": ids, "decoder_ids": decoder_ids, "labels": labels, "expected": short, "tolerance": TOLERANCE}
    return ThreadedProof(model=parts, chain=chain, numbers=few, **options), ""


def _samples(chain: ModelChain, config: PreTrainedConfig, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random samples, and the class of each place or image, without padding.

    Texts differ in their length, images by ``seed``.
    """
    if chain.image:
        return random_samples(chain, _SAMPLES, length, torch.Generator().manual_seed(seed))
    ids = torch.randint(chain.vocab_size, (_SAMPLES, length), generator=torch.Generator().manual_seed(0))
    ids[ids == getattr(config, "pad_token_id", None)] = plain_token(config)
    if chain.features:
        inputs = torch.randn((_SAMPLES, *chain.features.shape), generator=torch.Generator().manual_seed(seed))
        return inputs, fitting_tokens(ids, chain.features)
    return ids, ids.flip(1) if chain.split.encoder else ids


def _is_chain(chain: ModelChain, layers: Sequence[int]) -> bool:
    """Return whether the output of each of these layers can flow into the next of them."""
    if any(each.result is not None for each in chain.split.streams):
        return False
    alike = (chain.state_shapes(before, 1) == chain.state_shapes(after - 1, 1) for before, after in pairwise(layers))
    past = chain.split.past
    return all(alike) and all({*past(after - 1)} <= {*past(before)} for before, after in pairwise(layers))


def _as_in_parts(whole: PreTrainedModel, parts: PreTrainedModel, split: ModelSplit) -> dict[str, nn.Parameter]:
    """Return the parameters of a whole model, each once, by their paths in its parts."""
    mine = dict(whole.named_parameters(remove_duplicate=False))
    paths: dict[int, list[str]] = {}
    for path, parameter in parts.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, parameter in parameters_by_path(parts, split).items():
        for own in (mine[each] for each in paths[id(parameter)] if each in mine):
            found.setdefault(id(own), (path, own))
    return dict(found.values())


def _results(
    model: PreTrainedModel, parameters: Mapping[str, nn.Parameter], logits: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Return the logits, and the gradient of every parameter by its path."""
    model.zero_grad()
    loss_of(logits, labels).backward()
    return {"logits": logits.detach(), **gradients_of(parameters.items())}
