"""Two stacks that HRM runs in turn become a block for each call of a layer.

Structure cannot tell what its forward pass does between two calls: it adds the states of both stacks, keeps one while
the other is made, and switches gradients off.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from steelyard.modules.mixin import mix_in

TYPES = ("hrm_text",)


class CycleBlock(nn.Module):
    """One call of a layer of a stack that is run again and again, on two states that lie side by side.

    These are what the stack is making, or the last one made, and what the other kind of stack has made.
    """

    def __init__(
        self, layer: nn.Module, *, end: nn.Module | None, is_first: bool, keeps_last: bool, learns: bool
    ) -> None:
        super().__init__()
        self.layer, self.end, self.is_first = layer, end or nn.Identity(), is_first
        self.keeps_last, self.learns = keeps_last, learns

    def forward(self, states: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The next two states [B, S, 2 H]."""
        made, other = states.chunk(2, -1)
        kept = made if self.keeps_last else other
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            made = made + other if self.is_first else made
            made = self.end(self.layer(made, attention_mask=mask, position_embeddings=rotary))
        return torch.cat([made, kept], -1)


class _InCycles:
    """What replaces the forward pass of a model of two stacks that are run in turn."""

    def forward(self: Any, input_ids: Tensor, **_options: Any) -> BaseModelOutputWithPast:
        """The last hidden state of token ids [B, S]."""
        hidden = self.embed_tokens(input_ids) * self.embedding_scale
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        none = {"attention_mask": None, "past_key_values": None}
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, position_ids=positions, **none)
        rotary = self.rotary_emb(hidden, positions)
        states = torch.cat([hidden, self.z_L_init.to(hidden.dtype).expand_as(hidden)], -1)
        for block in self.blocks:
            states = block(states, mask, rotary)
        return BaseModelOutputWithPast(last_hidden_state=states.chunk(2, -1)[0])


def prepare(model: Any) -> None:
    """Gives a model of two stacks that are run in turn a block for each call of a layer; twice does no harm."""
    stacks = model.model
    if isinstance(stacks, _InCycles):
        return
    own = {id(each): each for each in stacks.modules() if not [*each.children()]}  # which all copies hold
    config, blocks = stacks.config, []
    for high in range(config.H_cycles):
        learning = stacks.L_bp_cycles_padded[high] if high < len(stacks.L_bp_cycles_padded) else 1
        for low in range(config.L_cycles + 1):
            is_high = low == config.L_cycles
            stack = stacks.H_module if is_high else stacks.L_module
            learns = is_high or low >= config.L_cycles - learning
            for place, layer in enumerate(stack.layers):
                end = stack.final_norm if place == len(stack.layers) - 1 else None
                starts = {"is_first": not place, "keeps_last": not place and low in (0, config.L_cycles)}
                called = deepcopy(layer, dict(own))
                called.self_attn.layer_idx = len(blocks)
                blocks.append(CycleBlock(called, end=end, learns=learns, **starts))
    stacks.blocks = nn.ModuleList(blocks)
    mix_in(stacks, _InCycles)
