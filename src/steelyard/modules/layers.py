"""The layers of a chain as modules with one calling convention, so that a stage is a plain loop over them.

Legend of shape suffixes: B samples of this rank, S sequence length, s sequence of this rank (S/tp under sequence
parallelism, else S), H hidden size, V vocabulary of this rank.

Every layer maps what flows along the chain to what flows on: token ids [B, S] → hidden state [B, s, H] → … → loss [].
What all blocks share (positions, mask) is computed once per forward and passed as `SideInputs`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.masking_utils import create_sliding_window_causal_mask

from steelyard.errors import InvalidModelError
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.modules.build import layer_modules
from steelyard.modules.remat import REMAT_CONTEXTS
from steelyard.plan.strategy import Remat

_ATTENTION_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideInputs:
    """What every block reads beside the hidden state; the same on all ranks, over the full sequence."""

    position_ids: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    masks: dict[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """What a forward pass of a microbatch carries along beside the hidden state."""

    side: SideInputs
    labels_BS: Tensor | None  # noqa: N815
    """The next token at every place; needed by the head alone."""
    num_tokens: int
    """Tokens of the whole global batch, over which the loss is the mean."""


class ChainLayer(nn.Module, ABC):
    """One layer of the chain; ``remat`` decides how much of its forward pass is run again in the backward pass."""

    def __init__(self, remat: Remat) -> None:
        super().__init__()
        self.remat = remat

    @abstractmethod
    def run(self, inputs: Tensor, context: LayerContext) -> Tensor:
        """The layer's forward computation, without remat."""

    def forward(self, inputs: Tensor, context: LayerContext) -> Tensor:
        """The layer's output; recomputed in backward where the strategy says so."""
        if self.remat is Remat.NONE:
            return self.run(inputs, context)
        return checkpoint(self.run, inputs, context, use_reentrant=False, context_fn=REMAT_CONTEXTS[self.remat])


class EmbeddingLayer(ChainLayer):
    """Token ids [B, S] to hidden state [B, s, H]."""

    def __init__(self, embedding: nn.Module, remat: Remat) -> None:
        super().__init__(remat)
        self.embedding = embedding

    def run(self, inputs: Tensor, context: LayerContext) -> Tensor:
        """Looks the tokens up."""
        return self.embedding(inputs)


class BlockLayer(ChainLayer):
    """Hidden state [B, s, H] to hidden state [B, s, H] through one unmodified Transformer block."""

    def __init__(self, block: nn.Module, attention_type: str, remat: Remat) -> None:
        super().__init__(remat)
        self.block = block
        self.attention_type = attention_type

    def run(self, inputs: Tensor, context: LayerContext) -> Tensor:
        """Runs the block."""
        side = context.side
        return self.block(
            inputs,
            attention_mask=side.masks[self.attention_type],
            position_ids=side.position_ids,
            position_embeddings=side.position_embeddings,
            use_cache=False,
        )


class HeadLayer(ChainLayer):
    """Hidden state [B, s, H] and labels [B, S] to the sum of the tokens' losses divided by ``num_tokens``.

    ``num_tokens`` is the count over the whole global batch, so that losses and gradients of ranks and microbatches add
    up to those of one process. Under tensor parallelism the logits stay sharded over the vocabulary; the caller runs
    forward and backward inside `torch.distributed.tensor.parallel.loss_parallel`.
    """

    def __init__(self, norm: nn.Module, output: nn.Module, remat: Remat) -> None:
        super().__init__(remat)
        self.norm = norm
        self.output = output

    def run(self, inputs: Tensor, context: LayerContext) -> Tensor:
        """Projects and takes the cross entropy in fp32, as `transformers` does."""
        logits_BSV = self.output(self.norm(inputs)).float()  # noqa: N806
        loss = functional.cross_entropy(logits_BSV.flatten(0, 1), context.labels_BS.flatten(), reduction="sum")
        return (loss.to_local() if isinstance(loss, DTensor) else loss) / context.num_tokens


def build_layer(model: PreTrainedModel, chain: ModelChain, layer: int, remat: Remat) -> ChainLayer:
    """Wraps the modules of one layer of the chain in the common calling convention."""
    modules = list(layer_modules(model, chain, layer).values())
    role = chain.kind_of(layer).role
    if role is LayerRole.EMBEDDING:
        return EmbeddingLayer(modules[0], remat)
    if role is LayerRole.BLOCK:
        return BlockLayer(modules[0], _attention_type(model, layer - 1), remat)
    return HeadLayer(modules[0], modules[1], remat)


class SideInputBuilder(nn.Module):
    """Computes the `SideInputs` of a forward pass from the unmodified model's rotary embedding and masks.

    Plain causal attention needs no mask: the attention kernel is causal by itself. A sliding window shorter than the
    sequence gets the mask that `transformers` makes.
    """

    def __init__(self, model: PreTrainedModel, rotary: nn.Module, attention_types: set[str]) -> None:
        super().__init__()
        self.model_config = model.config
        self.rotary = rotary
        self.attention_types = attention_types

    @torch.no_grad()
    def forward(self, seq_len: int, dtype: torch.dtype, device: torch.device) -> SideInputs:
        """Positions and masks for samples of ``seq_len`` tokens; a mask is [1, 1, S, S], the same for every sample."""
        positions_1S = torch.arange(seq_len, device=device).unsqueeze(0)  # noqa: N806
        like = torch.empty((1, seq_len, 1), dtype=dtype, device=device)
        return SideInputs(
            position_ids=positions_1S,
            position_embeddings=self.rotary(like, position_ids=positions_1S),
            masks={kind: self._mask(kind, like, positions_1S) for kind in sorted(self.attention_types)},
        )

    def _mask(self, attention_type: str, like: Tensor, positions_1S: Tensor) -> Tensor | None:  # noqa: N803
        window = getattr(self.model_config, "sliding_window", None)
        if attention_type == "full_attention" or window is None or window >= like.shape[1]:
            return None
        return create_sliding_window_causal_mask(
            config=self.model_config,
            inputs_embeds=like,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions_1S,
        )


def _attention_type(model: PreTrainedModel, block: int) -> str:
    """``full_attention`` or ``sliding_attention``; anything else is an error, never taken for plain causal."""
    layer_types = getattr(model.config, "layer_types", None)
    if layer_types:
        if layer_types[block] not in _ATTENTION_TYPES:
            raise InvalidModelError(
                field=f"layer_types[{block}]",
                found=repr(layer_types[block]),
                expected="one of " + ", ".join(_ATTENTION_TYPES),
                hint="this kind of attention is not supported yet",
            )
        return layer_types[block]
    return "sliding_attention" if getattr(model.config, "sliding_window", None) else "full_attention"
