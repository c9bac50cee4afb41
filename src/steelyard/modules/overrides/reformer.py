"""Reformer's stack has a backward pass of its own over all of its layers, which no block can be taken out of.

Here autograd goes through them one by one, on two states side by side; activations are kept, or computed again.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.modules.mixin import mix_in

TYPES = ("reformer",)


class _WithGradients:
    """What replaces the forward pass of a layer."""

    def forward(self: Any, states: Tensor, **options: Any) -> Tensor:
        """The next two states [B, S, 2 H]."""
        attended, hidden = states.chunk(2, -1)
        attended = attended + self.attention(hidden_states=hidden, **options).hidden_states
        return torch.cat([attended, hidden + self.feed_forward(attended)], -1)


class _OneByOne:
    """What replaces the forward pass of a reversible stack."""

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Any:
        """The last hidden state [B, S, 2 H], which is all that is asked for where nothing is kept for later tokens."""
        states = torch.cat([hidden_states, hidden_states], -1)
        for layer in self.layers:
            states = layer(states, **options)
        states = functional.dropout(self.layer_norm(states), p=self.dropout, training=self.training)
        return SimpleNamespace(hidden_states=states)


def prepare(model: Any) -> None:
    """Has autograd go through the layers of a model one by one, in place; twice does no harm."""
    mix_in(model.reformer.encoder, _OneByOne)
    for layer in model.reformer.encoder.layers:
        mix_in(layer, _WithGradients)
