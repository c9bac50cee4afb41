"""One pipeline stage as a module: its layers in order, with a redistribution wherever two layers differ in layout.

Legend of shape suffixes: B samples of this rank in a microbatch, S sequence length, s sequence of this rank, H hidden.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.modules.build import build_rotary, layer_modules, materialize_layer, untie_embedding
from steelyard.modules.layers import BlockLayer, ChainLayer, LayerContext, SideInputBuilder, build_layer
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy
from steelyard.runtime.mesh import PlanMesh
from steelyard.runtime.sharding import activation_dtype, shard_layer


class StageModule(nn.Module):
    """The layers of one stage. Takes token ids [B, S] on the first stage and the hidden state [B, s, H] elsewhere.

    The hidden state arrives in the layout of the layer before, so the receiver redistributes. ``num_microbatches``
    backward passes make a step: replicated layers reduce their gradients in the last of them, sharded layers in each
    (which keeps their gradients sharded in between).
    """

    def __init__(
        self,
        layers: list[ChainLayer],
        *,
        first_layer: int,
        placements: list[tuple[Placement, ...]],
        incoming: tuple[Placement, ...],
        mesh: DeviceMesh,
        side: SideInputBuilder,
        seq_len: int,
        dtype: torch.dtype,
        num_tokens: int,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(first_layer + index): layer for index, layer in enumerate(layers)})
        self.side = side
        self._placements = placements
        self._incoming = incoming
        self._mesh = mesh
        self._seq_len = seq_len
        self.dtype = dtype
        self._num_tokens = num_tokens
        self._reduce_late: list[FSDPModule] = []
        self._backwards_to_go = 0

    def reduce_late(self, layers: list[FSDPModule]) -> None:
        """Names the layers that reduce their gradients once a step."""
        self._reduce_late = layers

    def begin_step(self, num_microbatches: int) -> None:
        """Prepares for the backward passes of one step."""
        self._backwards_to_go = num_microbatches
        self._set_late_reduction(num_microbatches == 1)

    def forward(self, inputs: Tensor, labels_BS: Tensor | None = None) -> Tensor:  # noqa: N803
        """The hidden state for the next stage, or on the last stage this rank's share of the loss of a microbatch."""
        context = LayerContext(
            side=self.side(self._seq_len, self.dtype, inputs.device),
            labels_BS=labels_BS,
            num_tokens=self._num_tokens,
        )
        hidden, current = inputs, self._incoming
        for layer, wanted in zip(self.layers.values(), self._placements, strict=True):
            if wanted != current:
                hidden, current = redistribute(hidden, self._mesh, current, wanted), wanted
            hidden = layer(hidden, context)
        if hidden.requires_grad:
            hidden.register_hook(self._backward_begins)
        return hidden

    def _backward_begins(self, _grad: Tensor) -> None:
        self._backwards_to_go -= 1
        if self._backwards_to_go == 0:
            self._set_late_reduction(True)

    def _set_late_reduction(self, enabled: bool) -> None:
        for layer in self._reduce_late:
            layer.set_requires_gradient_sync(enabled)


def redistribute(
    local: Tensor, mesh: DeviceMesh, current: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> Tensor:
    """This rank's part of the activation in the wanted placement; backward brings the gradient back the same way."""
    return DTensor.from_local(local, mesh, current, run_check=False).redistribute(placements=wanted).to_local()


def build_stage(
    model: PreTrainedModel, plan: Plan, chain: ModelChain, mesh: PlanMesh, *, seed: int, device: torch.device
) -> StageModule:
    """This rank's stage of the plan: its layers made one by one, each sharded before the next takes memory."""
    stage_plan = plan.stages[mesh.stage_index]
    strategies = stage_plan.strategies
    if chain.tied_embeddings:
        untie_embedding(model)
    layers: list[ChainLayer] = []
    late: list[FSDPModule] = []
    attention_types: set[str] = set()
    for layer_index, strategy in enumerate(strategies, start=stage_plan.first_layer):
        modules = layer_modules(model, chain, layer_index)
        materialize_layer(model, modules, layer_index, seed=seed, device=device)
        layer = build_layer(model, chain, layer_index, strategy.remat)
        if isinstance(layer, BlockLayer):
            attention_types.add(layer.attention_type)
        role = chain.kind_of(layer_index).role
        sharded = shard_layer(layer, model, chain, role, strategy, mesh, plan.precision)
        if strategy.fsdp == 1:
            late.append(sharded)
        layers.append(layer)
    before = plan.strategies[stage_plan.first_layer - 1] if stage_plan.first_layer else strategies[0]
    stage = StageModule(
        layers,
        first_layer=stage_plan.first_layer,
        placements=[mesh.activation_placements(strategy) for strategy in strategies],
        incoming=mesh.activation_placements(before),
        mesh=mesh.stage,
        side=SideInputBuilder(model, build_rotary(model, chain, device), attention_types),
        seq_len=plan.seq_len,
        dtype=activation_dtype(plan.precision),
        num_tokens=plan.global_batch * plan.seq_len,
    )
    stage.reduce_late(late)
    return stage


def local_hidden_shape(plan: Plan, chain: ModelChain, strategy: Strategy) -> tuple[int, int, int]:
    """Shape [B, s, H] of one rank's hidden state after a layer of this strategy, for one microbatch."""
    samples = plan.microbatch_samples // strategy.data_degree
    sequence = plan.seq_len // strategy.tp if strategy.sp else plan.seq_len
    return samples, sequence, chain.hidden_size
