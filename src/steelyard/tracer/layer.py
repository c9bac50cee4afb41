"""Runs one layer forward and backward on fake tensors and reports what one rank does and holds."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from steelyard.model.chain import LayerRole, ModelChain
from steelyard.modules.build import build_one_block_model, build_rotary
from steelyard.modules.layers import BlockLayer, ChainLayer, LayerContext, SideInputBuilder, build_layer
from steelyard.modules.tensor_parallel import apply_tensor_parallel
from steelyard.plan.plan import Precision
from steelyard.plan.strategy import Remat
from steelyard.tracer.counting import OpCounter, OpCounts, live_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one rank does and holds for one layer at one number of samples; bytes as in `LayerProfile`."""

    num_params: int
    forward: OpCounts
    backward: OpCounts
    saved_bytes: int
    input_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int


@contextmanager
def fake_world(size: int) -> Iterator[DeviceMesh]:
    """A one-axis mesh of ``size`` ranks in this process alone: collectives have shapes and no effect."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSetting:
    """The layer to observe, and how: its place in the chain, a sequence length, a precision and a tp mesh."""

    chain: ModelChain
    layer: int
    seq_len: int
    precision: Precision
    mesh: DeviceMesh
    sp: bool

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and activations while a layer computes."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def role(self) -> LayerRole:
        """Role of the layer."""
        return self.chain.kind_of(self.layer).role


def observe(setting: LayerSetting, sizes: tuple[int, ...]) -> list[Observation]:
    """One observation of the layer per number of samples."""
    with FakeTensorMode(allow_non_fake_inputs=False), ExitStack() as stack:
        model = build_one_block_model(setting.chain, setting.dtype)
        layer = build_layer(model, setting.chain, setting.layer, Remat.NONE)
        if setting.mesh.size() > 1:
            apply_tensor_parallel(layer, model, setting.chain, setting.role, setting.mesh, sp=setting.sp)
            if setting.role is LayerRole.HEAD:
                stack.enter_context(loss_parallel())
        return [_observe_size(setting, model, layer, samples) for samples in sizes]


def _observe_size(setting: LayerSetting, model: PreTrainedModel, layer: ChainLayer, samples: int) -> Observation:
    context, inputs = _inputs(setting, model, layer, samples)
    for parameter in layer.parameters():
        parameter.grad = None
    counter = OpCounter()
    side_tensors = [context.side.position_ids, *context.side.position_embeddings]
    counter.ignore(
        [*layer.parameters(), *side_tensors, *(mask for mask in context.side.masks.values() if mask is not None)]
    )
    counter.watch([inputs])
    input_ids = counter.storage_ids([inputs])
    with counter:
        output = layer(inputs, context)
        forward, counter.counts = counter.counts, OpCounts()
        forward_events = len(counter.log)
        output_ids = counter.storage_ids([output])
        gradient = torch.empty_like(output)
        output.backward(gradient)
        backward = counter.counts
        gradients = counter.storage_ids(p.grad for p in layer.parameters() if p.grad is not None)
    input_bytes = inputs.numel() * inputs.element_size()
    del output, gradient
    history = live_bytes(counter.log, without=gradients)
    saved = live_bytes(counter.log[:forward_events], without=output_ids - input_ids)[-1]
    return Observation(
        num_params=sum(_local_size(parameter) for parameter in layer.parameters()),
        forward=forward,
        backward=backward,
        saved_bytes=saved,
        input_bytes=input_bytes,
        forward_transient_bytes=max(history[: forward_events + 1]) - saved,
        backward_transient_bytes=max(history[forward_events:]) - saved,
    )


def _inputs(
    setting: LayerSetting, model: PreTrainedModel, layer: ChainLayer, samples: int
) -> tuple[LayerContext, Tensor]:
    chain, seq_len = setting.chain, setting.seq_len
    kinds = {layer.attention_type} if isinstance(layer, BlockLayer) else set()
    side = SideInputBuilder(model, build_rotary(model, chain, torch.device("cpu")), kinds)
    tokens = torch.zeros((samples, seq_len), dtype=torch.long)
    context = LayerContext(
        side=side(seq_len, setting.dtype, torch.device("cpu")), labels_BS=tokens, num_tokens=samples * seq_len
    )
    if setting.role is LayerRole.EMBEDDING:
        return context, tokens
    local_seq = seq_len // setting.mesh.size() if setting.sp else seq_len
    return context, torch.empty((samples, local_seq, chain.hidden_size), dtype=setting.dtype, requires_grad=True)


def _local_size(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel()
