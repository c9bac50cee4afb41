"""A plan at small width: the same stages, schedule and strategies, for a model that any machine trains in a moment.

Of every run of equal layers with one strategy at most two are kept; widths, heads, experts, vocabulary and sequence are
as small as the plan's degrees allow, and so is a microbatch. Dropout and the noise of routers are off, since which
entries fall out differs between plans. What is kept: the type, what its blocks attend to, tied embeddings, stages and
their ranks, strategies with their order, schedule, precision. Models with routed experts compute in fp32: rounded to
bf16, a token may take another expert, which no comparison can tell from a fault. So do models of images with text: what
of a gradient comes back to the tower through all of the text is no larger than bf16 rounds.
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
"""Which takes torch, so that it is imported where it is needed."""
_LEAST_SEQUENCE = 16
_KEPT_OF_A_RUN = 2
TOLERANCES = {"fp32": (1e-5, 1e-4), "fp16": (1e-3, 5e-2), "bf16": (5e-3, 3e-1)}
"""How near the numbers of a plan must come to those of one process to count as the same: by precision, the largest
relative difference of a loss, and the largest difference of an entry of a gradient as a share of the largest entry of
its tensor. In bf16 an entry may be off by rounding, and a token whose experts are nearly equal may take another one: up
to 0.24 was seen over the families (2 steps, 4 processes)."""
_DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), ("dropout_rate",)),
    "switch_transformers": ("dropout_rate", "router_jitter_noise"),
    "swin": ("drop_path_rate",),
}
"""Keys that are not zero where a config does not give them."""


def shrunk_plan(plan: Plan) -> Plan:
    """The plan at small width; raises `InvalidModelError` or `InvalidPlanError` where it cannot be made smaller."""
    chain = plan.chain()
    if chain.split.module:
        raise InvalidModelError(
            field="model",
            found=f"a plan for {chain.split.module}, a module of your own",
            expected="a model whose config gives it at small width",
            hint="compare your own training loop with one process (docs/how-to/your-own-model.md shows how)",
        )
    if chain.features is not None:  # each part of which has a config, whose defaults transformers knows
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
    """The model at small width with the kept layers; ``blocks`` is what its config says of them."""
    assert isinstance(chain.split, ModelSplit), "of the user's own module there is no plan at small width"
    blocks_of = (each for each in chain.layer_types if each.role is LayerRole.BLOCK)
    heads = dict(size for each in blocks_of for size in each.tp_divides).get(KV_HEADS)
    given = ({} if heads is None or "num_attention_heads" not in chain.config else {"num_key_value_heads": heads}) | {
        **chain.config
    }
    config = without_dropout(with_entries(small_config(given, degree=degree, expert_degree=expert_degree), blocks))
    config |= dict.fromkeys(_DROPOUT.get(chain.family.model_type, ()), 0.0)
    if chain.features is not None:  # whose shape follows from the config alone
        return chain_from_config(config, name=chain.name)
    split = chain.split.with_layers(kept).resized(given, config, degree * expert_degree)
    return chain_from_config(config, name=chain.name, split=split)


_NUMBERS_OF_BLOCKS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DENSE_FIRST, _DENSE = "first_k_dense_replace", "mlp_only_layers"
_SPARSE_STEP = "decoder_sparse_step"


def config_of_blocks(chain: ModelChain, kept: list[int], *, is_compared: bool = False) -> dict[str, Any] | None:
    """What the config says of its blocks where only some are kept; None where that is not known.

    Which of them have experts and what they attend to is known where the config says so in one of the usual ways.
    Which of them read what flows beside the hidden state no config says, so that the split of what comes of it has to
    be compared with what was expected (``is_compared``).
    """
    split = chain.split
    assert isinstance(split, ModelSplit), "of the user's own module there is no plan at small width"
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
    """The depths of stages of which the kept layers are the first blocks, each stage but the last with what ends it."""
    depths, found, first = chain.config.get("depths"), [], 1
    if not isinstance(depths, list) or sum(depths) + len(depths) - 1 != chain.num_layers - 2:
        return None
    for depth in depths:
        blocks = range(first, first + depth)
        own = [layer for layer in kept if layer in blocks]
        is_whole = first + depth in kept  # the head, behind the last
        if not own or not is_whole or [chain.layers[n] for n in own] != [chain.layers[n] for n in blocks[: len(own)]]:
            return None
        found.append(len(own))
        first += depth + 1
    return {"depths": found}


_NUMBERS_OF_STACKS = (("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers"))
"""Of an encoder's and its decoder's blocks; where the latter is not given there are as many as of the former."""


def _config_of_stacks(chain: ModelChain, kept: list[int]) -> dict[str, Any] | None:
    """What the config says of the blocks of an encoder and its decoder; None where each stack is not of one type."""
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
"""Lists of the blocks of a tower that attend to all of an image, or whose states are read beside the last one."""


def _config_of_parts(chain: ModelChain, kept: list[int], stacks: Sequence[range]) -> dict[str, Any] | None:
    """What the configs of a tower and of the text say of their blocks; None where they do not say their types.

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
    """For each part of the pipeline the layers that are kept: of equal neighbours the first two."""
    for part in plan.parts:
        layers = part.layers
        runs = groupby(layers, key=lambda layer: (chain.layers[layer], plan.strategies[layer]))
        yield [layer for _, run in runs for layer in list(run)[:_KEPT_OF_A_RUN]]
