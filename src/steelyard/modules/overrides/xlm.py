"""XLM and FlauBERT keep the parts of their blocks in lists of their own: no module is a block.

Their forward pass takes from each list in turn. Here a block holds the parts of one place, which stay in their lists
too, where their weights have their names; the forward pass is that of samples without padding, of one language.

Legend of shapes: B samples, S tokens, H hidden width.
"""

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from steelyard.modules.mixin import mix_in

TYPES = ("flaubert", "xlm")


class BlockOfParts(nn.Module):
    """One block: the parts of one place of every list."""

    def __init__(self, stack: nn.Module, place: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = stack.attentions[place], stack.ffns[place]
        self.norm1, self.norm2 = stack.layer_norm1[place], stack.layer_norm2[place]
        self.dropout, self.norms_first = stack.dropout, getattr(stack, "pre_norm", False)

    def forward(self, hidden_BSH: Tensor, mask: Tensor) -> Tensor:  # noqa: N803
        """The next hidden state [B, S, H]."""
        read = self.norm1(hidden_BSH) if self.norms_first else hidden_BSH
        made = hidden_BSH + functional.dropout(self.attention(read, mask)[0], p=self.dropout, training=self.training)
        if self.norms_first:
            return made + self.feed_forward(self.norm2(made))
        made = self.norm1(made)
        return self.norm2(made + self.feed_forward(made))


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


def prepare(model: Any) -> None:
    """Gives the stack of a model its list of blocks, in place; twice does no harm."""
    stack = model.transformer
    if not isinstance(stack, _InBlocks):
        stack.blocks = nn.ModuleList(BlockOfParts(stack, place) for place in range(stack.n_layers))
        mix_in(stack, _InBlocks)
