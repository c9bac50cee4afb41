"""What prepares models of some types and takes torch to write; `steelyard.model.split` has the rest.

XLM and FlauBERT keep the parts of their blocks in lists of their own, and their forward pass takes from each list in
turn. Here a block holds the parts of one place, which stay in their lists too, where their weights have their names;
the forward pass is that of samples without padding, of one language. Reformer's stack has a backward pass over all of
its blocks; here autograd goes through them one by one. Routers that cast their own weights within a forward pass leave
them as they are. `steelyard.modules.split_proof` proves all this equal to the unmodified model.

Legend of shapes: B samples, S tokens, H hidden width.
"""

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from steelyard.model.split import PREPARES


class BlockOfParts(nn.Module):
    """One block: the parts of one place of every list."""

    def __init__(self, stack: nn.Module, place: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = stack.attentions[place], stack.ffns[place]
        self.norm1, self.norm2 = stack.layer_norm1[place], stack.layer_norm2[place]
        self.dropout, self.norms_first = stack.dropout, getattr(stack, "pre_norm", False)

    def forward(self, hidden_BSH: Tensor, mask: Tensor) -> Tensor:  # noqa: N803
        """The next hidden state [B, S, H]."""
        first, second = (self.norm1, self.norm2) if self.norms_first else (_same, _same)
        last, end = (_same, _same) if self.norms_first else (self.norm1, self.norm2)
        attended = functional.dropout(
            self.attention(first(hidden_BSH), mask)[0], p=self.dropout, training=self.training
        )
        hidden_BSH = last(hidden_BSH + attended)  # noqa: N806
        return end(hidden_BSH + self.feed_forward(second(hidden_BSH)))


def _same(hidden: Tensor) -> Tensor:
    return hidden


class _InBlocks:
    """What replaces the forward pass of the stack."""

    def forward(self: Any, input_ids: Tensor, **_options: Any) -> BaseModelOutput:
        """The last hidden state of token ids [B, S]."""
        samples, tokens = input_ids.shape
        lengths = input_ids.new_full((samples,), tokens)
        _, mask = sys.modules[type(self.attentions[0]).__module__].get_masks(tokens, lengths, self.causal)
        hidden = self.embeddings(input_ids) + self.position_embeddings(self.position_ids[:, :tokens])
        hidden = functional.dropout(self.layer_norm_emb(hidden), p=self.dropout, training=self.training)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return BaseModelOutput(last_hidden_state=hidden)


def join_parts(model: Any) -> None:
    """Gives the stack of a model its list of blocks, in place; twice does no harm."""
    stack = model.transformer
    if not isinstance(stack, _InBlocks):
        stack.blocks = nn.ModuleList(BlockOfParts(stack, place) for place in range(stack.n_layers))
        stack.__class__ = type(type(stack).__name__, (_InBlocks, type(stack)), {"__module__": __name__})


class PlainBlock(nn.Module):
    """A block of a reversible stack, whose two states lie side by side; its activations are kept, or computed again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = layer.attention, layer.feed_forward

    def forward(self, states: Tensor, mask: Tensor | None, num_hashes: int | None, tokens: int | None) -> Tensor:
        """The next two states [B, S, 2 H]."""
        attended, hidden = states.chunk(2, -1)
        options = {"attention_mask": mask, "num_hashes": num_hashes, "orig_sequence_length": tokens}
        attended = attended + self.attention(hidden_states=hidden, **options).hidden_states
        return torch.cat([attended, hidden + self.feed_forward(attended)], -1)


class _InPlainBlocks:
    """What replaces the forward pass of a reversible stack, which has a backward pass of its own over all blocks."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        num_hashes: int | None = None,
        orig_sequence_length: int | None = None,
        **_options: Any,
    ) -> Any:
        """The last hidden state, and nothing of what else the stack may return."""
        states = torch.cat([hidden_states, hidden_states], -1)
        for block in self.blocks:
            states = block(states, attention_mask, num_hashes, orig_sequence_length)
        states = functional.dropout(self.layer_norm(states), p=self.dropout, training=self.training)
        return SimpleNamespace(
            hidden_states=states, all_hidden_states=None, all_attentions=None, past_buckets_states=None
        )


def leave_reversibility(model: Any) -> None:
    """Gives the stack of a model blocks that autograd goes through one by one, in place; twice does no harm."""
    stack = model.reformer.encoder
    if not isinstance(stack, _InPlainBlocks):
        stack.blocks = nn.ModuleList(PlainBlock(layer) for layer in stack.layers)
        stack.__class__ = type(type(stack).__name__, (_InPlainBlocks, type(stack)), {"__module__": __name__})


class RouterLinear(nn.Linear):
    """A router's matrix that computes in the type of what it reads."""

    def to(self, *_places: Any, **_names: Any) -> "RouterLinear":
        """This matrix as it is."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """The product in the type of the inputs."""
        bias = self.bias if self.bias is None else self.bias.to(inputs.dtype)
        return functional.linear(inputs, self.weight.to(inputs.dtype), bias)


def keep_router_types(model: Any) -> None:
    """Has routers leave their weights of the type that they have, in place; twice does no harm."""
    for router in model.modules():
        if (
            isinstance(vars(router).get("dtype"), torch.dtype)
            and type(getattr(router, "classifier", None)) is nn.Linear
        ):
            router.classifier.__class__ = RouterLinear


def _also(before: Callable[[Any], None]) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        before(model)
        keep_router_types(model)

    return prepare


ADDED: Mapping[str, Callable[[Any], None]] = {
    "flaubert": join_parts,
    "xlm": join_parts,
    "reformer": leave_reversibility,
    "nllb-moe": keep_router_types,
    "switch_transformers": _also(PREPARES["switch_transformers"]),
}
"""As `steelyard.model.split.PREPARES`."""
