"""Dry run of one rank of a plan on fake tensors, which reports the rank's peak memory in bytes by term.

The training code itself runs: `steelyard.runtime.parallel_model` over a process group that has ranks but no processes,
with tensors that have shapes but no memory. Any rank of any plan therefore runs on a laptop. Bytes are counted as
`steelyard.runtime.peak_memory` counts them in a real process.

Two steps run. The first creates the optimizer's states; the second represents every later step. Only as many
microbatches run as are needed to reach the steady state (see `_shortened`). The memory that each omitted microbatch
holds from the beginning to the end of a step is added to the result.

Each storage that is live at the peak belongs to one term:

| term                | storages                                                                               |
|---------------------|----------------------------------------------------------------------------------------|
| parameters          | this rank's shards, in fp32                                                            |
| gradients           | read by the optimizer, or kept from one microbatch to the next                         |
| optimizer           | optimizer states                                                                       |
| gathered parameters | unsharded parameters of layers that keep them between forward and backward             |
| activations         | inputs of a forward pass, and tensors created in it that are still live when it ends   |
| pipeline buffers    | gradients received from the next pipeline part, or sent to the previous one            |
| working set         | everything else                                                                        |

Gloo's reduce-scatter works on a copy of its input; if gloo is the backend, the dry run makes this copy too. Other
scratch memory inside an operation or a collective is not counted, as in a real process on the CPU. On GPUs,
communication runs on a separate stream and frees its buffers when it finishes, which may be later than here.

One rank represents all ranks with identical memory (`distinct_ranks`). The ranks of a stage run the same layers on the
same number of samples. They differ only if FSDP cannot divide a parameter's first dim evenly: chunks have equal size,
except that the last ones are smaller or empty. Routed experts are sharded along a dim that divides evenly, if there is
one (`steelyard.modules.experts.even_dim`); across the ranks that divide experts, the shares are always equal.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of fake tensors
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

from steelyard.errors import UserError
from steelyard.hardware import Backend
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.modules.build import build_meta_model, named_layer_modules, prepare_model
from steelyard.modules.experts import even_dim, routed_experts
from steelyard.modules.fake_op_cache import FakeOpCache
from steelyard.modules.gpu_kernels import as_kernels
from steelyard.modules.layers import Flow, tensors_of
from steelyard.modules.model_inputs import blank_samples
from steelyard.modules.own_proof import build_planned
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy, mesh_axes
from steelyard.processes.group import fake_group
from steelyard.runtime import loss_scale
from steelyard.runtime.data.tokens import Samples
from steelyard.runtime.mesh import build_mesh
from steelyard.runtime.optimizer import make_optimizers
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel, parallelize_on
from steelyard.runtime.peak_memory import TERMS, LiveStorages, Peak


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks of one stage with identical memory; ``rank`` is the first of them."""

    rank: int
    stage: int
    ranks: tuple[int, ...]


def distinct_ranks(plan: Plan, builder: str | None = None) -> tuple[RankGroup, ...]:
    """Return the groups of identical ranks of a plan, by stage; ``builder`` builds the user's own module, if any."""
    chain = plan.chain()
    sizes = _sizes(chain, build_planned(builder, plan).without_values() if builder else build_meta_model(chain))
    groups = []
    for stage, of in enumerate(plan.stages):
        first, last = of.ranks
        layers = [
            (chain.layers[layer], strategy)
            for part in of.parts
            for layer, strategy in enumerate(part.strategies, start=part.first_layer)
        ]
        alike: dict[tuple[int, ...], list[int]] = {}
        for place in range(last - first + 1):
            alike.setdefault(tuple(_shares(dict.fromkeys(layers), sizes, place)), []).append(first + place)
        groups += [RankGroup(rank=ranks[0], stage=stage, ranks=tuple(ranks)) for ranks in alike.values()]
    return tuple(groups)


_Sizes = dict[int, tuple[set[int], set[tuple[int, ...]]]]


def _sizes(chain: ModelChain, model: Any) -> _Sizes:
    """Return the first dims of parameters and the shapes of routed experts' parameters, by layer type."""
    sizes: _Sizes = {}
    for layer in range(chain.num_layers):
        if chain.layers[layer] not in sizes:
            modules = named_layer_modules(model, chain, layer).values()
            found = [each for module in modules for each in routed_experts(module)]
            experts = {parameter for each in found for parameter in each.parameters()}
            others = {p for module in modules for p in module.parameters()} - experts
            sizes[chain.layers[layer]] = {p.shape[0] for p in others}, {tuple(p.shape) for p in experts}
    return sizes


def _shares(layers: Collection[tuple[int, Strategy]], sizes: _Sizes, place: int) -> Iterator[int]:
    """Yield, for each sharded dim, the number of entries that the rank at ``place`` in its stage holds."""
    for layer_type, strategy in layers:
        first_dims, of_experts = sizes[layer_type]
        divided = {size // strategy.tensor_degree for size in first_dims if size % strategy.tensor_degree == 0}
        cuts = [(size, strategy.shard_axes) for size in sorted(first_dims | divided)]
        for first, *others in sorted(of_experts):
            own = first // (strategy.tensor_degree * strategy.expert_degree)
            if even_dim((own, *others), strategy.expert_state_shards) is None:
                cuts.append((own, strategy.expert_state_axes[1]))
        axis_sizes = mesh_axes(strategy.num_devices)
        coordinates = np.unravel_index(place, axis_sizes)
        for size, axes in cuts:
            shards = [axis_sizes[axis] for axis in axes]
            chunk = -(-size // prod(shards))
            shard = int(np.ravel_multi_index([coordinates[axis] for axis in axes], shards))
            yield min(max(size - chunk * shard, 0), chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank: the peak of the first step and of every later step.

    ``wall_s`` is the duration of the dry run in seconds, ``host_bytes`` the peak in host memory.
    """

    rank: int
    first_step: Peak
    later_steps: Peak
    wall_s: float
    host_bytes: int = 0


def dry_run(
    plan: Plan, rank: int, *, backend: Backend, every_microbatch: bool = False, builder: str | None = None
) -> RankMemory:
    """Return the memory of one rank of a plan; ``builder`` builds the user's own module, if any.

    ``backend`` is the communication backend of real processes. ``every_microbatch`` runs all microbatches, including
    those that repeat others. Raises `UserError` if this process already has a process group.
    """
    started_s = time.perf_counter()
    whole, plan = plan, plan if every_microbatch else _shortened(plan, rank)
    chain = plan.chain()
    with _fake_world(rank, plan.num_devices):
        mesh = build_mesh(plan, "cpu")
        own = build_planned(builder, plan) if builder else None
        meta_model = own.without_values() if own else build_meta_model(chain)
        prepare_model(meta_model, chain)  # outside fake mode: a fake parameter cannot be given memory later
        with _fake_tensors(backend), LiveStorages([], _SEEN) as storages:
            model = parallelize_on(mesh, torch.device("cpu"), meta_model, plan, seed=0)
            read = own.blank_samples if own else lambda count: _blank(model, count)
            peaks = _two_steps(model, storages, read)
        left_out = whole.num_microbatches - plan.num_microbatches
        first, later = (_with_microbatches(peak, left_out, model) for peak in peaks)
    took_s = time.perf_counter() - started_s
    return RankMemory(rank=rank, first_step=first, later_steps=later, wall_s=took_s, host_bytes=storages.host_bytes)


def dry_run_all(
    plan: Plan,
    ranks: Sequence[int],
    *,
    backend: Backend,
    num_processes: int,
    every_microbatch: bool = False,
    builder: str | None = None,
) -> Iterator[RankMemory]:
    """Yield the memory of several ranks in their order, using up to ``num_processes`` processes."""
    work = partial(dry_run, plan, backend=backend, every_microbatch=every_microbatch, builder=builder)
    num_processes = min(num_processes, len(ranks))
    if num_processes == 1:
        yield from map(work, ranks)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, ranks)


_SEEN: FakeOpCache[None] = FakeOpCache()
"""Cache of operations in this process's dry runs whose results depend only on their arguments."""


def _shortened(plan: Plan, rank: int) -> Plan:
    """Return the plan with fewer microbatches of the same size, without those that repeat others.

    On one stage, the first microbatch creates the gradients, the last one reduces them, and all others are identical.
    On several stages, the schedule provides the number.
    """
    pipeline, stage = plan.pipeline, plan.stage_of(rank)
    fewest = 3 if pipeline.num_stages == 1 else pipeline.schedule.steady_from(pipeline, stage)
    if fewest >= plan.num_microbatches:
        return plan
    return plan.model_copy(
        update={"num_microbatches": fewest, "global_batch": fewest * plan.microbatch_samples, "prediction": None}
    )


def _with_microbatches(peak: Peak, left_out: int, model: ParallelModel) -> Peak:
    """Return the peak with the memory that omitted microbatches hold throughout a step: their token ids."""
    terms = Counter(peak.terms)
    samples = len(model.input_samples() or []) + len(model.label_samples() or [])
    token_bytes = samples * (model.plan.seq_len + 1) * torch.long.itemsize
    terms["working set"] += token_bytes * left_out // model.plan.num_microbatches
    return Peak(terms={name: terms[name] for name in TERMS if terms[name]}, where=peak.where)


def _two_steps(model: ParallelModel, storages: LiveStorages, read: Callable[[int], Any]) -> list[Peak]:
    """Return the peaks of the first and the second step; ``read`` returns a given number of samples."""
    optimizers = make_optimizers(model, TrainOptions())
    storages.assign("parameters", model.parameters())
    _follow_passes(model, storages)
    peaks = []
    for step in range(2):
        storages.begin()
        storages.place = "preparing the step"
        model.train_step(lambda samples: read(len(samples)))
        storages.assign("gradients", _gradients(model))
        storages.place = "clipping gradients"
        model.clip_gradients(1.0)
        storages.place = "optimizer"
        for optimizer in optimizers:
            with mock.patch.object(Tensor, "item", return_value=1.0):  # for norms that an optimizer reads
                optimizer.step()
            optimizer.zero_grad()
        states = (state.values() for optimizer in optimizers for state in optimizer.state.values())
        storages.assign("optimizer", (each for of_one in states for each in of_one if isinstance(each, Tensor)))
        if step == 0:
            for term, tensors in _gathered(model):
                storages.assign(term, tensors)
        peaks.append(storages.peak())
    return peaks


def _blank(model: ParallelModel, num_samples: int) -> Tensor | Samples:
    """Return blank samples as the data reader does: for next-token prediction, inputs and labels in one tensor."""
    if model.chain.family.task is Task.CAUSAL_LM:
        return torch.zeros((num_samples, model.plan.seq_len + 1), dtype=torch.long)
    inputs, labels = blank_samples(model.chain, num_samples, model.plan.seq_len)
    return Samples(inputs=inputs, labels=labels)


def _follow_passes(model: ParallelModel, storages: LiveStorages) -> None:
    """Register hooks that tell ``storages`` which layer runs and which tensors remain after a forward pass."""
    born = 0

    def exchanged(gradient: Tensor) -> None:
        storages.assign("pipeline buffers", [gradient])

    def forward_begins(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal born
        born = storages.num_born
        storages.assign("gradients", _unsharded_gradients(model))
        arrived = [each for each in inputs if each.requires_grad]
        storages.assign("activations", arrived)
        for each in arrived:
            each.register_post_accumulate_grad_hook(lambda leaf: exchanged(leaf.grad))

    def forward_ends(_module: nn.Module, _inputs: Any, output: Flow) -> None:
        replicas = (replica for chunk in model.chunks for replica in chunk.replicas)
        storages.assign("gathered parameters", (each for replica in replicas for each in replica.copies()))
        storages.assign_born_since(born)
        for each in tensors_of(output):
            if each.requires_grad and each.dim():
                each.register_hook(exchanged)

    for chunk in model.chunks:
        chunk.register_forward_pre_hook(forward_begins)
        chunk.register_forward_hook(forward_ends)

    def is_at(place: str, *_: Any) -> None:
        storages.place = place

    def layer_ends(name: str, _module: nn.Module, _inputs: Any, output: Flow) -> None:
        last = tensors_of(output)[0]
        if last.requires_grad:
            last.register_hook(partial(is_at, f"backward of {name}"))

    for number, layer in model.layers.items():
        name = model.chain.layer_name(int(number))
        layer.register_forward_pre_hook(partial(is_at, f"forward of {name}"))
        layer.register_forward_hook(partial(layer_ends, name))


def _gradients(model: ParallelModel) -> Iterator[Tensor]:
    yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def _unsharded_gradients(model: ParallelModel) -> Iterator[Tensor]:
    """Yield unreduced gradients of earlier microbatches, of replicated and of sharded layers."""
    yield from _gradients(model)
    for chunk in model.chunks:
        for replica in chunk.replicas:
            yield from replica.kept_gradients()
    for _, group in _fsdp_groups(model):
        if group._partial_reduce_output is not None:  # of shards, summed over replicas when the step ends
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            whole = parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad
            yield from (each for each in whole if each is not None)


def _gathered(model: ParallelModel) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the unsharded parameters of each sharded layer, with the term that counts them."""
    for strategy, group in _fsdp_groups(model):
        tensors = [each for parameter in group.fsdp_params for each in parameter.all_gather_outputs]
        unsharded = (getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params)
        tensors += [each for each in unsharded if each is not None]
        yield "gathered parameters" if strategy.keeps_gathered else "working set", tensors


def _fsdp_groups(model: ParallelModel) -> Iterator[tuple[Strategy, Any]]:
    """Yield FSDP's parameter groups of each sharded layer of this rank, with the layer's strategy."""
    for name, layer in model.layers.items():
        if isinstance(layer, FSDPModule):
            for group in layer._get_fsdp_state()._fsdp_param_groups:
                yield model.plan.strategies[int(name)], group


@contextmanager
def _fake_world(rank: int, size: int) -> Iterator[None]:
    """Create a `fake_group` for one rank; usable for several ranks in sequence."""
    if dist.is_initialized():
        raise UserError(
            field="check",
            found="a process group in this process",
            expected="a process without one, because a dry run creates its own fake group",
            hint="run the check in another process",
        )
    with fake_group(rank, size):
        _clear_sharding_prop_cache()  # its entries name the process groups of the previous rank
        try:
            yield
        finally:
            _clear_sharding_prop_cache()


@contextmanager
def _fake_tensors(backend: Backend) -> Iterator[None]:
    """Create all tensors without memory in this context, except in the few places that need real numbers."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))

        init = DeviceMesh.__init__

        def with_real_tensors(*arguments: Any, **keywords: Any) -> None:
            with _disable_current_modes():  # FSDP creates a mesh from a mesh to place parameters, and reads it
                init(*arguments, **keywords)

        stack.enter_context(mock.patch.object(DeviceMesh, "__init__", with_real_tensors))
        stack.enter_context(
            mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **_options: tensor)
        )
        stack.enter_context(mock.patch.object(loss_scale, "any_rank_has", return_value=False))
        stack.enter_context(mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", _vote_alone))
        batch = schedules._batch_p2p

        def begin(operations: list[dist.P2POp], desc: str | None = None) -> list[_WorkWithTensors]:
            return [_WorkWithTensors(work, [each.tensor for each in operations]) for work in batch(operations, desc)]

        stack.enter_context(mock.patch.object(schedules, "_batch_p2p", begin))
        if Backend(backend) is not Backend.GLOO:  # on GPUs
            stack.enter_context(as_kernels())
        if Backend(backend).copies_what_it_scatters:
            reduce_scatter = dist.reduce_scatter_single

            def with_scratch(**arguments: Any) -> None:
                scratch = arguments["input"].clone()  # gloo copies the whole tensor while it works
                reduce_scatter(**arguments)
                del scratch

            stack.enter_context(mock.patch.object(dist, "reduce_scatter_single", with_scratch))
        yield


class _WorkWithTensors:
    """A transfer that keeps its tensors alive until it is waited for, as gloo does and fake transfers do not.

    Interleaved schedules wait for their sends only at the end of the step.
    """

    def __init__(self, work: dist.Work, tensors: list[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Wait for the transfer and release its tensors."""
        self._work.wait()
        self._tensors = []


def _vote_alone(_schedule: Any, stages: list[Any], has_backward: bool, _p2p_done: bool) -> None:
    """Let this rank's stages decide alone whether shapes are static.

    The real vote reads numbers sent by neighbours. The runtime gives every stage its shapes, so all votes are equal.
    """
    for stage in stages:
        if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
            raise RuntimeError("the runtime must give the pipeline the shapes that stages exchange")
        stage._inference_mode = InferenceMode.STATIC
