"""Layers of a chain as modules with one calling convention, so that a stage is a plain loop over its layers.

Every layer maps the activations of the chain to the next ones: token ids [B, S] or images → hidden state [B, s, H] → …
→ loss []. If an encoder's output accompanies a decoder's state, the activations are a tuple of both. The split of the
model determines how a layer computes. Inputs that all blocks share (positions, mask) are computed once per forward pass
and passed as `SharedInputs`.

All random draws of a layer (dropout, router noise, experts chosen at random) are repeatable within a plan: before each
layer the generators are seeded with a number made from the step, the microbatch, the layer, the share of the samples
and the seed of the run (`seed_dropout`).

- Ranks that hold the same activations (tensor parallelism) drop the same entries, so their copies stay equal.
- Ranks with different samples drop different entries, and so do different microbatches, layers and steps.
- The same plan gives the same numbers twice, also in recomputed layers. A resumed run needs no generator state.

A different plan drops different entries, as does any change of the ranks that draw them. Not modelled: under tensor
parallelism, every rank drops the same entries of its shard of the attention heads, and with sp of the sequence.

Legend of shape suffixes: B samples of this rank, S sequence length, s sequence of this rank (S/tp under sequence
parallelism, else S), H hidden size, V vocabulary of this rank.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from steelyard.model.chain import LayerRole, LayerType, ModelChain
from steelyard.model.family import Family, Run, Task
from steelyard.model.split import ModelSplit, local_name
from steelyard.modules.build import named_layer_modules, outside_buffers
from steelyard.modules.context_attention import reads_mask
from steelyard.modules.freezing import freeze_layer
from steelyard.modules.levers import loss_chunks
from steelyard.modules.own_pieces import OwnBatch, OwnModel
from steelyard.modules.pieces import SharedInputs, SplitSharedInputs, split_run
from steelyard.modules.remat import REMAT_CONTEXTS
from steelyard.modules.router_loss import RouterLoss, router_loss_of
from steelyard.modules.updates import whole_of
from steelyard.plan.strategy import Remat

_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_MOST_SEED = 1 << 63
_RATES = (
    *("attention_dropout", "dropout_prob", "drop_prob", "dropout"),
    *("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
)
"""Attributes with the dropout rate of attention kernels and the noise of routers."""


def has_dropout(module: nn.Module) -> bool:
    """Return whether any part of a module drops entries or adds noise during training."""
    rates = (
        [each.p] if isinstance(each, nn.modules.dropout._DropoutNd) else [getattr(each, name, 0) for name in _RATES]
        for each in module.modules()
    )
    return any(isinstance(rate, int | float) and rate > 0 for of_module in rates for rate in of_module)


def seed_dropout(*parts: int) -> None:
    """Seed the generators of all devices with a number that depends on every part and their order."""
    seed = 0
    for part in parts:
        seed = ((seed ^ part) * _MIX + 1) & _WORD
        seed ^= seed >> 29
    torch.manual_seed(seed % _MOST_SEED)


Flow: TypeAlias = Tensor | tuple[Tensor, ...]
"""Activations that pass between layers."""


class LayerContext:
    """Context of a microbatch's forward pass: all inputs of layers except the activations.

    This is no dataclass because FSDP searches each dataclass that enters a layer for tensors that need gradients,
    through every field of the config, twice per layer and pass. None of these tensors needs gradients.
    """

    __slots__ = (
        "batch",
        "by_layer",
        "decoder_ids",
        "labels_BS",
        "logits",
        "model_kwargs",
        "num_targets",
        "own",
        "side",
    )

    def __init__(
        self,
        *,
        side: SharedInputs,
        labels_BS: Tensor | None = None,  # noqa: N803
        num_targets: int | Tensor = 1,
        decoder_ids: Tensor | None = None,
        batch: Mapping[int, OwnBatch] | None = None,
        logits: list[tuple[Tensor, Tensor]] | None = None,
        model_kwargs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.side, self.labels_BS = side, labels_BS
        """Target of every token or image; only the head needs it."""
        self.num_targets = num_targets
        """Number of targets in the global batch; the loss is the mean over them."""
        self.decoder_ids = decoder_ids
        """Token ids [B, S] that a decoder's embedding reads."""
        self.batch = batch or {}
        """Samples of each layer by its number, for a user's own module."""
        self.logits = logits
        """List to which the head appends labels and logits instead of computing a loss; None to compute the loss."""
        self.model_kwargs = model_kwargs
        """Arguments of the model's forward pass that differ between samples (`PER_SAMPLE`)."""
        self.by_layer: dict[str, LayerContext] = {}
        """Contexts of layers, by their numbers, if samples differ in their ``model_kwargs``."""
        self.own: dict[tuple[int, int], LayerContext] = {}
        """Contexts for the tokens of one rank under context parallelism, by (number of ranks, rank)."""

    def of_samples(self, side: SharedInputs, model_kwargs: Mapping[str, Tensor]) -> "LayerContext":
        """Return the context of layers that read the samples of ``model_kwargs``."""
        return LayerContext(
            side=side,
            labels_BS=self.labels_BS,
            num_targets=self.num_targets,
            decoder_ids=self.decoder_ids,
            logits=self.logits,
            model_kwargs=model_kwargs,
        )


class ChainLayer(nn.Module):
    """One layer of the chain; ``remat`` sets how much of its forward pass the backward pass recomputes.

    Its modules are attributes under their names in the layer.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], family: Family, layer_type: LayerType, remat: Remat, run: Run
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.family, self.layer_type, self.remat = family, layer_type, remat
        self.run_alone: Run = run
        self.num_chunks = 1
        """Number of token chunks that a head computes in sequence, and recomputes in the backward pass."""
        self.compiled: Callable[..., Any] | None = None
        """Callable that runs a compiled block, including selective remat; None if the block is not compiled."""
        self.entering: tuple[int, ...] | None = None
        """Indices of the activations that the layer reads; None for all."""
        self.past: tuple[int, ...] = ()
        """Indices of the outputs after the hidden state, into the incoming activations followed by the results."""
        self.divided_tokens: tuple[int, str] | None = None
        """Number of ranks and method of context parallelism; None without it."""
        self.router_loss: RouterLoss | None = None
        """Router loss whose statistics the layer returns after its activations; None if the layer trains no router."""
        self.own_parameters: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context manager that gives the layer its compute parameters, if a replica stores others."""
        self.saving: Callable[[LayerContext], AbstractContextManager[None]] = lambda _: nullcontext()
        """Context manager in which a forward pass saves tensors as levers specify."""
        self.compute: Callable[[Flow, LayerContext], Flow] = self.run
        """Computation of a forward pass, recomputed if the strategy says so; a replica wraps it."""

    @property
    def beside(self) -> tuple[nn.Module, ...]:
        """Modules without parameters that run in the layer but do not belong to it, such as dropout after a table."""
        return getattr(self.run_alone, "beside", ())

    @property
    def drops(self) -> bool:
        """Whether the layer drops entries during training; assumed for a user's own module."""
        return self.family.task is Task.OWN or any(has_dropout(each) for each in (self, *self.beside))

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the layer and of all modules that run in it."""
        for module in self.beside:
            module.train(mode)
        return super().train(mode)

    def run(self, inputs: Flow, context: LayerContext) -> Flow:
        """Run the forward computation of the layer, without remat."""
        return self.run_alone(self, inputs, context)

    def forward(self, inputs: Flow, context: LayerContext) -> Flow:
        """Return the output of the layer, recomputed in the backward pass if the strategy says so."""
        if prepare := getattr(self.run_alone, "prepare", None):  # outside of what is recomputed
            prepare(context)
        with self.saving(context):
            if self.remat is Remat.NONE or (self.remat is Remat.SELECTIVE and self.compiled is not None):
                return self.compute(inputs, context)
            return checkpoint(self.compute, inputs, context, use_reentrant=False, context_fn=REMAT_CONTEXTS[self.remat])

    def within(self, flow: Flow, context: LayerContext, compute: Callable[[Flow, LayerContext], Flow]) -> Flow:
        """Apply ``compute`` to the activations that the layer reads; the others bypass the layer."""
        if self.entering is None:
            return compute(flow, context)
        tensors = tensors_of(flow)
        entering = as_flow(tuple(tensors[place] for place in self.entering))
        hidden, *made = tensors_of(compute(entering, context))
        return as_flow((hidden, *((*tensors, *made)[place] for place in self.past)))


class EmbeddingLayer(ChainLayer):
    """Layer from token ids [B, S] or images to the hidden state [B, s, H]."""


class BlockLayer(ChainLayer):
    """Layer from hidden state [B, s, H] to hidden state [B, s, H]: one unmodified Transformer block."""

    @property
    def attention_type(self) -> str:
        """Key of the mask and the rotary embedding that the block reads."""
        return self.layer_type.attention

    def run(self, inputs: Flow, context: LayerContext) -> Flow:
        """Run the block; with a router loss, its statistics follow the activations."""
        if self.router_loss is None:
            return super().run(inputs, context)
        return self.router_loss.beside(self, lambda: tensors_of(self.run_alone(self, inputs, context)))


class HeadLayer(ChainLayer):
    """Layer from hidden state [B, s, H] and labels to the sum of the targets' losses divided by ``num_targets``.

    ``num_targets`` is the count over the global batch, so that the losses and gradients of all ranks and microbatches
    add up to those of one process. Under tensor parallelism the logits stay sharded over the vocabulary; the caller
    runs forward and backward inside `torch.distributed.tensor.parallel.loss_parallel`.
    """

    def run(self, inputs: Flow, context: LayerContext) -> Tensor:
        """Project to logits and compute the cross entropy in fp32, as `transformers` does."""
        labels_BS = context.labels_BS  # noqa: N806
        assert labels_BS is not None, "what a head is trained on"
        hidden, *beside = tensors_of(inputs)
        if self.num_chunks == 1 or hidden.shape[:2] != labels_BS.shape:
            return self._loss(inputs, context, labels_BS)
        parts = (each.chunk(self.num_chunks, dim=1) for each in (hidden, labels_BS))
        return sum(
            checkpoint(self._loss, as_flow((part, *beside)), context, labels, use_reentrant=False)
            for part, labels in zip(*parts, strict=True)
        )

    def _loss(self, inputs: Flow, context: LayerContext, labels_BS: Tensor) -> Tensor:  # noqa: N803
        with self.own_parameters():
            logits = self.run_alone(self, inputs, context).float()
        if context.logits is not None:
            context.logits.append((labels_BS, whole_of(logits)))
            return torch.zeros((), device=labels_BS.device)
        loss = functional.cross_entropy(logits.flatten(0, -2), labels_BS.flatten(), reduction="sum")
        return (loss.to_local() if isinstance(loss, DTensor) else loss) / context.num_targets


class LossLayer(ChainLayer):
    """Last layer of a user's own module, from the blocks' output to this rank's share of the mean loss."""


_LAYERS: Mapping[LayerRole, type[ChainLayer]] = {
    LayerRole.EMBEDDING: EmbeddingLayer,
    LayerRole.BLOCK: BlockLayer,
    LayerRole.HEAD: HeadLayer,
}


def build_layer(model: PreTrainedModel, chain: ModelChain, layer: int, remat: Remat) -> ChainLayer:
    """Wrap the modules of one layer of the chain in the common calling convention."""
    layer_type, split = chain.type_of(layer), chain.split
    run = split_run(model, split, layer) if isinstance(split, ModelSplit) else model.run(layer)
    layer_class = LossLayer if split.module and layer_type.role is LayerRole.HEAD else _LAYERS[layer_type.role]
    found = layer_class(named_layer_modules(model, chain, layer), chain.family, layer_type, remat, run)
    freeze_layer(found, chain, layer)
    found.num_chunks = loss_chunks(chain) if layer_type.role is LayerRole.HEAD else 1
    if isinstance(split, ModelSplit) and split.streams and layer:
        found.entering, found.past = split.places(layer, layer - 1)
    if chain.trains_routers and layer_type.role is LayerRole.BLOCK:
        loss = router_loss_of(model)
        found.router_loss = loss if loss.has_routers(found) else None
    for path, buffer in outside_buffers(model, split, layer).items():
        found.register_buffer(local_name(path), buffer)
    return found


def tensors_of(flow: Flow) -> tuple[Tensor, ...]:
    """Return the activations as a tuple of tensors."""
    return flow if isinstance(flow, tuple) else (flow,)


def as_flow(tensors: tuple[Tensor, ...]) -> Flow:
    """Return a single tensor as itself, several as a tuple."""
    return tensors if len(tensors) > 1 else tensors[0]


def shared_inputs_of(
    layers: Iterable[ChainLayer], model: PreTrainedModel, chain: ModelChain, device: torch.device
) -> "SharedInputSource":
    """Build the source of the `SharedInputs` that the blocks among these layers read."""
    if chain.split.module:
        return OwnSharedInputs(model, device)
    blocks = [layer for layer in layers if isinstance(layer, BlockLayer)]
    makes_masks = any(reads_mask(block) for block in blocks)
    return SplitSharedInputs(model, chain, {block.layer_type.name for block in blocks}, makes_masks=makes_masks)


class OwnSharedInputs:
    """Counterpart of `SplitSharedInputs` for a user's own module."""

    model_config = None

    def __init__(self, model: OwnModel, device: torch.device) -> None:
        self.arguments = model.arguments(device)

    def __call__(self, _seq_len: int, _dtype: torch.dtype, device: torch.device, *_: Any) -> SharedInputs:
        """Return the shared inputs, which compute block arguments once samples are available."""
        return SharedInputs(position_ids=torch.empty(0, device=device), of_samples=self.arguments)


SharedInputSource = SplitSharedInputs | OwnSharedInputs
"""Source of the `SharedInputs` of a forward pass."""
