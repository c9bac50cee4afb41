"""Proves that a split is exact: the pieces of a small model, run one after another, give what the whole model gives.

Both have the same random weights in fp32. Compared are the logits and the gradient of every parameter, on two inputs of
unlike length, so that control flow that depends on values or lengths shows. How layers divide under tensor parallelism
is proved likewise (`steelyard.modules.split_tp`).
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.family import KV_HEADS
from steelyard.model.read import chain_from_config
from steelyard.model.small import small_config, widths_of
from steelyard.model.split import ModelSplit
from steelyard.modules.batch import decoder_inputs, random_samples
from steelyard.modules.build import build_from_config, materialize_module, prepare_model, read_hub_config
from steelyard.modules.holes import forward_options, reads
from steelyard.modules.known_values import plain_token
from steelyard.modules.layers import Flow, tensors_of
from steelyard.modules.split_tp import (
    ThreadedProof,
    difference,
    divided_kinds,
    divided_sizes,
    no_context_parallelism,
    parameters_by_path,
    pieces_of,
    shares_heads,
)
from steelyard.modules.splitting import Found, find_split

_LENGTHS = (16, 24)
_KEY_VALUE_HEADS = "num_key_value_heads"
_SAMPLES = 2
TOLERANCE = 1e-4
"""Largest difference of a logit or gradient, as a share of the largest entry of its tensor."""


def split_model(model_type: str, config: Mapping[str, Any]) -> ModelSplit:
    """How the model of a config.json splits, proved at small width; raises `InvalidModelError` where it does not."""
    full = read_hub_config(model_type, config)
    found, small = find_split(full), _small(model_type, full)
    try:
        return _proved(found, small)
    except InvalidModelError:
        handing_on = find_split(full, keeps_results=True)
        if all(each.result is None for each in handing_on.split.streams):
            raise
        return _proved(handing_on, find_split(small.config, keeps_results=True))


def _small(model_type: str, full: PreTrainedConfig) -> Found:
    """The split of a small model; where its sizes do not go together, whatever is a width of the full is made small."""
    given = full.to_dict()
    plain, wide = (without_dropout(small_config(given, widths=each)) for each in ((), widths_of(given)))
    try:
        return find_split(read_hub_config(model_type, plain))
    except InvalidModelError:
        with suppress(InvalidModelError):
            return find_split(read_hub_config(model_type, wide))
        raise


def _proved(found: Found, small: Found) -> ModelSplit:
    """The split of a model, of which that of a small one is proved."""
    model_type, small_width = found.config.model_type, small.config.to_dict()
    if _parts(found.split) != _parts(small.split):
        raise _not_exact(found.split, "at small width, where it is proved, it splits otherwise")
    proofs, options = _first_proof(small)
    small = replace(small, split=small.split.model_copy(update=options))
    divided = divided_kinds(small.model, small.split, small.keywords, proofs)
    one_head = _proof_of_one_head(model_type, small_width, small.split, training=proofs.model.training)
    no_cp = no_context_parallelism(found.model, found.split, proofs)
    kinds = tuple(
        kind.model_copy(
            update={
                "styles": proved.styles,
                "no_tp": proved.no_tp,
                "no_sp": proved.no_sp,
                "no_cp": no_cp[kind.name],
                "tp_shares": (KV_HEADS,) if one_head and shares_heads(proved, one_head) else (),
                "tp_divides": divided_sizes(found.model, found.split, number, proved.styles),
            }
        )
        for number, (kind, proved) in enumerate(zip(found.split.kinds, divided, strict=True))
    )
    return found.split.model_copy(update={**options, "kinds": kinds})


def _proof_of_one_head(
    model_type: str, config: Mapping[str, Any], split: ModelSplit, *, training: bool
) -> ThreadedProof | None:
    """The proof of a model that has one key-value head for all; None for one whose config gives no number of these."""
    if not isinstance(config.get(_KEY_VALUE_HEADS), int):
        return None
    try:
        found = find_split(read_hub_config(model_type, {**config, _KEY_VALUE_HEADS: 1}))
    except InvalidModelError:
        return None
    options = {name: getattr(split, name) for name in ("sides_by_sample", "head_sees_shape")}
    proof = _proof(replace(found, split=found.split.model_copy(update=options)), training=training)[0]
    return proof if _parts(found.split) == _parts(split) else None


def _first_proof(found: Found) -> tuple[ThreadedProof, dict[str, bool]]:
    """The proof of the first way to run the pieces that is exact, and what it asks for; cheap ways come first."""
    wrong = ""
    for training, sides_by_sample, head_sees_shape in product((False, True), repeat=3):
        options = {"sides_by_sample": sides_by_sample, "head_sees_shape": head_sees_shape}
        proof, found_wrong = _proof(replace(found, split=found.split.model_copy(update=options)), training=training)
        if proof is not None:
            return proof, options
        wrong = wrong or found_wrong
    raise _not_exact(found.split, f"its pieces are not the whole: {wrong}")


def without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with nothing dropped, in its parts too."""
    found = {key: without_dropout(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    return found | {key: 0.0 for key, value in config.items() if "drop" in str(key) and isinstance(value, float)}


def _parts(split: ModelSplit) -> tuple[object, ...]:
    streams = [(each.argument, each.readers, len(each.shape)) for each in split.streams]
    call = split.call.model_copy(update={"inner": ()})
    return split.embedding, split.blocks, split.head, split.layers, call, split.encoder, streams


def _proof(found: Found, *, training: bool) -> tuple[ThreadedProof | None, str]:
    """The proof of the split by one process, which is where those of tensor parallelism begin; else why it fails."""
    split = found.split
    chain = chain_from_config(
        json.loads(found.config.to_json_string(use_diff=False)), name=split.model_type, split=split
    )
    whole = build_from_config(found.config, split.task, fused_attention=split.fused_attention).train(training)
    materialize_module(whole, whole, seed=1, device=torch.device("cpu"))
    whole.tie_weights()
    parts = copy.deepcopy(whole)
    prepare_model(parts, chain)
    for seed, length in enumerate(_LENGTHS):
        ids, labels = _samples(chain, whole.config, length, seed)
        decoder_ids = decoder_inputs(labels, whole.config) if split.encoder else None
        with_decoder = {} if decoder_ids is None else {"decoder_input_ids": decoder_ids}
        try:
            outputs = whole(**{reads(split.image): ids}, **with_decoder, **forward_options(whole))
            expected = _results(whole, split, outputs.logits, labels)
            pieces = _run_pieces(parts, chain, ids, decoder_ids, range(chain.num_layers))
            logits = pieces.view_as(expected["logits"])
            wrong = difference(expected, _results(parts, split, logits, labels), chain, TOLERANCE)
        except Exception as error:
            wrong = f"they raise {type(error).__name__} ({(str(error).splitlines() or [''])[0][:160]})"
        if wrong:
            return None, wrong
    few = sorted({place for kind in range(len(chain.kinds)) for place in _first_two(chain, kind)})
    few = few if _is_chain(chain, few) else list(range(chain.num_layers))
    short = _results(parts, split, _run_pieces(parts, chain, ids, decoder_ids, few), labels)
    parts.zero_grad()
    for path in split.lists:
        blocks = parts.get_submodule(path)
        for place, (name, block) in zip(split.block_layers(path), list(blocks.named_children()), strict=True):
            if place not in few:
                setattr(blocks, name, _without_parts(block))  # ranks copy the model
    options = {"ids": ids, "decoder_ids": decoder_ids, "labels": labels, "expected": short, "tolerance": TOLERANCE}
    return ThreadedProof(model=parts, chain=chain, numbers=few, **options), ""


def _samples(chain: ModelChain, config: PreTrainedConfig, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random samples, and the class of each place or image; texts differ in their length, images by ``seed``.

    Of padding there is none.
    """
    if chain.layout.image:
        return random_samples(chain, _SAMPLES, length, torch.Generator().manual_seed(seed))
    ids = torch.randint(chain.vocab_size, (_SAMPLES, length), generator=torch.Generator().manual_seed(0))
    ids[ids == getattr(config, "pad_token_id", None)] = plain_token(config)
    return ids, ids.flip(1) if chain.split.encoder else ids


def _is_chain(chain: ModelChain, layers: Sequence[int]) -> bool:
    """Whether what flows out of each of these layers can flow into the next of them."""
    if any(each.result is not None for each in chain.split.streams):
        return False
    return all(chain.state_shapes(before, 1) == chain.state_shapes(after - 1, 1) for before, after in pairwise(layers))


def _without_parts(module: nn.Module) -> nn.Module:
    """A module that tells what it is, as others may ask, and holds nothing."""
    found = copy.copy(module)
    found._modules, found._parameters, found._buffers = {}, {}, {}
    return found


def _first_two(chain: ModelChain, kind: int) -> list[int]:
    return [place for place, each in enumerate(chain.layers) if each == kind][:2]


def _run_pieces(
    model: PreTrainedModel, chain: ModelChain, ids: Tensor, decoder_ids: Tensor | None, numbers: Iterable[int]
) -> Tensor:
    layers, context = pieces_of(model, chain, numbers, ids, decoder_ids)
    flow: Flow = ids
    for layer in layers:
        flow = layer.within(flow, context, partial(layer.run_by_family, layer))
    (logits,) = tensors_of(flow)
    return logits


def _results(model: PreTrainedModel, split: ModelSplit, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The logits, and the gradient of every parameter by its path."""
    model.zero_grad()
    functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()).backward()
    trained = parameters_by_path(model, split).items()
    gradients = {path: each.grad.clone() for path, each in trained if each.grad is not None}
    return {"logits": logits.detach(), **gradients}


def _not_exact(split: ModelSplit, found: str) -> InvalidModelError:
    return InvalidModelError(
        field="model_type",
        found=f"{split.model_type}: {found}",
        expected="pieces that give the logits and gradients of the whole model",
        hint="docs/adding-a-model.md says what splits by itself and how to write down what does not",
    )
