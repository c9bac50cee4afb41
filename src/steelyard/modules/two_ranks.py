"""Comparison of two ranks with one process: logits and the gradients of every parameter, at small width in fp32.

The ranks are threads of this process, each with its own process group.
"""

import copy
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

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

from steelyard.errors import first_line
from steelyard.model.chain import ModelChain
from steelyard.model.family import KV_HEADS
from steelyard.model.read import chain_from_config
from steelyard.model.split import ModelSplit, SplitLayerType, is_below_any
from steelyard.modules.context_attention import in_order, natural_order, rank_order
from steelyard.modules.dimensions.cp import apply_context_parallel, own_context
from steelyard.modules.dimensions.tp import apply_tensor_parallel
from steelyard.modules.layers import ChainLayer, Flow, LayerContext, as_flow, build_layer, shared_inputs_of, tensors_of
from steelyard.modules.split_tp import RANKS, Styles, divided_sizes
from steelyard.modules.updates import whole_of
from steelyard.plan.strategy import Remat

_SMALL, _SMALL_OF_ONE = 1e-3, 1e-2
"""Lower bounds of the scale of gradients of several entries and of one, relative to the largest gradient."""

_SAME = (PreTrainedConfig, int, float, str)
"""Types of the values that copies of a model share."""
LayerTypeOf = TypeVar("LayerTypeOf", bound=SplitLayerType)
_PATIENCE_S = 120.0
"""Seconds after which a rank counts as stuck, as it is when its partner has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedProof:
    """Two ranks compared with one process: a small, prepared model and its expected results."""

    model: PreTrainedModel
    chain: ModelChain
    numbers: Sequence[int]
    """Layers of the chain that are run: embedding, head, and two blocks of each type."""
    ids: Tensor
    decoder_ids: Tensor | None
    labels: Tensor
    expected: Mapping[str, Tensor]
    """Logits, and the gradient of every parameter by its path."""
    tolerance: float

    def __call__(self, styles: Mapping[str, Styles], sp: bool) -> str:
        """Return why the styles by layer type do not hold; empty if they do."""
        split = self._split
        layer_types = tuple(
            layer_type.model_copy(
                update={
                    **{"styles": dict(styles[layer_type.name]), "no_tp": "", "tp_shares": (KV_HEADS,)},
                    "tp_divides": divided_sizes(self.model, split, number, styles[layer_type.name]),
                }
            )
            if layer_type.name in styles
            else layer_type
            for number, layer_type in enumerate(split.kinds)
        )
        chain = chain_from_config(
            self.chain.config, name=self.chain.name, split=split.model_copy(update={"kinds": layer_types})
        )
        return on_two_ranks(lambda mesh: self._compared(chain, mesh, frozenset(styles), sp=sp))

    def by_tokens(self, layer_types: Collection[str]) -> str:
        """Return why ranks may not each compute layers of these types for their own tokens; empty if they may."""
        return on_two_ranks(lambda mesh: self._compared(self.chain, mesh, frozenset(), by_tokens=layer_types))

    @property
    def _split(self) -> ModelSplit:
        assert isinstance(self.chain.split, ModelSplit), "a user's own module is proved block by block"
        return self.chain.split

    def _compared(
        self,
        chain: ModelChain,
        mesh: DeviceMesh,
        divided: Collection[str],
        *,
        sp: bool = False,
        by_tokens: Collection[str] = (),
    ) -> str:
        model = _copy_of(self.model)
        layers, context = pieces_of(model, chain, self.numbers, self.ids, self.decoder_ids)
        paths = {id(parameter): path for path, parameter in parameters_by_path(model, self._split).items()}
        places = [(layer, name, paths[id(each)]) for layer in layers for name, each in layer.named_parameters()]
        flow: Flow = self.ids
        for layer in layers:
            cut = sp and layer.layer_type.name in divided
            if layer.layer_type.name in divided:
                apply_tensor_parallel(layer, chain, mesh, sp=sp)
            run = partial(layer.run_alone, layer)
            if layer.layer_type.name in by_tokens:
                apply_context_parallel(layer, mesh, "gather")
                run = partial(_by_tokens, run, mesh)
            flow = layer.within(flow, context, partial(_in_parts, run, mesh) if cut else run)
        (logits,) = map(whole_of, tensors_of(flow))
        logits = logits.view_as(self.expected["logits"])
        loss_of(logits, self.labels).backward()
        found = {"logits": logits.detach()}
        for layer, name, path in places:
            gradient = layer.get_parameter(name).grad
            if gradient is not None and layer.layer_type.name in by_tokens:
                dist.all_reduce(gradient, group=mesh.get_group())
            if gradient is not None:
                found[path] = whole_of(gradient)
        return difference(self.expected, found, chain, self.tolerance)


def tried(suppositions: Iterable[Styles], prove: Callable[[Styles], str]) -> list[tuple[Styles, str]]:
    """Return the suppositions up to the first that holds, each with why it does not (empty for the one that does)."""
    found: list[tuple[Styles, str]] = []
    for styles in suppositions:
        found.append((styles, prove(styles)))
        if not found[-1][1]:
            break
    return found


def undivided(layer_type: LayerTypeOf, reasons: Iterable[str]) -> LayerTypeOf:
    """Return the layer type marked as not tensor-parallel, with these reasons."""
    why = "; ".join(dict.fromkeys(reasons)) or "no way is known to divide its modules"
    return layer_type.model_copy(update={"no_tp": why})


def gradients_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return the whole gradient of each parameter that has one, by its path."""
    return {path: whole_of(each.grad).clone() for path, each in parameters if each.grad is not None}


def on_two_ranks(compared: Callable[[DeviceMesh], str]) -> str:
    """Return the fault that ``compared`` finds on either of two ranks, which are threads; empty if it finds none.

    The first rank's reason takes precedence, whichever ends first, so that every run gives the same one.
    """
    outcomes: dict[int, str] = {}
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
            outcomes[rank] = compared(init_device_mesh("cpu", (RANKS,)))
        except SystemExit:  # a rank ends this way if its partner has failed
            pass
        except Exception as error:
            outcomes[rank] = f"it raises {type(error).__name__} ({first_line(error)[:120]})"
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with _threaded_groups():
        ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(_PATIENCE_S)
    reasons = [outcomes[rank] for rank in sorted(outcomes) if outcomes[rank]]
    return reasons[0] if reasons else "" if len(outcomes) == RANKS else "it does not terminate"


def _copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy like `copy.deepcopy`'s, without its time for empty dictionaries of hooks; configs are shared."""
    memo: dict[int, Any] = {id(module): module.__new__(type(module)) for module in model.modules()}
    for module in model.modules():
        own = vars(memo[id(module)])
        for name, value in vars(module).items():
            if value is None or isinstance(value, _SAME):
                own[name] = value
            elif isinstance(value, (dict, set)) and not value:
                own[name] = value.copy()
            else:
                own[name] = copy.deepcopy(value, memo)
    return memo[id(model)]


def pieces_of(
    model: PreTrainedModel,
    chain: ModelChain,
    numbers: Iterable[int],
    ids: Tensor,
    decoder_ids: Tensor | None,
    *,
    model_kwargs: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[list[ChainLayer], LayerContext]:
    """Return some layers of a split model, and the context of a forward pass through them for token ids [B, S].

    ``model_kwargs`` are arguments that differ between samples (`PER_SAMPLE`).
    """
    numbers = list(numbers)
    layers = [build_layer(model, chain, number, Remat.NONE) for number in numbers]
    split = chain.split
    if isinstance(split, ModelSplit) and split.streams:
        for layer, (before, number) in zip(layers[1:], pairwise(numbers), strict=True):
            layer.entering, layer.past = split.places(number, before)
    tokens = (ids if decoder_ids is None else decoder_ids).shape[1]
    side = shared_inputs_of(layers, model, chain, ids.device)(tokens, torch.float32, ids.device, model_kwargs)
    return layers, LayerContext(side=side, decoder_ids=decoder_ids, model_kwargs=model_kwargs)


def run_pieces(
    model: PreTrainedModel,
    chain: ModelChain,
    numbers: Iterable[int],
    ids: Tensor,
    decoder_ids: Tensor | None,
    **given: Mapping[str, Tensor],
) -> Tensor:
    """Return the logits that some layers of a split model give together; arguments as of `pieces_of`."""
    layers, context = pieces_of(model, chain, numbers, ids, decoder_ids, **given)
    flow: Flow = ids
    for layer in layers:
        flow = layer.within(flow, context, partial(layer.run_alone, layer))
    (logits,) = tensors_of(flow)
    return logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the logits of all places."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def parameters_by_path(model: PreTrainedModel, split: ModelSplit) -> dict[str, nn.Parameter]:
    """Return every parameter once, by its first path that lies in a layer of the split."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    inside = [path for path in split.paths if path not in split.holders]
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if is_below_any(path, inside) or path.rpartition(".")[0] in split.holders:
            found.setdefault(id(parameter), (path, parameter))
    return dict(found.values())


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], chain: ModelChain, tolerance: float) -> str:
    """Return where logits or gradients differ by more than ``tolerance`` of the largest entry; empty if they do not.

    Near-zero gradients, such as those of a key's bias, are compared with a thousandth of the largest gradient; those of
    a single entry, such as a scale, in which many terms cancel, with a hundredth.
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
            return f"{what} differs by {error:.0e} relative to its largest entry"
    return ""


def _joined(results: Mapping[str, Tensor], chain: ModelChain) -> dict[str, Tensor]:
    """Return the results with the gradients of all copies of a shared parameter added up."""
    sums = dict(results)
    for copies in chain.split.shared:
        given = [sums.pop(path) for _, path in copies if path in sums]
        sums |= {copies[0][1]: sum(given[1:], start=given[0])} if given else {}
    return sums


def _in_parts(run: Callable[[Flow, LayerContext], Flow], mesh: DeviceMesh, flow: Flow, context: LayerContext) -> Flow:
    """Run a layer on this rank's part of the sequence and return the whole result."""
    entering = as_flow(tuple(_part(each, mesh) if each.is_floating_point() else each for each in tensors_of(flow)))
    made = tensors_of(run(entering, context))
    return as_flow(tuple(each if isinstance(each, DTensor) else _whole(each, mesh) for each in made))


def _part(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(hidden, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()


def _whole(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(hidden, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()


def _by_tokens(run: Callable[[Flow, LayerContext], Flow], mesh: DeviceMesh, flow: Flow, context: LayerContext) -> Flow:
    """Run a layer on this rank's tokens, in head-tail order; return the results of all ranks in their natural order."""
    ranked = in_order(flow, rank_order(mesh.size()))
    made = _whole(run(_part(ranked, mesh), own_context(context, mesh)), mesh)
    return in_order(made, natural_order(mesh.size()))


@contextmanager
def _threaded_groups() -> Iterator[None]:
    """Make the threads of this process ranks within this context, each with its own process group."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    ProcessLocalGroup.reset()
    _install_threaded_pg()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level, excepthook = logger.level, sys.excepthook
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        sys.excepthook = excepthook  # of torch, which puts the rank before every line of a traceback
        logger.setLevel(level)
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
