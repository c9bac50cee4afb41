"""Reformer's stack has a backward pass of its own over all of its layers, which no block can be taken out of.

Here autograd goes through them one by one, on two states side by side; activations are kept, or computed again.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.modules.forward_pass import replace_forward

TYPES = ("reformer",)


def _next_states(layer: Any, states: Tensor, **options: Any) -> Tensor:
    """The two states [B, S, 2 H] behind a layer."""
    attended, hidden = states.chunk(2, -1)
    attended = attended + layer.attention(hidden_states=hidden, **options).hidden_states
    return torch.cat([attended, hidden + layer.feed_forward(attended)], -1)


def _last_states(stack: Any, hidden_states: Tensor, **options: Any) -> SimpleNamespace:
    """The states [B, S, 2 H] behind all layers, which is all that is asked for in training."""
    states = torch.cat([hidden_states, hidden_states], -1)
    for layer in stack.layers:
        states = layer(states, **options)
    states = functional.dropout(stack.layer_norm(states), p=stack.dropout, training=stack.training)
    return SimpleNamespace(hidden_states=states)


def prepare(model: Any) -> None:
    """Has autograd go through the layers of a model one by one, in place; twice does no harm."""
    replace_forward(model.reformer.encoder, _last_states)
    for layer in model.reformer.encoder.layers:
        replace_forward(layer, _next_states)
