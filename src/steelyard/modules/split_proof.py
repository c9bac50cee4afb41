"""Proves that a split is exact: the pieces of a small model, run one after another, give what the whole model gives.

Both have the same random weights in fp32. Compared are the logits and the gradient of every parameter, on two inputs of
unlike length, so that control flow that depends on values or lengths shows.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.model.small import small_config
from steelyard.model.split import ModelSplit
from steelyard.modules.build import build_from_config, materialize_module, prepare_model, read_hub_config
from steelyard.modules.layers import LayerContext, build_layer, side_inputs_of
from steelyard.modules.splitting import find_split
from steelyard.plan.strategy import Remat

_LENGTHS = (16, 24)
_SAMPLES = 2
TOLERANCE = 1e-4
"""Largest difference of a logit or gradient, as a share of the largest entry of its tensor."""


def split_model(model_type: str, config: Mapping[str, Any]) -> ModelSplit:
    """How the model of a config.json splits, proved at small width; raises `InvalidModelError` where it does not."""
    full = read_hub_config(model_type, config)
    small = read_hub_config(model_type, small_config({**full.to_dict(), **config}))
    split, at_small = find_split(full), find_split(small)
    if (split.embedding, split.blocks, split.head, split.layers) != (
        at_small.embedding,
        at_small.blocks,
        at_small.head,
        at_small.layers,
    ):
        raise _not_exact(split, "at small width, where it is proved, it splits otherwise")
    try:
        prove_split(small, at_small)
    except InvalidModelError:
        at_small = at_small.model_copy(update={"head_sees_shape": True})
        prove_split(small, at_small)
    return split.model_copy(update={"head_sees_shape": at_small.head_sees_shape})


def prove_split(config: PreTrainedConfig, split: ModelSplit) -> float:
    """The largest difference found; raises `InvalidModelError` where it is above `TOLERANCE` or a piece fails."""
    chain = chain_from_config(config.to_dict(), name=split.model_type, split=split)
    whole = _small_model(config, split)
    parts = copy.deepcopy(whole)
    prepare_model(parts, chain)
    worst = 0.0
    for length in _LENGTHS:
        ids = torch.randint(min(256, split.vocab_size), (_SAMPLES, length), generator=torch.Generator().manual_seed(0))
        expected = list(_results(whole, whole(input_ids=ids).logits, ids))
        try:
            logits = _run_pieces(parts, chain, ids).view_as(expected[0][1])
        except Exception as error:
            raise _not_exact(split, f"its pieces fail ({type(error).__name__}: {error})") from error
        worst = max(worst, *_differences(expected, list(_results(parts, logits, ids)), chain))
    if worst > TOLERANCE:
        raise _not_exact(split, f"its pieces differ from the whole by {worst:.1e} of the largest entry")
    return worst


def _small_model(config: PreTrainedConfig, split: ModelSplit) -> PreTrainedModel:
    model = build_from_config(config, split.task, fused_attention=split.fused_attention).eval()
    materialize_module(model, model, seed=1, device=torch.device("cpu"))
    model.tie_weights()
    return model


def _run_pieces(model: PreTrainedModel, chain: ModelChain, ids: Tensor) -> Tensor:
    layers = [build_layer(model, chain, number, Remat.NONE) for number in range(chain.num_layers)]
    side = side_inputs_of(layers, model, chain, torch.device("cpu"))(ids.shape[1], torch.float32, ids.device)
    context = LayerContext(side=side, config=model.config)
    flow: Tensor = ids
    for layer in layers:
        flow = layer.run_by_family(layer, flow, context)
    return flow


def _results(model: nn.Module, logits: Tensor, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The logits, and the gradient of every parameter by its path."""
    model.zero_grad()
    functional.cross_entropy(logits.flatten(0, -2).float(), ids.flatten()).backward()
    yield "logits", logits.detach()
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield path, parameter.grad.clone()


def _differences(
    expected: list[tuple[str, Tensor]], found: list[tuple[str, Tensor]], chain: ModelChain
) -> Iterator[float]:
    sums = dict(found)
    for copies in chain.split.shared if chain.split else ():
        (_, first), *others = copies
        sums[first] = sum((sums.pop(path) for _, path in others), start=sums[first])
    yield 0.0
    for path, tensor in expected:
        scale = tensor.abs().max().clamp(min=1e-12)
        yield float((tensor - sums[path]).abs().max() / scale) if path in sums else float("inf")


def _not_exact(split: ModelSplit, found: str) -> InvalidModelError:
    return InvalidModelError(
        field="model_type",
        found=f"{split.model_type}: {found}",
        expected="pieces that give the logits and gradients of the whole model",
        hint="docs/adding-a-model.md says what splits by itself and how to write down what does not",
    )
