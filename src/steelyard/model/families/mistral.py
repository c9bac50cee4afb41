"""Mistral: Llama's block, all of whose layers attend to a sliding window unless the config says null.

Source: ``models/mistral`` of transformers 5; without the keys it takes 8 key-value heads and a window of 4,096.
"""

from steelyard.model.decoder import FULL, LLAMA_BLOCK, Keys, decoder, listed_attention
from steelyard.model.family import Sizes


def _attention(sizes: Sizes, block: int) -> str:
    windowed = sizes.config.get("sliding_window", 4096) is not None
    return listed_attention(sizes, block) or ("sliding_attention" if windowed else FULL)


FAMILY = decoder("mistral", keys=Keys(default_kv_heads=8), block_tp=LLAMA_BLOCK, attention=_attention)
