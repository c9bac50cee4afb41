"""One part of the pipeline as a module: its layers in order, each under its strategy, with resharding between them.

A part is a whole stage or, interleaved, one of its chunks. A strategy first divides the layer itself, then shards or
replicates its states.

Legend of shape suffixes: B samples of this rank in a microbatch, S sequence length, s sequence of this rank, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from transformers import PreTrainedModel

from steelyard.errors import InvalidPlanError
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.modules.build import materialize_layer, prepare_model
from steelyard.modules.context_attention import SEQUENCE_DIM, in_order, natural_order, rank_order
from steelyard.modules.dimensions import TWINS
from steelyard.modules.freezing import check_frozen, rest_in
from steelyard.modules.layers import (
    ChainLayer,
    Flow,
    LayerContext,
    SharedInputSource,
    as_flow,
    build_layer,
    seed_dropout,
    shared_inputs_of,
    tensors_of,
)
from steelyard.modules.levers import change_layer, saving
from steelyard.modules.own_pieces import OwnBatch
from steelyard.modules.replicated import (
    Replica,
    Replicas,
    activation_dtype,
    complete_gradients,
    end_weight_passes,
    reduce_gradients,
    replicate_over,
    shard_over,
)
from steelyard.modules.router_loss import PartRouters, check_routers, router_loss_of
from steelyard.modules.weight_passes import WaitingGradients
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy
from steelyard.precision import Precision
from steelyard.runtime.mesh import HiddenPlacement, PlanMesh
from steelyard.runtime.pipeline_part import ActivationLayout, border
from steelyard.runtime.tied import share_ends


def shard_layer(
    layer: ChainLayer,
    chain: ModelChain,
    strategy: Strategy,
    mesh: PlanMesh,
    precision: Precision,
    *,
    has_backward: bool = True,
    on_host: bool = False,
    weight_bytes: int = 4,
) -> FSDPModule | Replica:
    """Shard the layer's parameters in place as ``strategy`` says, or return its replica if they are not sharded.

    Without a backward pass nothing is kept gathered for one, except parameters that are kept whole throughout a step.
    If parameters are ``on_host``, FSDP moves them, on a single rank too. Trained parameters have ``weight_bytes`` per
    entry. Raises `InvalidPlanError` for a dimension without implementation.
    """
    used = {dimension.name: dimension for dimension in strategy.dimensions}
    if unknown := sorted(used.keys() - TWINS.keys()):
        raise InvalidPlanError(
            field="parallel",
            found=f"{', '.join(unknown)} in {strategy}",
            expected="dimensions that the runtime supports: " + ", ".join(TWINS),
            hint="plan without it, or add its implementation in steelyard/modules/dimensions",
        )
    dtype = activation_dtype(precision)
    if chain.freeze is not None or weight_bytes == dtype.itemsize:
        rest_in(layer, dtype, trained=weight_bytes == dtype.itemsize)
    for name, twin in TWINS.items():
        if name in used:
            twin(layer, chain, strategy, mesh.dimension(strategy, used[name]))
    change_layer(layer, chain)
    replicas, shards = mesh.states(strategy)
    divides_experts = strategy.expert_degree > 1
    outer_replicas, outer_shards = (mesh.runs[axes] for axes in strategy.expert_state_axes)
    if strategy.state_shards > 1 or on_host:
        return shard_over(
            layer,
            _state_mesh(replicas, shards),
            precision,
            reshard_after_forward=on_host or not (strategy.keeps_gathered and (has_backward or strategy.keeps_whole)),
            on_host=on_host,
            expert_mesh=_state_mesh(outer_replicas, outer_shards) if divides_experts else None,
        )
    return replicate_over(layer, replicas, precision, expert_mesh=outer_replicas if divides_experts else None)


def _state_mesh(replicas: DeviceMesh, shards: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks that shard states, with a leading axis of replicas if shards are replicated."""
    return DeviceMesh._concatenate([replicas, shards]) if replicas.size() > 1 else shards


class LayerLoop(nn.Module):
    """Layers of a part in order, each with its input in the placement that it requires.

    It is FSDP's root if layers are sharded: they then share streams, so that the parameters of the next layer are
    gathered while one computes. It is a separate module because `torch.distributed.pipelining` would otherwise decide
    when the gradients of the stage are reduced.
    """

    def __init__(
        self,
        layers: dict[str, ChainLayer],
        *,
        placements: list[HiddenPlacement],
        incoming: HiddenPlacement,
        outgoing: HiddenPlacement | None,
        mesh: DeviceMesh,
        shares: list[int],
        routers: PartRouters | None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self._placements, self._incoming = placements, incoming
        self._outgoing = outgoing
        """Placement in which the output is sent; None if the output is the loss."""
        self._mesh, self._routers = mesh, routers
        self._dropout_shares = [
            share if layer.drops else None for share, layer in zip(shares, layers.values(), strict=True)
        ]
        """Index of this rank's share of the samples for each layer with dropout; None for other layers."""

    @property
    def has_dropout(self) -> bool:
        """Whether any layer has dropout."""
        return any(share is not None for share in self._dropout_shares)

    def forward(self, inputs: Flow, context: LayerContext, dropout_seed: tuple[int, ...]) -> Flow:
        """Return the output of the last layer, followed by the statistics of routers if these are trained.

        ``dropout_seed`` is specific to this step and microbatch.
        """
        hidden, current = inputs, self._incoming
        statistics: list[Tensor] = []
        for (name, layer), wanted, share in zip(
            self.layers.items(), self._placements, self._dropout_shares, strict=True
        ):
            hidden, current = self._placed(hidden, current, wanted), wanted
            if share is not None:
                seed_dropout(*dropout_seed, int(name), share)
            own = context.by_layer.get(name, context)
            hidden = layer.within(hidden, own, _without_statistics(layer, statistics))
        hidden = hidden if self._outgoing is None else self._placed(hidden, current, self._outgoing)
        return as_flow((*tensors_of(hidden), *([self._routers.own(statistics)] if self._routers else [])))

    def _placed(self, hidden: Flow, current: HiddenPlacement, wanted: HiddenPlacement) -> Flow:
        if wanted == current:
            return hidden
        return as_flow(tuple(redistribute(each, self._mesh, current, wanted) for each in tensors_of(hidden)))


def _without_statistics(layer: ChainLayer, found: list[Tensor]) -> Callable[[Flow, LayerContext], Flow]:
    """Return a function that computes the layer's output alone and appends its routers' statistics to ``found``."""
    if layer.router_loss is None:
        return layer

    def compute(flow: Flow, context: LayerContext) -> Flow:
        *outputs, statistics = tensors_of(layer(flow, context))
        found.append(statistics)
        return as_flow(tuple(outputs))

    return compute


class StageModule(nn.Module):
    """Layers of one part. Takes token ids [B, S] in the first part and the hidden state [B, s, H] in other parts.

    The hidden state arrives in the layout that `steelyard.runtime.pipeline_part` describes, so the receiver
    redistributes it. A step has ``num_microbatches`` backward passes: replicated layers and those ``kept_whole`` reduce
    their gradients in the last one, other sharded layers in each (which keeps their gradients sharded in between).
    Layers that are ``waiting`` for weight passes reduce gradients in these instead of in backward passes. If
    ``routers`` are trained, their statistics are the last tensor received and the last one sent.
    """

    def __init__(
        self,
        loop: LayerLoop,
        *,
        replicas: Replicas,
        kept_whole: Sequence[FSDPModule],
        waiting: Sequence[tuple[WaitingGradients, Replica | FSDPModule]],
        side: SharedInputSource,
        seq_len: int,
        dtype: torch.dtype,
        num_tokens: int,
        routers: PartRouters | None,
        has_backward: bool,
    ) -> None:
        super().__init__()
        self.loop, self.routers, self._has_backward, self.side = loop, routers, has_backward, side
        self.replicas, self._seq_len, self.dtype = replicas, seq_len, dtype
        self._kept_whole, self._waiting = kept_whole, waiting
        waits = [layer for _, layer in waiting]
        self._whole_in_backward = [layer for layer in kept_whole if layer not in waits]
        """Layers kept whole whose gradients are complete after a backward pass."""
        self.num_tokens = num_tokens
        """Number of places in a global batch where a target may be."""
        self.num_targets: int | Tensor = num_tokens
        """Number of targets of the global batch; set it before a step if it differs between batches."""
        self._backwards_to_go = self._weights_to_go = 0
        self._dropout_seed: tuple[int, ...] = ()
        self._forwards_done = 0
        self.logits: list[tuple[Tensor, Tensor]] | None = None
        """Predictions of the head, which replace the loss; None if the head computes a loss."""
        self.batches: list[dict[int, OwnBatch]] = []
        """Inputs that layers of a user's own module read in each microbatch of a step; set before the step."""
        self.model_kwargs: list[list[tuple[list[str], dict[str, Tensor]]]] = []
        """Layers that read the same samples in each microbatch of a step, and arguments that differ between samples
        (`PER_SAMPLE`); set before the step."""

    @property
    def layers(self) -> nn.ModuleDict:
        """Layers by their number in the chain."""
        return self.loop.layers

    def begin_step(self, num_microbatches: int, dropout_seed: tuple[int, ...] = (0, 0)) -> None:
        """Prepare for the passes of one step; ``dropout_seed`` is a seed and the number of the step."""
        self._dropout_seed = dropout_seed
        self._forwards_done = 0
        self._backwards_to_go = self._weights_to_go = num_microbatches
        self.replicas.begin_step(num_microbatches)
        if isinstance(self.loop, FSDPModule):
            self._expect_last_backward(num_microbatches == 1)

    def weight_pass(self) -> Callable[[], None]:
        """Return the weight pass of the backward pass that has just ended."""
        for replica in self.replicas:
            replica.collect()
        return partial(self._compute_weights, [waiting.take() for waiting, _ in self._waiting])

    def _compute_weights(self, taken: list[list[Callable[[], None]]]) -> None:
        self._weights_to_go -= 1
        is_last = self._weights_to_go == 0
        for (_, layer), of_layer in reversed(list(zip(self._waiting, taken, strict=True))):
            while of_layer:
                of_layer.pop()()
            if isinstance(layer, Replica):
                layer.collect()
                continue
            is_whole = layer in self._kept_whole
            reduce_gradients(layer, in_time=is_last or not is_whole, is_last=is_last)
            if is_whole and is_last:
                layer.reshard()
        if is_last and isinstance(self.loop, FSDPModule):
            end_weight_passes(self.loop)

    def end_step(self) -> None:
        """Wait for the gradients of the step after its passes have ended."""
        self.replicas.end_step()
        if not self._has_backward and isinstance(self.loop, FSDPModule):
            self.loop.reset_iter_state()  # FSDP resets the state of forward passes only in a backward pass

    def end_evaluation(self) -> None:
        """Free the compute-dtype copies and gathered layers left by forward passes without backward passes."""
        self.replicas.begin_step(0)
        if isinstance(self.loop, FSDPModule):
            self.loop.reset_iter_state()

    def forward(
        self,
        *inputs: Tensor,
        labels_BS: Tensor | None = None,  # noqa: N803
        decoder_ids: Tensor | None = None,
    ) -> Flow:
        """Return the hidden state for the next part, or this rank's share of a microbatch's loss in the last part."""
        batch: Mapping[int, OwnBatch] = {}
        if self.batches:
            batch, self.batches[self._forwards_done] = self.batches[self._forwards_done], batch
        context = LayerContext(
            side=self.side(self._seq_len, self.dtype, inputs[0].device),
            labels_BS=labels_BS,
            num_targets=self.num_targets,
            decoder_ids=decoder_ids,
            batch=batch,
            logits=self.logits,
        )
        for names, model_kwargs in self.model_kwargs[self._forwards_done] if self.model_kwargs else ():
            side = self.side(self._seq_len, self.dtype, inputs[0].device, model_kwargs)
            context.by_layer |= dict.fromkeys(names, context.of_samples(side, model_kwargs))
        flow, before = self.routers.arrived(inputs) if self.routers else (inputs, None)
        output = self.loop(as_flow(flow), context, (*self._dropout_seed, self._forwards_done))
        if self.routers:
            output = as_flow(self.routers.passed_on(tensors_of(output), before))
        self._forwards_done += 1
        last = tensors_of(output)[0]
        if last.requires_grad and isinstance(self.loop, FSDPModule):
            last.register_hook(self._backward_begins)
        return output

    def _backward_begins(self, _grad: Tensor) -> None:
        self._backwards_to_go -= 1
        if self._backwards_to_go == 0:
            self._expect_last_backward(True)
            if self._forwards_done > 1:
                for layer in self._whole_in_backward:
                    complete_gradients(layer)

    def _expect_last_backward(self, is_last: bool) -> None:
        """Set whether the next backward pass is the last of the step.

        The last one sums replicated shards over their replicas, reduces the gradients of layers kept whole, and frees
        these layers.
        """
        self.loop.set_is_last_backward(is_last)
        self.loop.set_requires_all_reduce(is_last)
        for layer in self._whole_in_backward:
            layer.set_requires_gradient_sync(is_last, recurse=False)
            layer.set_reshard_after_backward(is_last, recurse=False)


def redistribute(local: Tensor, mesh: DeviceMesh, current: HiddenPlacement, wanted: HiddenPlacement) -> Tensor:
    """Return this rank's part of the activation in the wanted placement; backward redistributes the gradient back.

    If the order of tokens changes, each rank holds whole sequences in between.
    """
    if current.head_tail_degree != wanted.head_tail_degree:
        whole, again = _whole_sequences(current.axes), _whole_sequences(wanted.axes)
        local = _redistribute(_redistribute(local, mesh, current.axes, whole), mesh, whole, again)
        for degree, order in ((current.head_tail_degree, natural_order), (wanted.head_tail_degree, rank_order)):
            local = in_order(local, order(degree)) if degree > 1 else local
        return _redistribute(local, mesh, again, wanted.axes)
    return _redistribute(local, mesh, current.axes, wanted.axes)


def _whole_sequences(axes: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if axis.is_shard(SEQUENCE_DIM) else axis for axis in axes)


def _redistribute(
    local: Tensor, mesh: DeviceMesh, current: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> Tensor:
    if current == wanted:
        return local
    part = DTensor.from_local(local, mesh, current, run_check=False).redistribute(placements=wanted).to_local()
    # a slice of the whole tensor (always so over gloo, which only gathers) would keep the whole alive
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


def build_chunks(
    model: PreTrainedModel, plan: Plan, chain: ModelChain, mesh: PlanMesh, *, seed: int, device: torch.device
) -> tuple[StageModule, ...]:
    """Build this rank's parts of the pipeline layer by layer, each sharded before the next one is allocated."""
    prepare_model(model, chain)
    check_frozen(model, chain)
    return tuple(
        _build_chunk(model, plan, index, chain, mesh, seed=seed, device=device)
        for index in plan.pipeline.parts_of(mesh.stage_index)
    )


def _build_chunk(
    model: PreTrainedModel,
    plan: Plan,
    index: int,
    chain: ModelChain,
    mesh: PlanMesh,
    *,
    seed: int,
    device: torch.device,
) -> StageModule:
    part = plan.parts[index]
    strategies = part.strategies
    layers: dict[str, ChainLayer] = {}
    replicas: list[Replica] = []
    waiting: list[tuple[WaitingGradients, Replica | FSDPModule]] = []
    kept_whole: list[FSDPModule] = []
    for number, strategy in enumerate(strategies, start=part.first_layer):
        materialize_layer(model, chain, number, seed=seed, device=device)
        layer = build_layer(model, chain, number, strategy.remat)
        if plan.levers and chain.type_of(number).role is LayerRole.BLOCK and (save := saving(plan.chosen_levers)):
            layer.saving = partial(save, layer)
        has_backward = chain.has_backward(number)
        effects = plan.chosen_levers.effects
        sharded = shard_layer(
            layer,
            chain,
            strategy,
            mesh,
            plan.precision,
            has_backward=has_backward,
            on_host=effects.parameters_on_host,
            weight_bytes=effects.weight_bytes,
        )
        if isinstance(sharded, Replica):
            replicas.append(sharded)
        elif strategy.keeps_whole:
            kept_whole.append(sharded)
        if plan.pipeline.schedule.splits_backward and chain.type_of(number).role is LayerRole.BLOCK:
            waiting.append((WaitingGradients(layer), sharded))
            if not isinstance(sharded, Replica):
                sharded.set_requires_gradient_sync(False, recurse=False)
                sharded.set_reshard_after_backward(not strategy.keeps_whole, recurse=False)
        layers[str(number)] = layer
        if layer.router_loss is not None:
            check_routers(layer, strategy)
    share_ends(plan, chain, layers, replicas)
    routers = None
    if chain.trains_routers:
        routers = PartRouters(
            loss=router_loss_of(model),
            group=mesh.whole.get_group(),
            device=device,
            is_first=index == 0,
            is_last=index == len(plan.parts) - 1,
            num_microbatches=plan.num_microbatches,
        )
    arriving = border(plan, index)[1] if index else None
    leaving = border(plan, index + 1)[0] if index + 1 < len(plan.parts) else None
    _leave_resting_sharded(layers, plan, chain, mesh.stage_index)
    loop = LayerLoop(
        layers,
        placements=[mesh.hidden_placement(strategy) for strategy in strategies],
        incoming=_placement(arriving, mesh) if arriving else mesh.hidden_placement(strategies[0]),
        outgoing=_placement(leaving, mesh) if leaving else None,
        mesh=mesh.stage,
        shares=[mesh.runs[strategy.data_axes].get_local_rank() for strategy in strategies],
        routers=routers,
    )
    if len(replicas) < len(layers):
        not_sharded = {parameter for each in replicas for parameter in each.parameters()}
        fully_shard(loop, mesh=mesh.states(strategies[0])[1], reshard_after_forward=True, ignored_params=not_sharded)
    return StageModule(
        loop,
        replicas=Replicas(replicas),
        kept_whole=kept_whole,
        waiting=waiting,
        side=shared_inputs_of(layers.values(), model, chain, device),
        seq_len=plan.seq_len,
        dtype=activation_dtype(plan.precision),
        num_tokens=plan.global_batch * (plan.seq_len if chain.family.task.reads_text else 1),
        routers=routers,
        has_backward=any(map(chain.has_backward, part.layers)),
    )


def _leave_resting_sharded(layers: Mapping[str, ChainLayer], plan: Plan, chain: ModelChain, stage: int) -> None:
    """Keep FSDP from prefetching layers that have no backward pass.

    The first sharded layer of a part that has a backward pass prefetches the layer that ran before it. If that layer
    has none, its parameters would stay gathered until the next forward pass. The first layer is therefore told to
    prefetch itself, which is already gathered by then.
    """
    mine = (number for part in plan.stages[stage].parts for number in part.layers)
    sharded = [number for number in mine if plan.strategies[number].state_shards > 1]
    first = next((layers[str(each)] for each in sharded if str(each) in layers and chain.has_backward(each)), None)
    if isinstance(first, FSDPModule) and not all(map(chain.has_backward, sharded)):
        first.set_modules_to_backward_prefetch([first])


def _placement(layout: ActivationLayout, mesh: PlanMesh) -> HiddenPlacement:
    return mesh.placement(layout.letters, layout.head_tail_degree)
