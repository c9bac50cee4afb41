"""Suppositions of how the layers of a split model divide under tensor parallelism, to be proved on two ranks.

Two suppositions are tried for blocks: the model's own plan (``base_model_tp_plan``, of the part that holds them), then
the structure: of the matrices of one part, the one used last is divided by its inputs and the others by their outputs.
Either way a region (`dimensions.tp`) begins at the module that holds matrices divided by outputs and ends at one
divided by inputs. Modules of which nothing is known are whole on every rank within a region; outside of it they run on
a part of the sequence under sequence parallelism. Modules divide the head counts, and perhaps the widths, that they
keep. If the whole does not hold, a block is tried without one of its parts. Embedding and head are supposed to be a
table and a projection divided by tokens.

A supposition counts only if two ranks give the result of one process (`steelyard.modules.two_ranks`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from steelyard.model.family import KV_HEADS, QUERY_HEADS, LayerRole
from steelyard.model.split import ModelSplit, SplitLayerType, is_below, is_below_any
from steelyard.modules.called import POSITIONS
from steelyard.modules.experts import routed_experts

RANKS = 2
_HEAD_COUNTS = (
    *("num_heads", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    *("kv_heads", "num_query_heads"),
)
_WIDTHS = ("embed_dim", "all_head_size", "hidden_size", "inner_dim", "split_size", "d_model")
"""Attributes that count heads, and those that hold the width of all heads; modules reshape by both."""
Styles = Mapping[str, str]


def block_of(model: PreTrainedModel, split: ModelSplit, layer: int, keywords: Mapping[str, str | None]) -> "Block":
    """Return a block of a split model, with the styles of the model's own plan; ``keywords`` as for `divided_types`."""
    path = split.modules(layer)["block"]
    inside = f"{path}."
    named = {each.removeprefix(inside): keyword for each, keyword in keywords.items() if each.startswith(inside)}
    prefix = f"{split.list_of(layer)}.*."
    plan = {each.removeprefix(prefix): style for each, style in model.tp_plan.items() if each.startswith(prefix)}
    config = _config_of_part(path, model) if split.features else model.config.get_text_config()
    heads = getattr(_config_of(path, config), "num_attention_heads", 0)
    return Block(model.get_submodule(path), named, plan, heads)


@dataclass(frozen=True, slots=True)
class Block:
    """A block to be divided."""

    module: nn.Module
    called: Mapping[str, str | None]
    """Name under which each module called in it gets its tensor, by path in the order of calls."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """Styles that the block's makers give."""
    heads: int = 0
    """Number of entries of a parameter that has one for each head."""

    def suppositions(self) -> Iterator[Styles]:
        """Yield styles of its modules: those of the most parameters first, and of these those that gather nothing."""
        # the only entry of a list that holds everything that a block computes with, as in ConvNeXt; empty if none
        owners, children = [path for path in self.called if _has_own(self.at(path))], self.module.named_children()
        lists = (name for name, each in children if isinstance(each, nn.ModuleList) and len(each) == 1)
        if inner := next((f"{name}.0" for name in lists if all(is_below(path, f"{name}.0") for path in owners)), ""):
            within = {p.removeprefix(f"{inner}."): n for p, n in self.called.items() if p.startswith(f"{inner}.")}
            for styles in Block(self.at(inner), within, heads=self.heads).suppositions():
                yield {path.replace("block.", f"block.{inner}.", 1): style for path, style in styles.items()}
            return
        seen: list[Styles] = []
        for regions in sorted(_regions(self), key=_Regions.num_parameters, reverse=True):
            for numbers in (_HEAD_COUNTS + _WIDTHS, _HEAD_COUNTS, ()):
                styles = regions.styles(numbers)
                if styles not in seen and any(style.startswith(_DIVIDING) for style in styles.values()):
                    seen.append(styles)
                    yield styles

    def unread_plan(self) -> str:
        """Return why the makers' plan is not tried: its styles that are not read; empty if all of them are."""
        paths = {style: path for path, style in self._planned().items() if style not in _OF_PLANS}
        unread = ", ".join(f"{style} (of {path})" for style, path in paths.items())
        return f"styles of its own tp plan are not supported: {unread}" if unread else ""

    def follows(self, styles: Styles) -> bool:
        """Return whether styles include all that the makers' plan says of the block, as far as that is read."""
        own = self.read()
        return bool(own) and all(styles.get(f"block.{path}", "").removesuffix("_entering") == own[path] for path in own)

    def at(self, path: str) -> nn.Module:
        """Return the module at a path."""
        return self.module.get_submodule(path)

    def lent(self, path: str) -> list[str]:
        """Return the parameters of the modules within a module that are read there without a call of these modules."""
        experts = [id(each) for each in routed_experts(self.module)]
        return [
            f"{inner}.{name}"
            for inner, module in self.at(path).named_modules()
            if inner and f"{path}.{inner}" not in self.called and id(module) not in experts
            for name, _ in module.named_parameters(recurse=False)
        ]

    def routed(self) -> list[str]:
        """Return the modules that hold experts and their router."""
        experts = {id(each) for each in routed_experts(self.module)}
        paths = [path for path, each in self.module.named_modules() if id(each) in experts]
        return [path.rpartition(".")[0] for path in paths]

    def _planned(self) -> dict[str, str]:
        """Return the styles of the plan for modules that are called and are in no mixture of experts."""
        routed = self.routed()
        return {
            path: each for path, each in self.plan.items() if path in self.called and not is_below_any(path, routed)
        }

    def read(self) -> dict[str, str]:
        """Return the styles used here for the plan's modules with parameters; empty if any of its styles is unread."""
        own = {path: _OF_PLANS.get(style) for path, style in self._planned().items()}
        held = {path: style for path, style in own.items() if style and _has_own(self.at(path))}
        return {} if None in own.values() else held


@dataclass(frozen=True, slots=True)
class _Regions:
    """Matrices of a block and their styles, from which the styles of all other modules follow."""

    block: Block
    matrices: Mapping[str, str]
    divides_experts: bool = True

    def styles(self, numbers: Sequence[str]) -> dict[str, str]:
        """Return the style of every module that has one; modules in regions divide their attributes in ``numbers``."""
        block, routed = self.block, self._routed()
        if "" in routed:
            return {}
        found = dict(self.matrices)
        begins = {path.rpartition(".")[0] for path, style in found.items() if style.startswith("columns")} - {""}
        begins = {path for path in begins if not any(is_below(path, outer) for outer in [*(begins - {path}), *routed])}
        for path, style in found.items():
            if style == "columns" and "." not in path:
                found[path] = "columns_entering"
        for path in routed:
            found |= _of_experts(block, path)
        for path in block.called:
            outer = next((each for each in [*begins, *routed] if is_below(path, each)), None)
            module = block.at(path)
            is_divided = outer in routed or (
                outer is not None
                and any(style == "columns" for path, style in self.matrices.items() if is_below(path, outer))
            )
            counts = ",".join(name for name in numbers if _is_divisible(module, name)) if is_divided else ""
            of_heads = (
                n for n, each in module.named_parameters(recurse=False) if each.ndim and len(each) == block.heads
            )
            heads = ",".join(of_heads) if is_divided and not is_below_any(path, routed) else ""
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

    def _is_table(self, module: nn.Module) -> bool:
        """Return whether a module looks up an entry for each head, as a table of relative positions does."""
        return isinstance(module, nn.Embedding) and module.embedding_dim == self.block.heads

    def num_parameters(self) -> int:
        """Number of parameters of the matrices that have a style, whole or not, and of mixtures of divided experts."""
        modules = [self.block.at(path) for path in (*self.matrices, *self._routed())]
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    def _is_behind(self, path: str, region: str) -> bool:
        """Return whether a module is called after the end of its region."""
        order = list(self.block.called)
        ends = [order.index(each) for each, style in self.matrices.items() if is_below(each, region) and style in _ENDS]
        return bool(ends) and order.index(path) > max(ends)


_ENDS = ("rows", "rows_of_whole")
_DIVIDING = ("columns", "rows", "own_experts")
"""Prefixes of the styles of modules that are divided over ranks."""
_MOST_LEFT = 2
"""Most parts of a block that are left whole together."""
_OF_PLANS = {
    "colwise": "columns",
    "rowwise": "rows",
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), "columns_gathered"),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), "rows_of_whole"),
    **dict.fromkeys(("mla_kv_a_proj", "replicated_with_grad_allreduce", "replicate"), "whole"),
    "local_params": "",
}
"""Styles used here for those of transformers' own plans; empty if a region treats any module of it so.

Styles of experts follow from the experts. A plan with another style for a module outside of them is not tried.
"""


def _regions(block: Block) -> Iterator[_Regions]:
    """Yield the model's own plan; both, if the plan leaves a part out; the structure; and variants of the structure.

    Variants gather the results of a part's matrices, if the operations between them cannot be divided, as for queries,
    keys and values of one matrix; or they leave out one or two parts, or the experts.
    """
    routed = block.routed()
    groups = _by_structure(block, routed)
    if planned := block.read():
        yield _Regions(block, planned)
        touched = {path.partition(".")[0] for path in planned}
        others = [group for group in groups if not touched & {path.partition(".")[0] for path in group}]
        yield _Regions(block, planned | _merged(others))
    yield _Regions(block, _merged(groups))
    whole = [group for group in groups if all("." in path for path in group)]
    for gathered in [*([each] for each in whole), *([whole] if len(whole) > 1 else [])]:
        found = _merged(groups)  # divided likewise, with everything between these matrices whole on every rank
        for path in (path for group in gathered for path in group):
            found[path] = "rows_of_whole" if found[path] == "rows" else "columns_gathered"
        yield _Regions(block, found)
    if len(groups) > 1 or routed:
        yield from (_Regions(block, _merged(each for each in groups if each is not left)) for left in groups)
    if len(groups) > _MOST_LEFT:
        yield from (_Regions(block, _merged(kept)) for kept in combinations(groups, len(groups) - _MOST_LEFT))
    if routed:
        yield _Regions(block, _merged(groups), divides_experts=False)


def _merged(groups: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {path: style for group in groups for path, style in group.items()}


def _by_structure(block: Block, routed: Sequence[str]) -> list[dict[str, str]]:
    """Return the styles of the matrices of each part of a block.

    The matrix of a part that is called last is divided by its inputs, the others by their outputs.

    A matrix that is a part by itself joins the next part of one matrix. One whose result another of the part reads is
    whole.
    """
    parts: dict[str, list[str]] = {}
    for path in block.called:
        if isinstance(block.at(path), nn.Linear | Conv1D) and not is_below_any(path, routed):
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


def _part_of(block: Block, path: str) -> str:
    """Return the part of a block that holds a matrix, by its path; for a list of parts, the entry."""
    first, *inner = path.split(".")
    if not inner:
        return ""
    return f"{first}.{inner[0]}" if inner[1:] and isinstance(block.at(first), nn.ModuleList) else first


def _of_experts(block: Block, routed: str) -> dict[str, str]:
    """Return the styles in a mixture of experts; experts that every token uses are divided as any feed-forward part."""
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
    return matrix.weight.shape[0 if isinstance(matrix, Conv1D) else 1]


def _is_divisible(module: nn.Module, name: str) -> bool:
    value = vars(module).get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value % RANKS == 0


def _has_own(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def end_suppositions(
    model: PreTrainedModel, split: ModelSplit, layer_type: SplitLayerType, layer: int
) -> Iterator[Styles]:
    """Yield the styles of a token table or of a projection to tokens; norms before it, and rows of positions that are
    added, are of a part of the sequence.
    """
    styles: dict[str, str] = {}
    for name, path in ((name, path) for name, path in split.modules(layer).items() if path not in split.holders):
        module = model.get_submodule(path)
        if layer_type.role is LayerRole.EMBEDDING and not split.image and _is_table(module, model):
            styles[name] = "vocabulary"
        elif isinstance(module, nn.Linear) and module.out_features == split.vocab_size:
            styles[name] = "logits"
        elif POSITIONS + path in split.embedding_calls and layer_type.role is LayerRole.EMBEDDING:
            styles[name] = "positions"
        elif layer_type.role is LayerRole.HEAD:
            owners = [path for path, each in module.named_modules() if _has_own(each)]
            styles |= {f"{name}.{path}".removesuffix("."): "on_part" for path in owners}
    if {"vocabulary", "logits"} & set(styles.values()):
        yield styles


def _is_table(module: nn.Module, model: PreTrainedModel) -> bool:
    """Return whether a module looks tokens up; encoder and decoder have one each, tied to the one the model names."""
    return isinstance(module, nn.Embedding) and module.weight is model.get_input_embeddings().weight


def divided_sizes(
    model: PreTrainedModel, split: ModelSplit, layer_type: int, styles: Styles
) -> tuple[tuple[str, int], ...]:
    """Return the sizes of a layer type that a degree must divide, with their names for messages."""
    if not styles:
        return ()
    if split.kinds[layer_type].role is not LayerRole.BLOCK:
        return (("vocabulary", split.vocab_size),)
    path = split.modules(split.layers.index(layer_type))["block"]
    config, block = _config_of(path, _config_of_part(path, model)), model.get_submodule(path)
    found: list[tuple[str, int]] = []
    queries, keys = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if isinstance(queries, int):
        found += [(QUERY_HEADS, queries), (KV_HEADS, keys if isinstance(keys, int) else queries)]
    experts = [each.num_experts for each in routed_experts(block)]
    if "own_experts" in styles.values() and experts:
        found.append(("experts", max(experts)))
    return *found, *divided_rows(block, styles)


def _config_of_part(block: str, model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config with the head counts of the block at this path: the model's, or that of the part holding it."""
    if model.config.is_heterogeneous or isinstance(getattr(model.config, "num_attention_heads", None), int):
        return model.config
    names = block.split(".")
    parts = (model.get_submodule(".".join(names[:count])) for count in range(len(names)))
    return [part.config for part in parts if isinstance(part, PreTrainedModel)][-1]


def _config_of(block: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the block at this path, for models whose blocks have different sizes."""
    return config.per_layer_config[int(block.rpartition(".")[2])] if config.is_heterogeneous else config


def divided_rows(block: nn.Module, styles: Styles) -> Iterator[tuple[str, int]]:
    """Yield the inputs of a block's matrices that are divided by inputs, and the outputs of those that are gathered."""
    for path, style in styles.items():
        name = path.removeprefix("block.")
        if style in ("rows", "rows_of_whole", "rows_partial"):
            yield f"inputs of {name}", _inputs_of(block.get_submodule(name))
        elif style == "columns_gathered":
            matrix = block.get_submodule(name)
            yield f"outputs of {name}", matrix.weight.shape[-1 if isinstance(matrix, Conv1D) else 0]
