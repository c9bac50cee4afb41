"""Reformer's stack has a backward pass of its own over all of its blocks, which no block can be taken out of.

Here autograd goes through them one by one, on two states side by side; activations are kept, or computed again.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard.modules.mixin import mix_in

TYPES = ("reformer",)


class PlainBlock(nn.Module):
    """A block of a reversible stack, whose two states lie side by side."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = layer.attention, layer.feed_forward

    def forward(self, states: Tensor, **options: Any) -> Tensor:
        """The next two states [B, S, 2 H]."""
        attended, hidden = states.chunk(2, -1)
        attended = attended + self.attention(hidden_states=hidden, **options).hidden_states
        return torch.cat([attended, hidden + self.feed_forward(attended)], -1)


class _InPlainBlocks:
    """What replaces the forward pass of a reversible stack."""

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Any:
        """The last hidden state, and nothing of what else the stack may return."""
        names = ("attention_mask", "num_hashes", "orig_sequence_length")
        states = torch.cat([hidden_states, hidden_states], -1)
        for block in self.blocks:
            states = block(states, **{name: options.get(name) for name in names})
        states = functional.dropout(self.layer_norm(states), p=self.dropout, training=self.training)
        return SimpleNamespace(
            hidden_states=states, all_hidden_states=None, all_attentions=None, past_buckets_states=None
        )


def prepare(model: Any) -> None:
    """Gives the stack of a model blocks that autograd goes through one by one, in place; twice does no harm."""
    stack = model.reformer.encoder
    if not isinstance(stack, _InPlainBlocks):
        stack.blocks = nn.ModuleList(PlainBlock(layer) for layer in stack.layers)
        mix_in(stack, _InPlainBlocks)
