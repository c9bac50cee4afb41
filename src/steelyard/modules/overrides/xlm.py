"""XLM and FlauBERT keep the parts of their blocks in lists of their own: no module is a block.

Their forward pass takes from each list in turn. Here a block holds the parts of one place, which stay in their lists
too, where their weights have their names, and the own forward pass is that of no layers: it embeds samples, which hold
no padding.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from steelyard.modules.forward_pass import replace_forward

TYPES = ("flaubert", "xlm")
_PARTS = ("attention", "norm1", "feed_forward", "norm2")


def _next_hidden(block: Any, hidden_BSH: Tensor, mask: Tensor) -> Tensor:  # noqa: N803
    """The hidden state [B, S, H] behind a block."""
    (attended,), dropout = block.attention(hidden_BSH, mask), block.feed_forward.dropout
    made = block.norm1(hidden_BSH + functional.dropout(attended, p=dropout, training=block.training))
    return block.norm2(made + block.feed_forward(made))


def _last_hidden(stack: Any, input_ids: Tensor, **options: Any) -> BaseModelOutput:
    """The hidden state of token ids [B, S] behind all blocks."""
    (hidden,) = stack.own_forward(input_ids, **options | {"return_dict": False})
    mask = torch.ones_like(input_ids)  # [B, S], or [B, S, S] where attention is causal
    mask = mask[:, None].expand(-1, mask.shape[1], -1).tril() if stack.causal else mask
    for block in stack.blocks:
        hidden = block(hidden, mask)
    return BaseModelOutput(last_hidden_state=hidden)


def prepare(model: Any) -> None:
    """Gives the stack of a model its list of blocks, in place; twice does no harm."""
    stack = model.transformer
    lists = stack.attentions, stack.layer_norm1, stack.ffns, stack.layer_norm2
    blocks = [dict(zip(_PARTS, parts, strict=True)) for parts in zip(*lists, strict=True)]
    stack.blocks, stack.n_layers = nn.ModuleList(map(nn.ModuleDict, blocks)), 0
    replace_forward(stack, _last_hidden)
    for block in stack.blocks:
        replace_forward(block, _next_hidden)
