"""Two stacks that HRM runs in turn become a block for each call of a layer.

Structure cannot tell what its forward pass does between two calls of a stack: it adds the states of both, keeps one
while the other is made, and switches gradients off. Here the two states lie side by side, the high one first.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from steelyard.modules.forward_pass import replace_forward
from steelyard.modules.repeated import copy_for_call

TYPES = ("hrm_text",)


def _next_states(block: Any, states: Tensor, **options: Any) -> Tensor:
    """The two states [B, S, 2 H] behind one call of a layer."""
    high, low = states.chunk(2, -1)
    with torch.set_grad_enabled(block.learns and torch.is_grad_enabled()):
        made = high + low if block.is_first else high if block.makes_high else low
        made = block.end(block.own_forward(made, **options))
    return torch.cat([made, low] if block.makes_high else [high, made], -1)


def _last_hidden(model: Any, input_ids: Tensor, **_options: Any) -> BaseModelOutputWithPast:
    """The hidden state [B, S, H] of token ids [B, S] behind all calls."""
    hidden = model.embed_tokens(input_ids) * model.embedding_scale
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    mask = create_causal_mask(model.config, hidden, None, None, positions)
    options = {"attention_mask": mask, "position_embeddings": model.rotary_emb(hidden, positions)}
    states = torch.cat([hidden, model.z_L_init.to(hidden.dtype).expand_as(hidden)], -1)
    for block in model.blocks:
        states = block(states, **options)
    return BaseModelOutputWithPast(last_hidden_state=states.chunk(2, -1)[0])


def prepare(model: Any) -> None:
    """Gives a model of two stacks that are run in turn a block for each call of a layer; twice does no harm."""
    stacks, lows = model.model, model.config.L_cycles
    stacks.blocks = nn.ModuleList()
    for high, low in product(range(model.config.H_cycles), range(lows + 1)):
        stack = stacks.H_module if low == lows else stacks.L_module
        for layer in stack.layers:
            block: Any = copy_for_call(layer)
            block.self_attn.layer_idx = len(stacks.blocks)
            block.makes_high, block.learns = low == lows, low + stacks.L_bp_cycles_padded[high] >= lows
            block.is_first = layer is stack.layers[0]
            block.end = stack.final_norm if layer is stack.layers[-1] else nn.Identity()
            replace_forward(block, _next_states)
            stacks.blocks.append(block)
    replace_forward(stacks, _last_hidden)
