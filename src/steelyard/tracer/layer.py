"""Observation of one layer that runs forward and backward on fake tensors: the work and memory of one rank.

Selective remat runs as in training, with PyTorch's own contexts. Full remat needs no separate run: PyTorch recomputes
the layer up to where its last tensor is saved for backward, which the run without remat shows; the memory in use then
is bounded by the larger of that part of the forward pass and of the backward pass without remat.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from transformers import PreTrainedModel

from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.own import OwnSplit
from steelyard.modules.dimensions import divide_layer, exchange_alone
from steelyard.modules.experts import routed_experts
from steelyard.modules.freezing import rests_in
from steelyard.modules.layers import ChainLayer, Flow, LayerContext, as_flow, build_layer, shared_inputs_of, tensors_of
from steelyard.modules.levers import change_layer
from steelyard.modules.levers.train import added_that_read, cast_added
from steelyard.modules.model_inputs import blank_samples, decoder_inputs
from steelyard.modules.own_pieces import OwnBatch, tensors_of_batch
from steelyard.modules.pieces import SharedInputs, ShellPiece
from steelyard.modules.replicated import activation_dtype
from steelyard.modules.updates import local_part
from steelyard.plan.strategy import Remat, Strategy
from steelyard.precision import LayerPrecision
from steelyard.processes.group import fake_group
from steelyard.tracer.counting import OpCounter, OpCounts, Operations, live_bytes

ALONE = "alone"
"""Axis of this rank alone, in a fake world."""
STEP_COUNT_BYTES = 4
"""Bytes of AdamW's step count, which it keeps for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Work and memory of one rank for one layer at one number of samples."""

    held: dict[str, Any]
    """Parameter counts and bytes of buffers, by their names in `LayerProfile`."""
    plain: "CountedLayer"
    recomputed: dict[Remat, "Recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Differences under a remat choice: the additional work in backward, and the bytes held."""

    work: OpCounts
    saved_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int


@contextmanager
def fake_world(size: int) -> Iterator[DeviceMesh]:
    """Yield a one-axis mesh of ``size`` ranks in this process alone."""
    with fake_group(0, size):
        yield init_device_mesh("cpu", (size, 1), mesh_dim_names=("ranks", ALONE))["ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """Layer to observe and its setup: place in the chain, sequence length, precision, and what divides it."""

    chain: ModelChain
    layer: int
    seq_len: int
    precision: LayerPrecision
    mesh: DeviceMesh
    strategy: Strategy
    """Strategy of one level at most, over the ranks of ``mesh``."""
    model: PreTrainedModel
    """Whole model on the meta device, prepared by `steelyard.modules.build.prepare_model`; it is not changed."""
    exchanged: float | None = None
    """Pairs of token and expert that the rank computes, relative to those of its own tokens, if experts are divided
    over ranks; None if they are whole."""
    fp32_adapters: bool = False
    """Whether weights of adapters are in fp32 at any precision, so that adapters also compute in it."""
    seen: Operations = field(default_factory=Operations, repr=False, compare=False)
    """Operations that need not run again; share one between traced layers."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations while a layer computes."""
        return activation_dtype(self.precision)

    @property
    def role(self) -> LayerRole:
        """Role of the layer."""
        return self.chain.type_of(self.layer).role


def observe(traced: TracedLayer, sizes: tuple[int, ...]) -> list[Observation]:
    """Return one observation of the layer per number of samples."""
    with fake_layer(traced) as layer:
        side = shared_inputs(traced, layer)
        return [_observe_size(traced, layer, samples, side) for samples in sizes]


@contextmanager
def fake_layer(traced: TracedLayer) -> Iterator[ChainLayer]:
    """Yield the layer on fake tensors, divided by ``traced.strategy``, to be run within the context."""
    layer = copy.deepcopy(build_layer(traced.model, traced.chain, traced.layer, Remat.NONE))
    with FakeTensorMode(allow_non_fake_inputs=False), ExitStack() as stack:
        make_fake(layer, traced.dtype)
        if traced.fp32_adapters:
            cast_added(layer, traced.chain)
        divide_layer(layer, traced.chain, traced.strategy, traced.mesh)
        if traced.exchanged is not None:
            exchange_alone(layer, traced.mesh._get_root_mesh()[ALONE], received_share=traced.exchanged)
        else:
            change_layer(layer, traced.chain)
        if traced.strategy.tensor_degree > 1 and traced.role is LayerRole.HEAD:
            stack.enter_context(loss_parallel())
        if isinstance(layer.run_alone, ShellPiece):
            layer.run_alone.fill(torch.device("cpu"))  # once, not in every pass
        yield layer


def make_fake(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace meta tensors by fake ones on the CPU, with parameters in ``dtype``, in place."""
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            own_dtype = dtype if parameter.is_floating_point() else parameter.dtype
            fake = torch.empty(parameter.shape, dtype=own_dtype, device="cpu")
            owner.register_parameter(name, nn.Parameter(fake, requires_grad=parameter.requires_grad))
        for name, buffer in owner.named_buffers(recurse=False):
            rests = rests_in(f"{path}.{name}", buffer, dtype)
            owner._buffers[name] = torch.empty(buffer.shape, dtype=rests, device="cpu")
        for kept in (each for each in vars(owner).values() if type(each) is dict):  # such as indices of adapters
            kept |= {
                key: torch.empty(each.shape, dtype=each.dtype, device="cpu")
                for key, each in kept.items()
                if type(each) is Tensor
            }


def _observe_size(traced: TracedLayer, layer: ChainLayer, samples: int, side: SharedInputs) -> Observation:
    """Return the observation of a run without remat and, for a block, of one with selective remat.

    Parameters without gradients count as trained if the chain has no frozen ones.
    """
    plain = run_layer(traced, layer, samples, side)
    kept_bytes = plain.input_bytes + plain.label_bytes if plain.has_backward else 0
    again_bytes = plain.needed_peak_bytes + plain.output_bytes
    recomputed = {
        Remat.FULL: Recomputed(
            work=plain.needed,
            saved_bytes=kept_bytes,
            forward_transient_bytes=plain.forward_peak_bytes - kept_bytes,
            backward_transient_bytes=max(again_bytes, plain.backward_peak_bytes) - kept_bytes,
        )
    }
    if traced.role is LayerRole.BLOCK:
        layer.remat = Remat.SELECTIVE
        selective = run_layer(traced, layer, samples, side)
        layer.remat = Remat.NONE
        recomputed[Remat.SELECTIVE] = Recomputed(
            work=selective.backward.beyond(plain.backward),
            saved_bytes=selective.saved_bytes,
            forward_transient_bytes=selective.forward_peak_bytes - selective.saved_bytes,
            backward_transient_bytes=selective.backward_peak_bytes - selective.saved_bytes,
        )
    parameters = list(layer.parameters())
    experts = {parameter for each in routed_experts(layer) for parameter in each.parameters()}
    frozen = {each for each in parameters if traced.chain.freeze is not None and not each.requires_grad}
    counted = {"num": parameters, "expert": experts, "frozen": frozen, "frozen_expert": experts & frozen}
    held = {f"{part}_params": sum(local_part(each).numel() for each in of) for part, of in counted.items()}
    held["buffer_bytes"] = sum(buffer.nbytes for buffer in layer.buffers())
    held["buffer_bytes"] += STEP_COUNT_BYTES * (len(parameters) - len(frozen))
    return Observation(held=held, plain=plain, recomputed=recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLayer:
    """Counts of a forward and a backward pass, and the bytes alive in them (without parameters and gradients).

    ``needed`` is the part of the forward pass up to the last tensor saved for backward; ``label_bytes`` are those of
    the labels that the head reads; the others are as in `LayerProfile`.
    """

    forward: OpCounts
    needed: OpCounts
    backward: OpCounts
    input_bytes: int
    label_bytes: int
    output_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    needed_peak_bytes: int
    backward_peak_bytes: int
    adapter_inputs: int
    shared_adapter_inputs: int
    has_backward: bool


def shared_inputs(traced: TracedLayer, layer: ChainLayer) -> SharedInputs:
    """Return the inputs of a `fake_layer` other than the hidden state, the same for any number of samples."""
    device = torch.device("cpu")
    builder = shared_inputs_of([layer], traced.model, traced.chain, device)
    return builder(traced.seq_len, traced.dtype, device)


def run_layer(traced: TracedLayer, layer: ChainLayer, samples: int, side: SharedInputs) -> CountedLayer:
    """Run a `fake_layer` once forward and backward, with its `shared_inputs`."""
    context, flow = _inputs(traced, samples, side)
    labels = context.labels_BS if traced.role is LayerRole.HEAD else None
    beside = [each for part in getattr(layer.run_alone, "beside", ()) for each in part.buffers()]
    blocks = [traced.layer - 1] if traced.role is LayerRole.BLOCK else []
    read = [each for batch in context.batch.values() for each in tensors_of_batch(batch, blocks)]
    return count_passes(
        layer,
        lambda: tensors_of(layer(flow, context)),
        inputs=tensors_of(flow),
        constants=[*side.tensors(), *read, *beside],
        label_bytes=0 if labels is None else labels.nbytes,
        all_inputs=not traced.chain.type_of(traced.layer).needs_gradient,
        seen=traced.seen,
    )


def count_passes(
    module: nn.Module,
    call: Callable[[], tuple[Tensor, ...]],
    *,
    inputs: tuple[Tensor, ...],
    constants: Iterable[Tensor] = (),
    label_bytes: int = 0,
    all_inputs: bool = True,
    seen: Operations | None = None,
) -> CountedLayer:
    """Count one forward pass, which ``call`` runs, and its backward pass; ``constants`` are not counted as memory.

    Inputs that need no gradient count as saved if ``all_inputs`` do, or if autograd saves them; none count as saved if
    there is no backward pass.
    """
    for parameter in module.parameters():
        parameter.grad = None
    counter = OpCounter(seen)
    counter.ignore([*module.parameters(), *module.buffers(), *constants])
    counter.watch(inputs)
    input_ids = counter.storage_ids(inputs)
    needed, num_needed = OpCounts(), 0
    saves: Counter[int] = Counter()
    entered: list[tuple[int, int]] = []

    def save(tensor: Tensor) -> Tensor:
        nonlocal needed, num_needed
        needed, num_needed = counter.counts.copy(), len(counter.log)
        saves.update(counter.storage_ids([tensor]))
        return tensor

    def enter(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
        part = local_part(given[0])
        entered.extend((each, part.numel()) for each in counter.storage_ids([part]))

    with counter, ExitStack() as stack:
        for each in added_that_read(module):
            stack.callback(each.register_forward_pre_hook(enter).remove)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            outputs = call()
        forward, counter.counts = counter.counts, OpCounts()
        num_forward = len(counter.log)
        output_ids = counter.storage_ids(outputs)
        output_bytes = sum(output.nbytes for output in outputs)
        trained = [output for output in outputs if output.requires_grad]
        has_backward = bool(trained)
        gradients_of_outputs = [torch.empty_like(output) for output in trained]
        if has_backward:
            torch.autograd.backward(trained, gradients_of_outputs)
        gradients = counter.storage_ids(p.grad for p in module.parameters() if p.grad is not None)
    needed_ids = counter.storage_ids(each for each in inputs if all_inputs or each.requires_grad) | {*saves}
    not_saved = (output_ids | input_ids) - (needed_ids & input_ids if has_backward else set())
    del outputs, trained, gradients_of_outputs
    history = live_bytes(counter.log, without=gradients)
    uses = Counter(place for place, _ in entered)
    shared = {place: entries for place, entries in entered if saves[place] <= uses[place]}
    return CountedLayer(
        forward=forward,
        needed=needed,
        backward=counter.counts,
        input_bytes=sum(each.nbytes for each in inputs),
        label_bytes=label_bytes,
        output_bytes=output_bytes,
        saved_bytes=live_bytes(counter.log[:num_forward], without=not_saved)[-1],
        forward_peak_bytes=max(history[: num_forward + 1]),
        needed_peak_bytes=max(history[: num_needed + 1]),
        backward_peak_bytes=max(history[num_forward:]) if has_backward else 0,
        adapter_inputs=sum(entries for _, entries in entered),
        shared_adapter_inputs=sum(shared.values()),
        has_backward=has_backward,
    )


def _inputs(traced: TracedLayer, samples: int, side: SharedInputs) -> tuple[LayerContext, Flow]:
    """Return the context of a forward pass and the input of the layer."""
    chain, seq_len, model = traced.chain, traced.seq_len, traced.model
    batch = None
    if isinstance(chain.split, OwnSplit):
        read, device = model.blank_samples(samples), torch.device("cpu")
        batch = {traced.layer: OwnBatch(read, chain.split, side.of_samples, dtype=traced.dtype, device=device)}
    first, labels = blank_samples(chain, samples, seq_len)
    context = LayerContext(
        side=side,
        labels_BS=labels,
        num_targets=labels.numel(),
        decoder_ids=decoder_inputs(labels, model.config, chain.features) if chain.family.task.has_two_lists else None,
        batch=batch,
    )
    if traced.layer == 0:
        return context, first.to(traced.dtype) if first.is_floating_point() else first
    parts, read = traced.strategy.sequence_degree, chain.read(traced.layer, seq_len)
    needed = chain.type_of(traced.layer).needs_gradient or tuple(not each.whole for each in read)
    streams = (
        torch.empty(
            (samples, each.shape[0] // parts, *each.shape[1:]) if parts > 1 else (samples, *each.shape),
            dtype=getattr(torch, each.whole) if each.whole else traced.dtype,
            requires_grad=is_needed,
        )
        for each, is_needed in zip(read, needed, strict=True)
    )
    return context, as_flow(tuple(streams))
