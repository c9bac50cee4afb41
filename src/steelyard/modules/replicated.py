"""Data parallelism around one layer: sharded by FSDP2, or replicated, with gradients summed over ranks once per step.

Both share precision, gradient accumulation and the kind of parameter that an optimizer sees. A rank's loss is already
divided by the global number of tokens, so gradients are summed over ranks, not averaged; gloo has no scaled sum, hence
the plain one.

FSDP2's `replicate` treats a layer as one with a shard group of one rank: it copies all parameters before each forward
pass and runs hooks around every pass. Here a replicated layer computes directly on its parameters, or in 16 bits on a
copy that lives from the first forward pass of a step to the last backward pass. The optimizer sees what it would see
with FSDP2: parameters and gradients in fp32, as DTensors over the data axis and, if there is one, the tensor axis. When
a backward pass has made all gradients of a layer, they are added to one buffer and freed. After the last pass of a step
the ranks sum the buffer, while earlier layers still run their backward pass, and its parts are the gradients.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate

from steelyard.modules.dimensions import divided_parameters, shard_placement
from steelyard.modules.experts import routed_experts
from steelyard.modules.host_memory import rest_on_host
from steelyard.modules.layers import ChainLayer, Flow, LayerContext, as_flow, tensors_of
from steelyard.modules.updates import local_part
from steelyard.precision import DTYPES, Precision


class Replica:
    """This rank's replica of a layer, made in place: while the layer computes, its parameters are the replica's.

    ``others`` gives the mesh of parameters that are replicated over ranks other than those of ``mesh``.
    """

    def __init__(
        self,
        layer: ChainLayer,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        others: Mapping[nn.Parameter, DeviceMesh] | None = None,
    ) -> None:
        self._dtype = dtype
        meshes = others or {}
        made = {id(parameter): _Parameter(parameter, meshes.get(parameter, mesh)) for parameter in layer.parameters()}
        self._hold(list(made.values()))
        self._places = [
            (module._parameters, name, made[id(parameter)])
            for module in layer.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        for parameters, name, each in self._places:
            parameters[name] = each.seen
        self._compute, layer.compute = layer.compute, self._compute_on_own
        layer.own_parameters = self._own_parameters
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the last gradient of a step is made."""
        self._num_made = self._num_awaited = 0

    def _hold(self, parameters: "list[_Parameter]") -> None:
        self._parameters = parameters
        self._trained = [each for each in parameters if each.seen.requires_grad]
        by_mesh: dict[DeviceMesh, list[_Parameter]] = {}
        for each in self._trained:
            by_mesh.setdefault(each.replicated_over, []).append(each)
        self._sums = [_GradientSum(alike) for alike in by_mesh.values()]

    def share(self, mine: nn.Parameter, other: "Replica", theirs: nn.Parameter) -> None:
        """Compute on ``theirs`` of another replica in place of ``mine``, which has the same values.

        The other layer must run before this one in every pass; it collects the gradients of both.
        """
        kept = next(each for each in other._parameters if each.seen is theirs)
        self._places = [
            (parameters, name, kept if each.seen is mine else each) for parameters, name, each in self._places
        ]
        for parameters, name, each in self._places:
            parameters[name] = each.seen
        self._hold([each for each in self._parameters if each.seen is not mine])

    def begin_step(self, num_backwards: int) -> None:
        """Prepare for a step of this many backward passes."""
        self._free_own()
        self._num_made, self._num_awaited = 0, num_backwards * len(self._trained)

    @property
    def has_trained(self) -> bool:
        """Whether any of its parameters is trained."""
        return bool(self._trained)

    @property
    def is_ready(self) -> bool:
        """Whether all gradients of the step are made."""
        return self._num_made == self._num_awaited

    def collect(self) -> None:
        """Add the gradients made so far to the buffer, for a pass that does not make all gradients of the layer."""
        for each in self._sums:
            each.collect()

    @torch.no_grad()
    def reduce(self) -> None:
        """Start summing the gradients over the ranks; missing gradients count as zero."""
        for each in self._sums:
            each.collect_last()
        self._free_own()
        for each in self._sums:
            each.reduce()

    def finish(self) -> None:
        """Wait for the sums and add them to the gradients that the optimizer sees."""
        for each in self._sums:
            each.finish()
        self._free_own()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer sees."""
        return [each.seen for each in self._parameters]

    def copies(self) -> list[Tensor]:
        """Return the compute-dtype copies of parameters that the layer has now, if it computes on copies."""
        own = ((each, each.own.detach()) for each in self._parameters if each.own is not None)
        return [copy for each, copy in own if copy.dtype != each.local.dtype]

    def kept_gradients(self) -> list[Tensor]:
        """Return the gradients that earlier backward passes of the step have left."""
        late = [each.late for each in self._trained if each.late is not None]
        return [each.buffer for each in self._sums if each.buffer is not None] + late

    def _compute_on_own(self, inputs: Flow, context: LayerContext) -> Flow:
        cast = tuple(each.to(self._dtype) if each.is_floating_point() else each for each in tensors_of(inputs))
        with self._own_parameters():
            return self._compute(as_flow(cast), context)

    @contextmanager
    def _own_parameters(self) -> Iterator[None]:
        for parameters, name, each in self._places:
            parameters[name] = each.make_own(self._dtype, self._gradient_is_made) if each.own is None else each.own
        try:
            yield
        finally:
            for parameters, name, each in self._places:
                parameters[name] = each.seen

    def _free_own(self) -> None:
        for each in self._parameters:
            each.free_own()

    def _gradient_is_made(self, _own: Tensor) -> None:
        self._num_made += 1
        if self.is_ready:
            self.on_ready()
        elif self._num_made % len(self._trained) == 0:
            self.collect()


class _GradientSum:
    """One buffer for the gradients of parameters that are replicated over the same ranks, which sum it."""

    def __init__(self, parameters: Sequence["_Parameter"]) -> None:
        self._parameters = parameters
        mesh = parameters[0].replicated_over
        self._group = mesh.get_group() if mesh.size() > 1 else None
        self.buffer: Tensor | None = None
        self._work: dist.Work | None = None

    @torch.no_grad()
    def collect(self) -> Tensor:
        """Return the buffer, after adding the gradients that autograd has made since the last call."""
        found = [each.take_gradient() for each in self._parameters]
        write = torch._foreach_add_
        if self.buffer is None:
            write = torch._foreach_copy_
            first = self._parameters[0].local
            self.buffer = first.new_empty(sum(each.local.numel() for each in self._parameters))
            for part, gradient in zip(self._parts(self.buffer), found, strict=True):
                if gradient is None:
                    part.zero_()
        parts = [part for part, gradient in zip(self._parts(self.buffer), found, strict=True) if gradient is not None]
        if parts:
            write(parts, [gradient for gradient in found if gradient is not None])
        return self.buffer

    def collect_last(self) -> None:
        """Collect, and add the gradients that tensor-parallel ranks sum once per step."""
        total = self.collect()
        for each, part in zip(self._parameters, self._parts(total), strict=True):
            if each.late is not None:
                part.add_(each.late.redistribute(placements=each._tensor_placements).to_local())
                each.late = None

    def reduce(self) -> None:
        """Start summing the buffer over the ranks."""
        if self._group is not None:
            self._work = dist.all_reduce(self.buffer, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum and add it to the gradients that the optimizer sees."""
        if self._work is not None:
            self._work.wait()
        assert self.buffer is not None, "finished gradients were reduced"
        for each, part in zip(self._parameters, self._parts(self.buffer), strict=True):
            each.add_gradient(part)
        self.buffer = self._work = None

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer.split([each.local.numel() for each in self._parameters])
        return [part.view_as(each.local) for part, each in zip(parts, self._parameters, strict=True)]


class Replicas:
    """Replicas of a part of the pipeline, in the order of the chain.

    All ranks reduce them in one order, from the last layer to the first, in whatever order their gradients are made.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._all = tuple(reversed(replicas))
        self._replicas = tuple(replica for replica in self._all if replica.has_trained)
        self._num_reduced = 0
        for replica in self._replicas:
            replica.on_ready = self._reduce_ready

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def begin_step(self, num_backwards: int) -> None:
        """Prepare for a step of this many backward passes."""
        self._num_reduced = 0
        for replica in self._replicas:
            replica.begin_step(num_backwards)

    def end_step(self) -> None:
        """Give all parameters their gradients after the backward passes have ended."""
        for replica in self._replicas[self._num_reduced :]:
            replica.reduce()
        for replica in self._all:
            replica.finish()

    def _reduce_ready(self) -> None:
        while self._num_reduced < len(self._replicas) and self._replicas[self._num_reduced].is_ready:
            self._replicas[self._num_reduced].reduce()
            self._num_reduced += 1


class _Parameter:
    """A parameter as the optimizer sees it, and as the layer computes on it."""

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        self._size = {"shape": parameter.shape, "stride": parameter.stride()}
        self.replicated_over = mesh
        self._mesh, self._placements = mesh, (Replicate(),)
        self._tensor_mesh: DeviceMesh | None = None
        """Axis over which tensors are divided, if there is one."""
        self._tensor_placements: tuple[Placement, ...] = ()
        local = parameter.detach()
        if isinstance(local, DTensor):
            self._tensor_mesh, self._tensor_placements = local.device_mesh, local.placements
            self._mesh = DeviceMesh._concatenate([mesh, local.device_mesh])
            self._placements = (Replicate(), *local.placements)
            local = local.to_local()
        self.local = local.clone(memory_format=torch.contiguous_format)
        """This rank's part, which `seen` and, in fp32, `own` view; a copy because layers may share a parameter."""
        self.seen = nn.Parameter(self._shown(self.local), requires_grad=parameter.requires_grad)
        self.own: nn.Parameter | None = None
        self.late: DTensor | None = None
        """Gradient that tensor-parallel ranks have yet to sum, which they do once per step."""

    @torch.no_grad()
    def make_own(self, dtype: torch.dtype, on_gradient: Callable[[Tensor], None]) -> nn.Parameter:
        """Make the parameter that the layer computes on."""
        own = self.local.to(dtype)
        if self._tensor_mesh is not None:
            own = DTensor.from_local(own, self._tensor_mesh, self._tensor_placements, run_check=False, **self._size)
        self.own = nn.Parameter(own, requires_grad=self.seen.requires_grad)
        if self.seen.requires_grad:
            self.own.register_post_accumulate_grad_hook(on_gradient)
        return self.own

    def free_own(self) -> None:
        """Release the parameter that the layer computed on.

        The memory of a copy is freed at once, because autograd's graph would hold it until the pass has ended. A copy
        that requires no gradient is left to the graph: earlier operations may still need it.
        """
        if self.own is not None and self.own.requires_grad and self.own.dtype != self.local.dtype:
            local_part(self.own.detach()).untyped_storage().resize_(0)
        self.own = None

    def take_gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient made since the last call; None if there is none yet."""
        if self.own is None or self.own.grad is None:
            return None
        gradient, self.own.grad = self.own.grad, None
        if self._tensor_mesh is None:
            return gradient
        if any(placement.is_partial() for placement in gradient.placements):
            gradient = gradient.to(self.local.dtype)
            self.late = gradient if self.late is None else self.late + gradient
            return None
        return gradient.redistribute(placements=self._tensor_placements).to_local()

    @torch.no_grad()
    def add_gradient(self, part: Tensor) -> None:
        """Make a part of the buffer the gradient that the optimizer sees, or add it to an existing gradient."""
        if self.seen.grad is None:
            # not `from_local`, which passes autograd and makes a spec, for each parameter in each step
            self.seen.grad = DTensor(part, self.seen._spec, requires_grad=False)
        else:
            self.seen.grad.to_local().add_(part)

    def _shown(self, local: Tensor) -> DTensor:
        return DTensor.from_local(local, self._mesh, self._placements, run_check=False, **self._size)


def shard_over(
    layer: ChainLayer,
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard_after_forward: bool,
    expert_mesh: DeviceMesh | None = None,
    on_host: bool = False,
) -> FSDPModule:
    """Shard the parameters of the layer over the one axis of ``mesh``, in place.

    A mesh of two axes shards over the second and replicates over the first (hybrid sharding). Experts that ep has
    divided are sharded over ``expert_mesh``, the part of ``mesh`` that ep leaves, and along a dim that gives equal
    shards, because there are often fewer experts than shards. ``on_host`` keeps all shards in host memory.
    """
    module = fully_shard(
        layer,
        mesh=mesh,
        mp_policy=mixed_precision(precision, {each.dtype for each in layer.parameters() if each.requires_grad}),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement(layer, mesh if expert_mesh is None else expert_mesh),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy(),
    )
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if any(isinstance(each, nn.ModuleList | nn.ModuleDict) for each in routed_experts(layer)):
        module.set_reduce_scatter_unused_params(True)  # ranks use different ones, by their tokens
    if on_host:
        rest_on_host(module, mesh.device_type)
    return module


def reduce_gradients(layer: FSDPModule, *, in_time: bool, is_last: bool) -> None:
    """End a weight pass of a sharded layer, which FSDP's hooks do not see.

    Reduce the gradients accumulated over the backward passes if ``in_time``, and over replicas of shards once per step,
    in the last pass. Gathered parameters stay gathered, because another microbatch may use them. Of replicated
    shards, FSDP adds up what it has reduced in one buffer, so each pass reduces all parameters: with zeros for those
    whose gradients, complete after the backward pass, were reduced in the weight pass of an earlier microbatch.
    """
    for group in layer._get_fsdp_state()._fsdp_param_groups:
        group.reduce_scatter_unused_params |= group.mesh_info.replicate_mesh_dim is not None
        reshards, group.reshard_after_backward = group.reshard_after_backward, False
        group.post_backward()  # accumulates in the reduce dtype
        if in_time:
            complete_gradients(layer)
            group.reduce_grads, group.all_reduce_grads = True, is_last
            group.post_backward()
            group.reduce_grads = group.all_reduce_grads = False
        group.reshard_after_backward = reshards


def end_weight_passes(root: FSDPModule) -> None:
    """Wait for the reductions after the last weight pass of a step."""
    root.set_is_last_backward(True)
    root._get_fsdp_state()._root_post_backward_final_callback()


@torch.no_grad()
def complete_gradients(layer: FSDPModule) -> None:
    """Give zero gradients to parameters that have none, in layers that reduce those of all parameters.

    These are unsharded and in the reduce dtype, as accumulated gradients are; FSDP reduces those of one dtype together,
    and a new gradient would not be in it.
    """
    for group in layer._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params if group.reduce_scatter_unused_params else ():
            if each.reduce_dtype and each.sharded_param.requires_grad and each.unsharded_accumulated_grad is None:
                each.unsharded_accumulated_grad = torch.zeros_like(each.unsharded_param, dtype=each.reduce_dtype)


def replicate_over(
    layer: ChainLayer, mesh: DeviceMesh, precision: Precision, *, expert_mesh: DeviceMesh | None = None
) -> Replica:
    """Return this rank's replica of the layer, with parameters replicated over the one axis of ``mesh``, in place.

    Experts that ep has divided are replicated over ``expert_mesh``, the part of ``mesh`` that ep leaves.
    """
    if expert_mesh is None:
        return Replica(layer, mesh, activation_dtype(precision))
    others = dict.fromkeys(divided_parameters(layer), expert_mesh)
    return Replica(layer, mesh, activation_dtype(precision), others)


def mixed_precision(precision: Precision, trained: Collection[torch.dtype]) -> MixedPrecisionPolicy:
    """Return the FSDP policy of a precision: compute in 16 bits, reduce gradients in fp32.

    Nothing is cast in fp32, or if all parameters that are ``trained`` are kept in the compute dtype.
    """
    dtype = activation_dtype(precision)
    if dtype is torch.float32 or {*trained} == {dtype}:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def activation_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the hidden state between layers."""
    dtype: torch.dtype = getattr(torch, DTYPES[precision])
    return dtype
