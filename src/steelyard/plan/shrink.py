"""A plan at small width: the same stages, schedule and strategies, for a model that any machine trains in a moment.

Each run of equal layers with one strategy keeps at most two; widths, heads, experts, vocabulary, sequence and
microbatch are as small as the plan's degrees allow. Dropout and router noise are off, because the dropped entries
differ between plans. Kept are the model type, the attention of its blocks, tied embeddings, stages and their ranks,
strategies with their order, schedule and precision. Models with routed experts compute in fp32: rounding to bf16 may
send a token to another expert, which no comparison can tell from a fault. Models of images with text do too: the
gradient that reaches the tower through all of the text is no larger than a bf16 rounding error.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from typing import Any

from steelyard.errors import InvalidModelError
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.family import KV_HEADS, Task
from steelyard.model.read import chain_from_config
from steelyard.model.small import multiple, small_config, with_entries, without_dropout
from steelyard.model.split import ModelSplit
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of

_FILLS = "steelyard.modules.build"
"""Module that imports torch, so it is imported only where it is needed."""
_LEAST_SEQUENCE = 16
_KEPT_OF_A_RUN = 2
TOLERANCES = {"fp32": (1e-5, 1e-4), "fp16": (1e-3, 5e-2), "bf16": (5e-3, 3e-1)}
"""Tolerances within which the results of a plan equal those of one process: by precision, the largest relative
difference of a loss, and the largest difference of a gradient entry relative to the largest entry of its tensor. In
bf16 an entry may be off by rounding, and a token with nearly equal experts may take another one: up to 0.24 was seen
over the families (2 steps, 4 processes)."""
_DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), ("dropout_rate",)),
    "switch_transformers": ("dropout_rate", "router_jitter_noise"),
    "swin": ("drop_path_rate",),
}
"""Keys whose default in a config is not zero."""


def shrunk_plan(plan: Plan) -> Plan:
    """Return the plan at small width. Raise `InvalidModelError` or `InvalidPlanError` if it cannot be made smaller."""
    chain = plan.chain()
    if chain.split.module:
        raise InvalidModelError(
            field="model",
            found=f"a plan for {chain.split.module}, your own module",
            expected="a model with a config, from which it can be built at small width",
            hint="compare your own training loop with one process (docs/how-to/your-own-model.md shows how)",
        )
    if chain.features is not None:  # each part has a config, whose defaults transformers knows
        build = import_module(_FILLS)
        chain = replace(chain, config=build.full_config(build.hub_config(chain)))
    degree = math.lcm(*(each.head_degree for each in plan.strategies))
    expert_degree = math.lcm(*(each.expert_degree for each in plan.strategies))
    kept = list(_kept_layers(plan, chain))
    blocks = config_of_blocks(chain, [layer for part in kept for layer in part])
    if blocks is None:
        kept, blocks = [list(part.layers) for part in plan.parts], {}
    small = _small_chain(chain, blocks, [layer for part in kept for layer in part], degree, expert_degree)
    config = dict(small.config)
    first, parts = 0, []
    for part, layers in zip(plan.parts, kept, strict=True):
        strategies = tuple(plan.strategies[layer] for layer in layers)
        parts.append(StagePart(ranks=part.ranks, runs=fold_runs(first, strategies)))
        first += len(layers)
    microbatches = min(plan.num_microbatches, 2 * len(plan.parts))
    if plan.num_microbatches >= 2 * plan.num_stages and plan.num_chunks > 1:
        microbatches = 2 * plan.num_stages
    degree = math.lcm(*(2 * each.token_degree * each.tensor_degree for each in plan.strategies))
    degree = math.lcm(degree, small.split.multiple)
    has_experts = any(layer_type.num_experts for layer_type in chain.layer_types)
    frozen = chain.freeze and chain.freeze.of_layers([layer for part in kept for layer in part])
    least = _LEAST_SEQUENCE + (small.features.places if small.features else 0)
    return Plan(
        model=PlanModel(name=chain.name, config=config, split=small.split, frozen=frozen),
        cluster=plan.cluster,
        hardware=plan.hardware,
        seq_len=multiple(least, degree) if chain.family.task.reads_text else small.max_seq_len,
        global_batch=microbatches * math.lcm(*(strategy.sample_degree for strategy in plan.strategies)),
        num_microbatches=microbatches,
        precision="fp32" if chain.family.task is Task.IMAGE_TEXT or has_experts else plan.precision,
        schedule=plan.schedule,
        levers={lever.name: str(lever.without_chance) for lever in plan.chosen_levers},
        stages=stages_of(parts),
    )


def _small_chain(
    chain: ModelChain, blocks: Mapping[str, Any], kept: list[int], degree: int, expert_degree: int
) -> ModelChain:
    """Return the model at small width with the kept layers; ``blocks`` are the config entries of its blocks."""
    assert isinstance(chain.split, ModelSplit), "a user's own module has no plan at small width"
    blocks_of = (each for each in chain.layer_types if each.role is LayerRole.BLOCK)
    heads = dict(size for each in blocks_of for size in each.tp_divides).get(KV_HEADS)
    given = ({} if heads is None or "num_attention_heads" not in chain.config else {"num_key_value_heads": heads}) | {
        **chain.config
    }
    config = without_dropout(with_entries(small_config(given, degree=degree, expert_degree=expert_degree), blocks))
    config |= dict.fromkeys(_DROPOUT.get(chain.family.model_type, ()), 0.0)
    if chain.features is not None:  # the shape follows from the config alone
        return chain_from_config(config, name=chain.name)
    split = chain.split.with_layers(kept).resized(given, config, degree * expert_degree)
    return chain_from_config(config, name=chain.name, split=split)


_NUMBERS_OF_BLOCKS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DENSE_FIRST, _DENSE = "first_k_dense_replace", "mlp_only_layers"
_SPARSE_STEP = "decoder_sparse_step"


def config_of_blocks(chain: ModelChain, kept: list[int], *, is_compared: bool = False) -> dict[str, Any] | None:
    """Return the config entries of the blocks if only some are kept; None if they are not known.

    Experts and attention of each block are known if the config gives them in one of the usual ways. No config says
    which blocks read cross-layer inputs, so the split of the new config must be compared with the expected one
    (``is_compared``).
    """
    split = chain.split
    assert isinstance(split, ModelSplit), "a user's own module has no plan at small width"
    if split.encoder or len({layer_type.shape for layer_type in split.kinds}) > 1:
        return (_config_of_stacks if split.encoder else _depths)(chain, kept)
    places = [layer for layer in kept if chain.type_of(layer).role is LayerRole.BLOCK]
    ends = {0, chain.num_layers - 1}
    number = next((key for key in _NUMBERS_OF_BLOCKS if chain.config.get(key) == chain.num_layers - 2), None)
    shares_blocks = any(layer not in ends for copies in split.shared for layer, _ in copies)
    if number is None or (split.streams and not is_compared) or split.called or shares_blocks:
        return None
    found: dict[str, Any] = {number: len(places)}
    attention = [chain.type_of(layer).attention for layer in places]
    dense = [not chain.type_of(layer).num_experts for layer in places]
    layer_types = [chain.layer_types[number] for number in {*chain.layers[1:-1]}]
    if len({(each.attention, each.num_experts) for each in layer_types}) < len(layer_types):
        return None
    if len({each.attention for each in layer_types}) > 1 or chain.config.get("layer_types"):
        found["layer_types"] = attention
    if "sliding_attention" in attention:
        found["sliding_window"] = _LEAST_SEQUENCE // 2
    if len({each.num_experts for each in layer_types}) > 1:
        if _DENSE in chain.config or _SPARSE_STEP in chain.config:
            found |= {_DENSE: [place for place, is_dense in enumerate(dense) if is_dense], _SPARSE_STEP: 1}
        elif _DENSE_FIRST in chain.config and dense == sorted(dense, reverse=True):
            found[_DENSE_FIRST] = sum(dense)
        else:
            return None
    return found


def _depths(chain: ModelChain, kept: list[int]) -> dict[str, Any] | None:
    """Return the config entry for the depths of stages that keep their first blocks; None if other layers are kept.

    Each stage must keep the layer that ends it, the last stage the head.
    """
    depths, found, first = chain.config.get("depths"), [], 1
    if not isinstance(depths, list) or sum(depths) + len(depths) - 1 != chain.num_layers - 2:
        return None
    for depth in depths:
        blocks = range(first, first + depth)
        own = [layer for layer in kept if layer in blocks]
        is_whole = first + depth in kept  # the head, after the last stage
        if not own or not is_whole or [chain.layers[n] for n in own] != [chain.layers[n] for n in blocks[: len(own)]]:
            return None
        found.append(len(own))
        first += depth + 1
    return {"depths": found}


_NUMBERS_OF_STACKS = (("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers"))
"""Keys for the number of encoder and decoder blocks; without the latter there are as many as the former."""


def _config_of_stacks(chain: ModelChain, kept: list[int]) -> dict[str, Any] | None:
    """Return the config entries of an encoder's and its decoder's blocks; None if a stack has several layer types."""
    split = chain.split
    assert isinstance(split, ModelSplit)
    stacks = [range(1, split.between), range(split.between + 1, chain.num_layers - 1)]
    if chain.family.task is Task.IMAGE_TEXT:
        return _config_of_parts(chain, kept, stacks)
    one_type = all(len({chain.layers[layer] for layer in stack}) == 1 for stack in stacks)
    given = chain.config
    counts = {pair: (given.get(pair[0]), given.get(pair[1]) or given.get(pair[0])) for pair in _NUMBERS_OF_STACKS}
    keys = next((pair for pair, found in counts.items() if found == tuple(map(len, stacks))), None)
    if keys is None or not one_type or split.streams:
        return None
    numbers = [len([layer for layer in kept if layer in stack]) for stack in stacks]
    also = {key: numbers[0] for key in _NUMBERS_OF_BLOCKS if given.get(key) == len(stacks[0])}
    return also | dict(zip(keys, numbers, strict=True))


_PARTS, _DEPTH, _LISTED = ("vision_config", "text_config"), "depth", "layer_types"
_NUMBERED = ("fullatt_block_indexes", "deepstack_visual_indexes")
"""Keys that list the tower blocks that attend to a whole image, or whose states are read besides the last one."""


def _config_of_parts(chain: ModelChain, kept: list[int], stacks: Sequence[range]) -> dict[str, Any] | None:
    """Return the config entries of the blocks of a tower and of the text; None if their types are not known.

    Blocks of the tower that nothing reads are kept.
    """
    split = chain.split
    assert isinstance(split, ModelSplit)
    assert split.encoder is not None
    unread = sum(path.startswith(f"{split.encoder.blocks}.") for path in split.encoder.between)
    read = chain.config.get("vision_feature_layer")
    found: dict[str, Any] = {}
    for name, stack, more in zip(_PARTS, stacks, (unread, 0), strict=True):
        part, number = chain.config.get(name) or {}, len(stack) + more
        places = [*(layer - stack.start for layer in kept if layer in stack), *range(len(stack), number)]
        key = next((key for key in (*_NUMBERS_OF_BLOCKS, _DEPTH) if part.get(key) == number), None)
        by_block = {_LISTED: [part[_LISTED][place] for place in places]} if part.get(_LISTED) else {}
        numbered = [key for key in _NUMBERED if part.get(key)]
        by_block |= {key: [n for n, place in enumerate(places) if place in part[key]] for key in numbered}
        layer_types = {chain.layers[layer] for layer in stack if not split.read_by(layer)}
        if key is None or not (by_block or len(layer_types) == 1):
            return None
        found[name] = {key: len(places), **by_block}
    states, readers = (
        [layer for layer in kept if layer in stack and of(layer)]
        for stack, of in zip(stacks, (split.made_by, split.read_by), strict=True)
    )
    if len(states) != len(readers):  # each of the first blocks of text reads one
        return None
    return None if isinstance(read, list) or (read or 0) > 0 else found


def _kept_layers(plan: Plan, chain: ModelChain) -> Iterator[list[int]]:
    """Yield the kept layers of each part of the pipeline: of equal neighbours the first two."""
    for part in plan.parts:
        layers = part.layers
        runs = groupby(layers, key=lambda layer: (chain.layers[layer], plan.strategies[layer]))
        yield [layer for _, run in runs for layer in list(run)[:_KEPT_OF_A_RUN]]
