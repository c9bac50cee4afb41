"""Gemma 2: norms before and after both parts of a block, capped scores and logits, a window in every other block.

Capped attention scores have no fused kernel: attention runs step by step and keeps the square of the sequence.

Source: ``models/gemma2`` of transformers 5; without the keys it takes 4 key-value heads of size 256.
"""

from steelyard.model.decoder import FULL, LLAMA_BLOCK, Keys, decoder, listed_attention, project_capped
from steelyard.model.family import Sizes

BLOCK = LLAMA_BLOCK | {
    "post_attention_layernorm": "sequence_local",
    "pre_feedforward_layernorm": "sequence",
    "post_feedforward_layernorm": "sequence_local",
}
KEYS = Keys(default_kv_heads=4, default_head_dim=256, default_tied=True)


def _attention(sizes: Sizes, block: int) -> str:
    return listed_attention(sizes, block) or (FULL if block % 2 else "sliding_attention")


FAMILY = decoder(
    "gemma2", keys=KEYS, block_tp=BLOCK, run={"head": project_capped}, attention=_attention, fused_attention=False
)
