"""How the layers of a split model divide under tensor parallelism: supposed, then proved on two ranks.

For blocks two suppositions are tried: the model's own plan (``base_model_tp_plan``), then the structure: of the
matrices of one module, the one that is used last is divided by its inputs and the others by their outputs. Either way a
module that holds divided matrices gathers what enters it, a norm runs on a part of the sequence under sequence
parallelism, and what nothing is known of stays whole on every rank. Embedding and head are supposed to be a table and a
projection divided by tokens.

A supposition counts only if two ranks give the logits and the gradients of every parameter of one process, at small
width in fp32. The ranks are threads of this process. Sequence parallelism is proved apart.
"""

import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

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
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.model.family import LayerRole
from steelyard.model.read import chain_from_config
from steelyard.model.split import ModelSplit, SplitKind
from steelyard.modules.experts import routed_experts
from steelyard.modules.kinds.tp import apply_tensor_parallel
from steelyard.modules.layers import ChainLayer, LayerContext, build_layer, side_inputs_of
from steelyard.modules.styles import STYLES
from steelyard.plan.strategy import Remat

RANKS = 2
_SMALL = 1e-3
"""Of the largest gradient: what a gradient of less is compared with."""
_PATIENCE_S = 120.0
"""After which a rank is taken to stand still, as one whose partner has failed does."""
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads")

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
                no_sp = prove({kind.name: styles}, True)
                found[kind.name] = kind.model_copy(
                    update={
                        "styles": dict(styles),
                        "no_tp": "",
                        "no_sp": f"not proved: {no_sp}" if no_sp else "",
                    }
                )
                break
            reasons.append(reason)
        else:
            why = "; ".join(dict.fromkeys(reasons)) or "no way is known to divide its modules"
            found[kind.name] = kind.model_copy(update={"no_tp": why})
    return tuple(found[kind.name] for kind in split.kinds)


def _suppositions(
    model: PreTrainedModel, split: ModelSplit, kind: SplitKind, layer: int, keywords: Mapping[str, str | None]
) -> Iterator[Styles]:
    if kind.role is not LayerRole.BLOCK:
        yield from _ends(model, split, kind, layer)
        return
    block_path = split.modules(layer)["block"]
    block = model.get_submodule(block_path)
    called = [path.removeprefix(f"{block_path}.") for path in keywords if path.startswith(f"{block_path}.")]
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = f"{split.blocks.removeprefix(f'{model.base_model_prefix}.')}.*."
    own = {path.removeprefix(prefix): style for path, style in plan.items() if path.startswith(prefix)}
    own = {path: style for path, style in own.items() if path in called and "experts" not in path.split(".")}
    if own and all(style in STYLES for style in own.values()):
        yield with_entries(block, own, called, {p: keywords[f"{block_path}.{p}"] for p in called})
    yield with_entries(
        block, styles_by_structure(block, called), called, {p: keywords[f"{block_path}.{p}"] for p in called}
    )


def styles_by_structure(block: nn.Module, called: Sequence[str]) -> dict[str, str]:
    """Of the matrices of one module the last one called is divided by its inputs, the others by their outputs."""
    matrices = [path for path in called if isinstance(block.get_submodule(path), nn.Linear)]
    of: dict[str, list[str]] = {}
    for path in matrices:
        of.setdefault(path.rpartition(".")[0], []).append(path)
    experts = {path.rpartition(".")[0] for path, each in block.named_modules() if each in routed_experts(block)}
    return {
        path: "rowwise" if path == group[-1] else "colwise"
        for parent, group in of.items()
        if len(group) > 1 and parent and not any(parent == each or parent.startswith(f"{each}.") for each in experts)
        for path in group
    }


def with_entries(
    block: nn.Module, matrices: Mapping[str, str], called: Sequence[str], keywords: Mapping[str, str | None]
) -> dict[str, str]:
    """The styles of a block: of its matrices, of the modules that hold some, of experts and of its norms."""
    styles = {f"block.{path}": style for path, style in matrices.items()}
    experts = {id(each) for each in routed_experts(block)}
    for name, child in block.named_children():
        divided = any(path == name or path.startswith(f"{name}.") for path in matrices)
        if name not in called:
            continue
        if any(id(each) in experts for each in child.children()):
            styles[f"block.{name}"] = "experts"
        elif divided and f"block.{name}" not in styles:
            styles[f"block.{name}"] = _gathering(child, keywords[name])
        elif not divided and all(parameter.dim() == 1 for parameter in child.parameters()) and _has_any(child):
            styles[f"block.{name}"] = "sequence"
    return styles


def _gathering(module: nn.Module, keyword: str | None) -> str:
    heads = next((name for name in _HEAD_COUNTS if isinstance(getattr(module, name, None), int)), None)
    of = f":{keyword}" if keyword else ""
    return f"gather_heads:{heads}{of}" if heads else f"gather{of}"


def _has_any(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _ends(model: PreTrainedModel, split: ModelSplit, kind: SplitKind, layer: int) -> Iterator[Styles]:
    """A table of tokens, and a projection to tokens; norms before it run on a part of the sequence."""
    styles: dict[str, str] = {}
    for name, path in split.modules(layer).items():
        module = model.get_submodule(path)
        if module is model.get_input_embeddings() and kind.role is LayerRole.EMBEDDING:
            styles[name] = "vocabulary"
        elif isinstance(module, nn.Linear) and module.out_features == split.vocab_size:
            styles[name] = "logits"
        elif kind.role is LayerRole.HEAD and all(parameter.dim() == 1 for parameter in module.parameters()):
            styles[name] = "sequence"
    if {"vocabulary", "logits"} & set(styles.values()):
        yield styles


def divided_sizes(model: PreTrainedModel, split: ModelSplit, kind: int, styles: Styles) -> tuple[tuple[str, int], ...]:
    """The sizes of a kind that a degree must divide, with their names for messages."""
    return tuple(_divided(model, split, split.layers.index(kind), styles)) if styles else ()


def _divided(model: PreTrainedModel, split: ModelSplit, layer: int, styles: Styles) -> Iterator[tuple[str, int]]:
    if layer in (0, len(split.layers) - 1):
        yield "vocabulary", split.vocab_size
        return
    config = model.config
    queries = getattr(config, "num_attention_heads", None)
    if isinstance(queries, int):
        yield "attention heads", queries
        keys = getattr(config, "num_key_value_heads", None)
        yield "key-value heads", keys if isinstance(keys, int) else queries
    block = model.get_submodule(split.modules(layer)["block"])
    experts = [each.num_experts for each in routed_experts(block)]
    if "experts" in styles.values() and experts:
        yield "experts", max(experts)
    yield from divided_rows(block, styles)


def divided_rows(block: nn.Module, styles: Styles) -> Iterator[tuple[str, int]]:
    """The inputs of the matrices of a block that are divided by them."""
    for path, style in styles.items():
        if style == "rowwise":
            name = path.removeprefix("block.")
            yield f"inputs of {name}", block.get_submodule(name).in_features


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedProof:
    """Two ranks against one process: a model of small width, prepared, and what it gives."""

    model: PreTrainedModel
    chain: ModelChain
    numbers: Sequence[int]
    """The layers of the chain that are run: embedding, head, and two blocks of each kind."""
    ids: Tensor
    expected: Mapping[str, Tensor]
    """The logits, and the gradient of every parameter by its path."""
    tolerance: float

    def __call__(self, styles: Mapping[str, Styles], sp: bool) -> str:
        """Why the styles by kind do not hold; empty where they do."""
        split = self.chain.split
        assert split is not None
        kinds = tuple(
            kind.model_copy(update={"styles": dict(styles[kind.name]), "no_tp": ""}) if kind.name in styles else kind
            for kind in split.kinds
        )
        chain = chain_from_config(
            self.chain.config, name=self.chain.name, split=split.model_copy(update={"kinds": kinds})
        )
        return on_two_ranks(lambda mesh: self._compared(chain, mesh, frozenset(styles), sp))

    def _compared(self, chain: ModelChain, mesh: DeviceMesh, divided: Collection[str], sp: bool) -> str:
        model = copy.deepcopy(self.model)
        layers, context = pieces_of(model, chain, self.numbers, self.ids)
        paths = {id(parameter): path for path, parameter in model.named_parameters()}
        places = [(layer, name, paths[id(each)]) for layer in layers for name, each in layer.named_parameters()]
        flow: Tensor = self.ids
        for layer in layers:
            cut = sp and layer.kind.name in divided
            if layer.kind.name in divided:
                apply_tensor_parallel(layer, model, chain, mesh, sp=sp)
            flow = layer.run_by_family(layer, _part(flow, mesh) if cut and flow.is_floating_point() else flow, context)
            flow = _whole(flow, mesh) if cut and not isinstance(flow, DTensor) else flow
        logits = flow.full_tensor() if isinstance(flow, DTensor) else flow
        logits = logits.view_as(self.expected["logits"])
        functional.cross_entropy(logits.flatten(0, -2), self.ids.flatten()).backward()
        found = {"logits": logits.detach()}
        for layer, name, path in places:
            gradient = layer.get_parameter(name).grad
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
    model: PreTrainedModel, chain: ModelChain, numbers: Iterable[int], ids: Tensor
) -> tuple[list[ChainLayer], LayerContext]:
    """Some layers of a split model, and what a forward pass through them carries along for token ids [B, S]."""
    layers = [build_layer(model, chain, number, Remat.NONE) for number in numbers]
    side = side_inputs_of(layers, model, chain, ids.device)(ids.shape[1], torch.float32, ids.device)
    return layers, LayerContext(side=side, config=model.config)


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], chain: ModelChain, tolerance: float) -> str:
    """Where logits or gradients differ by more than ``tolerance`` of the largest entry; empty where they do not.

    Gradients that are all but zero, as those of a key's bias, are compared with a thousandth of the largest.
    """
    wanted, sums = _joined(expected, chain), _joined(found, chain)
    largest = max(float(tensor.abs().max()) for path, tensor in wanted.items() if path != "logits")
    for path, tensor in wanted.items():
        if path not in sums or sums[path].shape != tensor.shape:
            return f"no gradient of {path}"
        error = float((tensor - sums[path]).abs().max()) / max(float(tensor.abs().max()), _SMALL * largest)
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


def _part(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(hidden, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()


def _whole(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(hidden, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()


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
