"""How the layers of a split model divide under tensor parallelism: supposed, then proved on two ranks.

For blocks two suppositions are tried: the model's own plan (``base_model_tp_plan``), then the structure: of the
matrices of one part, the one that is used last is divided by its inputs and the others by their outputs. Either way a
region (`steelyard.modules.styles`) begins at the module that holds matrices divided by outputs and ends at one divided
by inputs; what nothing is known of is whole in it on every rank, and outside of it runs on a part of the sequence under
sequence parallelism. Modules divide the head counts, and perhaps the widths, that they keep. Where the whole does not
hold, a block is tried without one of its parts. Embedding and head are supposed to be a table and a projection divided
by tokens.

A supposition counts only if two ranks give the logits and the gradients of every parameter of one process, at small
width in fp32. The ranks are threads of this process. Sequence parallelism is proved apart.
"""

import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from steelyard.model.chain import ModelChain
from steelyard.model.family import KV_HEADS, NO_CP, LayerRole, Task
from steelyard.model.read import chain_from_config
from steelyard.model.split import ModelSplit, SplitKind
from steelyard.modules.build import table_of_tokens
from steelyard.modules.called import POSITIONS
from steelyard.modules.experts import routed_experts
from steelyard.modules.head_tail import in_order, natural_order, rank_order
from steelyard.modules.kinds.cp import apply_context_parallel, own_context
from steelyard.modules.kinds.tp import apply_tensor_parallel
from steelyard.modules.layers import (
    ChainLayer,
    Flow,
    LayerContext,
    as_flow,
    build_layer,
    side_inputs_of,
    tensors_of,
)
from steelyard.plan.strategy import Remat

RANKS = 2
_SMALL, _SMALL_OF_ONE = 1e-3, 1e-2
"""Of the largest gradient: what a gradient of less is compared with, of several entries or of one."""
_PATIENCE_S = 120.0
"""After which a rank is taken to stand still, as one whose partner has failed does."""
_HEAD_COUNTS = (
    *("num_heads", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    *("kv_heads", "num_query_heads"),
)
_WIDTHS = ("embed_dim", "all_head_size", "hidden_size", "inner_dim", "split_size", "d_model")
"""Attributes that count heads, and those that hold the width of all heads: what modules reshape by."""

IMAGE_NO_SP = "the places of an image are not divided"
ENCODER_NO_SP = "two sequences flow along the decoder"
LENGTH_NO_SP = "its states are of another length than the samples"
PAIRS_NO_TP = "it compares images with texts, whose features are small"
STREAM_NO_SP = "what its blocks share is not divided by tokens"
POSITIONS_NO_SP = "learned positions are added to whole sequences"
Styles = Mapping[str, str]


def divided_kinds(
    model: PreTrainedModel,
    split: ModelSplit,
    keywords: Mapping[str, str | None],
    prove: Callable[[Mapping[str, Styles], bool], str],
) -> tuple[SplitKind, ...]:
    """The kinds with their proved styles, or the reason why there are none.

    ``keywords`` says by what name modules are given their tensor, by their path in the model; ``prove`` returns why
    styles by kind, with or without sequence parallelism, do not hold, an empty text where they do.
    """
    found: dict[str, SplitKind] = {}
    for number, kind in enumerate(split.kinds):
        layer = split.layers.index(number)
        reasons: list[str] = []
        for styles in _suppositions(model, split, kind, layer, keywords):
            reason = prove({kind.name: styles}, False)
            if not reason:
                known = _no_sp(split, kind)
                no_sp = known or prove({kind.name: styles}, True)
                found[kind.name] = kind.model_copy(
                    update={
                        "styles": dict(styles),
                        "no_tp": "",
                        "no_sp": known or (f"not proved: {no_sp}" if no_sp else ""),
                    }
                )
                break
            reasons.append(reason)
        else:
            is_of_pairs = split.task is Task.CONTRASTIVE and kind.role is LayerRole.HEAD
            unknown = PAIRS_NO_TP if is_of_pairs else "no way is known to divide its modules"
            why = "; ".join(dict.fromkeys(reasons)) or unknown
            found[kind.name] = kind.model_copy(update={"no_tp": why})
    return tuple(found[kind.name] for kind in split.kinds)


def shares_heads(kind: SplitKind, one_head: "ThreadedProof") -> bool:
    """Whether ranks of which there are more than key-value heads may have the same; ``one_head`` is of such a model."""
    return kind.role is LayerRole.BLOCK and bool(kind.styles) and not one_head({kind.name: kind.styles}, False)


def no_context_parallelism(split: ModelSplit, proof: "ThreadedProof") -> dict[str, str]:
    """For every kind why ranks may not compute its layers for their own tokens each; empty where that is proved."""
    known = {kind.name: no_cp(split, kind) for kind in split.kinds}
    tried = [name for name, reason in known.items() if not reason]
    together = proof.by_tokens(tried) if tried else ""
    reasons = {name: proof.by_tokens([name]) for name in tried if together}
    return known | {name: f"not proved: {reason}" for name, reason in reasons.items() if reason}


def no_cp(split: ModelSplit, kind: SplitKind, *, attention_drops: bool = False) -> str:
    """Why no layer of a kind can be under cp; empty where that is to be tried."""
    if split.task is not Task.CAUSAL_LM:
        return NO_CP
    if others := _other_attention(split, kind):
        return f"{NO_CP}, and its blocks are of {others}"
    return _undivided_by_tokens(split, attention_drops=attention_drops)


def _undivided_by_tokens(split: ModelSplit, *, attention_drops: bool) -> str:
    """Why no layer of a causal model with attention can be under cp; empty where that is to be tried."""
    if not split.fused_attention:
        return "its attention runs step by step, with a mask of the whole sequence"
    if any(kind.tokens != (1, 0) for kind in split.kinds):
        return LENGTH_NO_SP
    if split.streams:
        return STREAM_NO_SP
    if attention_drops:
        return "attention drops entries at random, which ranks with parts of a sequence cannot do alike"
    return ""


def _other_attention(split: ModelSplit, kind: SplitKind) -> str:
    """What blocks do in the place of causal attention, as a recurrence: those of a kind, or all of them; else empty."""
    blocks = [each for each in split.kinds if each.role is LayerRole.BLOCK]
    found = {each.attention for each in ([kind] if kind.role is LayerRole.BLOCK else blocks)}
    return ", ".join(sorted(found)) if found.isdisjoint(("full_attention", "sliding_attention")) else ""


def _no_sp(split: ModelSplit, kind: SplitKind) -> str:
    """Why nothing of a kind can be sequence-parallel; empty where that is to be tried."""
    if kind.role is LayerRole.EMBEDDING and any(step.startswith(POSITIONS) for step in split.embedding_calls):
        return POSITIONS_NO_SP
    known = IMAGE_NO_SP if split.image else ENCODER_NO_SP if split.encoder else ""
    if split.encoder and split.encoder.encoded is None:
        known = IMAGE_NO_SP
    if any(kind.tokens != (1, 0) for kind in split.kinds):
        known = known or LENGTH_NO_SP
    by_tokens = all(each.shape[0] == 0 and not each.whole for each in split.streams)
    return known or ("" if by_tokens else STREAM_NO_SP)


def _suppositions(
    model: PreTrainedModel, split: ModelSplit, kind: SplitKind, layer: int, keywords: Mapping[str, str | None]
) -> Iterator[Styles]:
    if kind.role is not LayerRole.BLOCK:
        yield from _ends(model, split, kind, layer)
        return
    path = split.modules(layer)["block"]
    inside = f"{path}."
    named = {each.removeprefix(inside): keyword for each, keyword in keywords.items() if each.startswith(inside)}
    prefix = f"{split.list_of(layer).removeprefix(f'{model.base_model_prefix}.')}.*."
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    own = {path.removeprefix(prefix): style for path, style in plan.items() if path.startswith(prefix)}
    config = _config_of_part(path, model) if split.features else model.config.get_text_config()
    heads = getattr(_config_of(path, config), "num_attention_heads", 0)
    yield from block_suppositions(model.get_submodule(path), named, plan=own, heads=heads)


def block_suppositions(
    block: nn.Module,
    called: Mapping[str, str | None],
    *,
    plan: Mapping[str, str] = MappingProxyType({}),
    heads: int = 0,
) -> Iterator[Styles]:
    """The styles of a block's modules, those of the most parameters first, and of these those that gather nothing.

    ``called`` has the modules that are called in it, in order, with the name by which each is given its tensor;
    ``plan`` the styles that the block's makers give; ``heads`` is how many entries a parameter has for each head.
    """
    if inner := _only_part(block, called):
        within = {path.removeprefix(f"{inner}."): name for path, name in called.items() if path.startswith(f"{inner}.")}
        for styles in block_suppositions(block.get_submodule(inner), within, heads=heads):
            yield {path.replace("block.", f"block.{inner}.", 1): style for path, style in styles.items()}
        return
    seen: list[Styles] = []
    found = list(_regions(_Block(block, called), plan, heads))
    for regions in sorted(found, key=_Regions.num_parameters, reverse=True):
        for numbers in (_HEAD_COUNTS + _WIDTHS, _HEAD_COUNTS, ()):
            styles = regions.styles(numbers)
            if styles not in seen and any(style.startswith(_DIVIDING) for style in styles.values()):
                seen.append(styles)
                yield styles


def _only_part(block: nn.Module, called: Collection[str]) -> str:
    """The one entry of a list of one that holds all that a block computes with, as in ALBERT; empty without such."""
    owners = [path for path in called if _has_own(block.get_submodule(path))]
    lists = (name for name, each in block.named_children() if isinstance(each, nn.ModuleList) and len(each) == 1)
    return next((f"{name}.0" for name in lists if all(_below(path, f"{name}.0") for path in owners)), "")


@dataclass(frozen=True, slots=True)
class _Block:
    """A block, and the modules that are called in it, in order, with the name by which each is given its tensor."""

    module: nn.Module
    called: Mapping[str, str | None]

    def at(self, path: str) -> nn.Module:
        return self.module.get_submodule(path)

    def lent(self, path: str) -> list[str]:
        """The parameters of modules in a module that are read there without the modules being called."""
        experts = [id(each) for each in routed_experts(self.module)]
        return [
            f"{inner}.{name}"
            for inner, module in self.at(path).named_modules()
            if inner and f"{path}.{inner}" not in self.called and id(module) not in experts
            for name, _ in module.named_parameters(recurse=False)
        ]

    def routed(self) -> list[str]:
        """The modules that hold experts and what routes to them."""
        experts = {id(each) for each in routed_experts(self.module)}
        paths = [path for path, each in self.module.named_modules() if id(each) in experts]
        return [path.rpartition(".")[0] for path in paths]


@dataclass(frozen=True, slots=True)
class _Regions:
    """The matrices of a block and their styles, from which those of all other modules follow."""

    block: _Block
    matrices: Mapping[str, str]
    heads: int
    divides_experts: bool = True

    def styles(self, numbers: Sequence[str]) -> dict[str, str]:
        """The style of every module that has one; modules in regions divide what they keep under ``numbers``."""
        block, routed = self.block, self._routed()
        if "" in routed:
            return {}
        found = dict(self.matrices)
        begins = {path.rpartition(".")[0] for path, style in found.items() if style.startswith("columns")} - {""}
        begins = {path for path in begins if not any(_below(path, outer) for outer in [*(begins - {path}), *routed])}
        for path, style in found.items():
            if style == "columns" and "." not in path:
                found[path] = "columns_entering"
        for path in routed:
            found |= _of_experts(block, path)
        for path in block.called:
            outer = next((each for each in [*begins, *routed] if _below(path, each)), None)
            module = block.at(path)
            is_divided = outer in routed or (outer is not None and self._divides_between(outer))
            counts = ",".join(name for name in numbers if _is_divisible(module, name)) if is_divided else ""
            heads = self._of_heads(module) if is_divided and not _in(path, routed) else ""
            if path in begins or path in routed:
                word = "enter" if path in begins else "region"
                lent = ",".join(block.lent(path))
                found[path] = f"{word}:{block.called[path] or ''}:{counts}:{heads}:{lent}".rstrip(":")
            elif path in found or not path:
                continue
            elif is_divided and self._is_table(module):
                found[path] = "columns"
            elif _has_own(module) or counts:
                is_inside = outer is not None and not self._is_behind(path, outer)
                found[path] = f"whole:{counts}:{heads}".rstrip(":") if is_inside else "on_part"
        return {f"block.{path}": style for path, style in found.items()}

    def _routed(self) -> list[str]:
        return self.block.routed() if self.divides_experts else []

    def _divides_between(self, region: str) -> bool:
        """Whether ranks have parts of what lies between the matrices of a region."""
        return any(style == "columns" for path, style in self.matrices.items() if _below(path, region))

    def _is_table(self, module: nn.Module) -> bool:
        """Whether a module looks up an entry for each head, as one of relative positions does."""
        return isinstance(module, nn.Embedding) and module.embedding_dim == self.heads

    def _of_heads(self, module: nn.Module) -> str:
        """The parameters of a module itself that have an entry for each head."""
        own = module.named_parameters(recurse=False)
        return ",".join(name for name, each in own if each.ndim and len(each) == self.heads)

    def num_parameters(self) -> int:
        """Of the matrices that have a style, whole ones too, and of what routes to experts that are divided."""
        modules = [self.block.at(path) for path in (*self.matrices, *self._routed())]
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    def _is_behind(self, path: str, region: str) -> bool:
        """Whether a module is called behind the end of the region in which it lies."""
        order = list(self.block.called)
        ends = [order.index(each) for each, style in self.matrices.items() if _below(each, region) and style in _ENDS]
        return bool(ends) and order.index(path) > max(ends)


_ENDS = ("rows", "rows_of_whole")
_DIVIDING = ("columns", "rows", "own_experts")
"""How the styles begin of what ranks have a part of."""
_MOST_LEFT = 2
"""Parts of a block that are left whole together."""
_OF_PLANS = {
    "colwise": "columns",
    "rowwise": "rows",
    "colwise_gather_output": "columns_gathered",
    "rowwise_split_input": "rows_of_whole",
    "mla_kv_a_proj": "whole",
    "replicated_with_grad_allreduce": "whole",
}
"""What the styles of transformers' own plans are here; those of experts follow from the experts."""


def _regions(block: _Block, plan: Mapping[str, str], heads: int) -> Iterator[_Regions]:
    """The model's own plan; the structure; both, where the plan leaves a part out; and the structure otherwise.

    Otherwise is with what a part's matrices give gathered, where what lies between them cannot be divided, as queries,
    keys and values of one matrix are; and without a part or two, or without experts.
    """
    routed = block.routed()
    own = {path: style for path, style in plan.items() if path in block.called and not _in(path, routed)}
    groups = _by_structure(block, routed)
    if own and all(style in _OF_PLANS for style in own.values()):
        planned = {path: _OF_PLANS[style] for path, style in own.items() if _has_own(block.at(path))}
        yield _Regions(block, planned, heads)
        touched = {path.partition(".")[0] for path in planned}
        others = [group for group in groups if not touched & {path.partition(".")[0] for path in group}]
        yield _Regions(block, planned | _merged(others), heads)
    yield _Regions(block, _merged(groups), heads)
    whole = [group for group in groups if all("." in path for path in group)]
    for gathered in [*([each] for each in whole), *([whole] if len(whole) > 1 else [])]:
        styles = (_gathered(each) if each in gathered else each for each in groups)
        yield _Regions(block, _merged(styles), heads)
    if len(groups) > 1 or routed:
        yield from (_Regions(block, _merged(each for each in groups if each is not left), heads) for left in groups)
    if len(groups) > _MOST_LEFT:
        yield from (_Regions(block, _merged(kept), heads) for kept in combinations(groups, len(groups) - _MOST_LEFT))
    if routed:
        yield _Regions(block, _merged(groups), heads, divides_experts=False)


def _merged(groups: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {path: style for group in groups for path, style in group.items()}


def _gathered(group: Mapping[str, str]) -> dict[str, str]:
    """The matrices of a part divided likewise, with all that lies between them whole on every rank."""
    return {path: "rows_of_whole" if style == "rows" else "columns_gathered" for path, style in group.items()}


def _by_structure(block: _Block, routed: Sequence[str]) -> list[dict[str, str]]:
    """The styles of the matrices of each part of a block.

    Of the matrices of one part of a block the last one called is divided by its inputs, the others by their outputs.

    One of a part of its own goes with that of the next part. One whose result another of the part reads is whole.
    """
    parts: dict[str, list[str]] = {}
    for path in block.called:
        if isinstance(block.at(path), nn.Linear | Conv1D) and not _in(path, routed):
            parts.setdefault(_part_of(block, path), []).append(path)
    groups: list[list[str]] = []
    for paths in parts.values():
        if groups and len(paths) == len(groups[-1]) == 1:
            groups[-1] += paths
        else:
            groups.append(list(paths))
    parted: list[dict[str, str]] = []
    for group in (group for group in groups if len(group) > 1):
        parted.append(found := {})
        width = _inputs_of(block.at(group[0]))
        found[group[-1]] = "rows"
        for place, path in enumerate(group[:-1]):
            found[path] = "columns"
            if place and _inputs_of(block.at(path)) != width:
                found[group[place - 1]] = "whole"
    return parted


def _part_of(block: _Block, path: str) -> str:
    """The part of a block that a matrix lies in, by its path; of a list of parts the entry."""
    first, *inner = path.split(".")
    if not inner:
        return ""
    return f"{first}.{inner[0]}" if inner[1:] and isinstance(block.at(first), nn.ModuleList) else first


def _of_experts(block: _Block, routed: str) -> dict[str, str]:
    """The styles in a mixture of experts: those that every token takes are divided as any feed-forward part."""
    below = f"{routed}." if routed else ""
    found: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for path, module in block.module.named_modules():
        if not path.startswith(below):
            continue
        if any(module is each for each in routed_experts(block.module)):
            found[path] = "own_experts"
        elif isinstance(module, nn.Linear) and path in block.called and "." in path.removeprefix(below):
            groups.setdefault(path.rpartition(".")[0], []).append(path)
    for group in groups.values():
        if len(group) > 1:
            found |= dict.fromkeys(group[:-1], "columns") | {group[-1]: "rows_partial"}
    return found


def _inputs_of(matrix: nn.Module) -> int:
    return matrix.weight.shape[0] if isinstance(matrix, Conv1D) else matrix.weight.shape[1]


def _outputs_of(matrix: nn.Module) -> int:
    return matrix.weight.shape[-1] if isinstance(matrix, Conv1D) else matrix.weight.shape[0]


def _is_divisible(module: nn.Module, name: str) -> bool:
    value = vars(module).get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value % RANKS == 0


def _below(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _in(path: str, outers: Sequence[str]) -> bool:
    return any(_below(path, outer) for outer in outers)


def _has_own(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _ends(model: PreTrainedModel, split: ModelSplit, kind: SplitKind, layer: int) -> Iterator[Styles]:
    """A table of tokens, and a projection to tokens; norms before it run on a part of the sequence."""
    styles: dict[str, str] = {}
    for name, path in ((name, path) for name, path in split.modules(layer).items() if path not in split.holders):
        module = model.get_submodule(path)
        if kind.role is LayerRole.EMBEDDING and not split.image and _is_table(module, model):
            styles[name] = "vocabulary"
        elif isinstance(module, nn.Linear) and module.out_features == split.vocab_size:
            styles[name] = "logits"
        elif kind.role is LayerRole.HEAD:
            owners = [path for path, each in module.named_modules() if _has_own(each)]
            styles |= {f"{name}.{path}".removesuffix("."): "on_part" for path in owners}
    if {"vocabulary", "logits"} & set(styles.values()):
        yield styles


def _is_table(module: nn.Module, model: PreTrainedModel) -> bool:
    """Whether a module looks tokens up; encoder and decoder have one each, tied to that which the model names."""
    return isinstance(module, nn.Embedding) and module.weight is table_of_tokens(model).weight


def divided_sizes(model: PreTrainedModel, split: ModelSplit, kind: int, styles: Styles) -> tuple[tuple[str, int], ...]:
    """The sizes of a kind that a degree must divide, with their names for messages."""
    return tuple(_divided(model, split, split.layers.index(kind), styles)) if styles else ()


def _divided(model: PreTrainedModel, split: ModelSplit, layer: int, styles: Styles) -> Iterator[tuple[str, int]]:
    if split.kinds[split.layers[layer]].role is not LayerRole.BLOCK:
        yield "vocabulary", split.vocab_size
        return
    path = split.modules(layer)["block"]
    config = _config_of(path, _config_of_part(path, model))
    queries = getattr(config, "num_attention_heads", None)
    if isinstance(queries, int):
        yield "attention heads", queries
        keys = getattr(config, "num_key_value_heads", None)
        yield KV_HEADS, keys if isinstance(keys, int) else queries
    block = model.get_submodule(path)
    experts = [each.num_experts for each in routed_experts(block)]
    if "own_experts" in styles.values() and experts:
        yield "experts", max(experts)
    yield from divided_rows(block, styles)


def _config_of_part(block: str, model: PreTrainedModel) -> PreTrainedConfig:
    """The config that says the heads of the block of this path: the model's, or that of the part which holds it."""
    if model.config.is_heterogeneous or isinstance(getattr(model.config, "num_attention_heads", None), int):
        return model.config
    names = block.split(".")
    parts = (model.get_submodule(".".join(names[:count])) for count in range(len(names)))
    return [part.config for part in parts if isinstance(part, PreTrainedModel)][-1]


def _config_of(block: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """The config as it is for the block of this path, where blocks have sizes of their own."""
    return config.per_layer_config[int(block.rpartition(".")[2])] if config.is_heterogeneous else config


def divided_rows(block: nn.Module, styles: Styles) -> Iterator[tuple[str, int]]:
    """The inputs of the matrices of a block that are divided by them, and the outputs of those that are gathered."""
    for path, style in styles.items():
        name = path.removeprefix("block.")
        if style in ("rows", "rows_of_whole", "rows_partial"):
            yield f"inputs of {name}", _inputs_of(block.get_submodule(name))
        elif style == "columns_gathered":
            yield f"outputs of {name}", _outputs_of(block.get_submodule(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedProof:
    """Two ranks against one process: a model of small width, prepared, and what it gives."""

    model: PreTrainedModel
    chain: ModelChain
    numbers: Sequence[int]
    """The layers of the chain that are run: embedding, head, and two blocks of each kind."""
    ids: Tensor
    decoder_ids: Tensor | None
    labels: Tensor
    expected: Mapping[str, Tensor]
    """The logits, and the gradient of every parameter by its path."""
    tolerance: float

    def __call__(self, styles: Mapping[str, Styles], sp: bool) -> str:
        """Why the styles by kind do not hold; empty where they do."""
        split = self.chain.split
        assert split is not None
        kinds = tuple(
            kind.model_copy(update=self._dividing(number, styles[kind.name])) if kind.name in styles else kind
            for number, kind in enumerate(split.kinds)
        )
        chain = chain_from_config(
            self.chain.config, name=self.chain.name, split=split.model_copy(update={"kinds": kinds})
        )
        return on_two_ranks(lambda mesh: self._compared(chain, mesh, frozenset(styles), sp=sp))

    def by_tokens(self, kinds: Collection[str]) -> str:
        """Why ranks may not compute layers of these kinds for their own tokens each; empty where they may."""
        return on_two_ranks(lambda mesh: self._compared(self.chain, mesh, frozenset(), by_tokens=kinds))

    def _dividing(self, kind: int, styles: Styles) -> dict[str, object]:
        assert self.chain.split is not None
        sizes = divided_sizes(self.model, self.chain.split, kind, styles)
        return {"styles": dict(styles), "no_tp": "", "tp_divides": sizes, "tp_shares": (KV_HEADS,)}

    def _compared(
        self,
        chain: ModelChain,
        mesh: DeviceMesh,
        divided: Collection[str],
        *,
        sp: bool = False,
        by_tokens: Collection[str] = (),
    ) -> str:
        model, split = copy.deepcopy(self.model), chain.split
        assert split is not None
        layers, context = pieces_of(model, chain, self.numbers, self.ids, self.decoder_ids)
        paths = {id(parameter): path for path, parameter in parameters_by_path(model, split).items()}
        places = [(layer, name, paths[id(each)]) for layer in layers for name, each in layer.named_parameters()]
        flow: Flow = self.ids
        for layer in layers:
            cut = sp and layer.kind.name in divided
            if layer.kind.name in divided:
                apply_tensor_parallel(layer, chain, mesh, sp=sp)
            run = partial(layer.run_alone, layer)
            if layer.kind.name in by_tokens:
                apply_context_parallel(layer, mesh, "gather")
                run = partial(_by_tokens, run, mesh)
            flow = layer.within(flow, context, partial(_in_parts, run, mesh) if cut else run)
        (logits,) = (each.full_tensor() if isinstance(each, DTensor) else each for each in tensors_of(flow))
        logits = logits.view_as(self.expected["logits"])
        loss_of(logits, self.labels).backward()
        found = {"logits": logits.detach()}
        for layer, name, path in places:
            gradient = layer.get_parameter(name).grad
            if gradient is not None and layer.kind.name in by_tokens:
                dist.all_reduce(gradient, group=mesh.get_group())
            if gradient is not None:
                found[path] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return difference(self.expected, found, chain, self.tolerance)


def on_two_ranks(compared: Callable[[DeviceMesh], str]) -> str:
    """What ``compared`` finds amiss on either of two ranks, which are threads; empty where it finds nothing."""
    outcomes: dict[int, str] = {}
    store = dist.HashStore()

    def run(rank: int) -> None:
        with suppress(SystemExit):  # how a rank ends whose partner has failed
            outcomes[rank] = _outcome(rank, store, compared)

    with _threaded_groups():
        ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(_PATIENCE_S)
    reasons = [reason for reason in outcomes.values() if reason]
    return reasons[0] if reasons else "" if len(outcomes) == RANKS else "it does not end"


def _outcome(rank: int, store: dist.Store, compared: Callable[[DeviceMesh], str]) -> str:
    try:
        dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
        return compared(init_device_mesh("cpu", (RANKS,)))
    except Exception as error:
        ProcessLocalGroup.exception_handle(error)
        return f"it raises {type(error).__name__} ({(str(error).splitlines() or [''])[0][:120]})"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def pieces_of(
    model: PreTrainedModel, chain: ModelChain, numbers: Iterable[int], ids: Tensor, decoder_ids: Tensor | None
) -> tuple[list[ChainLayer], LayerContext]:
    """Some layers of a split model, and what a forward pass through them carries along for token ids [B, S]."""
    numbers = list(numbers)
    layers = [build_layer(model, chain, number, Remat.NONE) for number in numbers]
    if chain.split and chain.split.streams:
        for layer, (before, number) in zip(layers[1:], pairwise(numbers), strict=True):
            layer.entering, layer.past = chain.split.places(number, before)
    tokens = (ids if decoder_ids is None else decoder_ids).shape[1]
    side = side_inputs_of(layers, model, chain, ids.device)(tokens, torch.float32, ids.device)
    return layers, LayerContext(side=side, config=model.config, decoder_ids=decoder_ids, labels_BS=decoder_ids)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of logits of every place; a loss, which the head of a model of pairs gives, is it already."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()) if logits.ndim else logits


def parameters_by_path(model: PreTrainedModel, split: ModelSplit) -> dict[str, nn.Parameter]:
    """Every parameter once, by its first path that lies in a layer of the split."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    inside = [path for path in split.paths if path not in split.holders]
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if _in(path, inside) or path.rpartition(".")[0] in split.holders:
            found.setdefault(id(parameter), (path, parameter))
    return dict(found.values())


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], chain: ModelChain, tolerance: float) -> str:
    """Where logits or gradients differ by more than ``tolerance`` of the largest entry; empty where they do not.

    Gradients that are all but zero, as those of a key's bias, are compared with a thousandth of the largest; those of a
    single entry, as of a scale, where terms of all pairs cancel, with a hundredth.
    """
    wanted, sums = _joined(expected, chain), _joined(found, chain)
    largest = max(float(tensor.abs().max()) for path, tensor in wanted.items() if path != "logits")
    for path, tensor in wanted.items():
        if path not in sums or sums[path].shape != tensor.shape:
            return f"no gradient of {path}"
        least = (_SMALL if tensor.numel() > 1 else _SMALL_OF_ONE) * largest
        error = float((tensor - sums[path]).abs().max()) / max(float(tensor.abs().max()), least)
        if not error <= tolerance:
            what = path if path == "logits" else f"the gradient of {path}"
            return f"{what} differs by {error:.0e} of its largest entry"
    return ""


def _joined(results: Mapping[str, Tensor], chain: ModelChain) -> dict[str, Tensor]:
    """With the gradients of all copies of a shared parameter added up."""
    sums = dict(results)
    for copies in chain.split.shared if chain.split else ():
        given = [sums.pop(path) for _, path in copies if path in sums]
        sums |= {copies[0][1]: sum(given[1:], start=given[0])} if given else {}
    return sums


def _in_parts(run: Callable[[Flow, LayerContext], Flow], mesh: DeviceMesh, flow: Flow, context: LayerContext) -> Flow:
    """What a layer makes on this rank's part of the sequence, whole again."""
    entering = as_flow(tuple(_part(each, mesh) if each.is_floating_point() else each for each in tensors_of(flow)))
    made = tensors_of(run(entering, context))
    return as_flow(tuple(each if isinstance(each, DTensor) else _whole(each, mesh) for each in made))


def _part(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(hidden, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()


def _whole(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(hidden, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()


def _by_tokens(run: Callable[[Flow, LayerContext], Flow], mesh: DeviceMesh, flow: Flow, context: LayerContext) -> Flow:
    """What a layer makes of this rank's tokens, in head-tail order; those of all ranks in their natural order."""
    ranked = in_order(flow, rank_order(mesh.size()))
    made = _whole(run(_part(ranked, mesh), own_context(context, mesh)), mesh)
    return in_order(made, natural_order(mesh.size()))


@contextmanager
def _threaded_groups() -> Iterator[None]:
    """Within it the threads of this process are ranks, each with a process group of its own."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    ProcessLocalGroup.reset()
    _install_threaded_pg()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
