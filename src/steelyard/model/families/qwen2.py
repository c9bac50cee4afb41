"""Qwen2 and Qwen2.5: Llama's block with biases on query, key and value.

Source: ``models/qwen2`` of transformers 5; without the key it takes 32 key-value heads.
"""

from steelyard.model.decoder import FULL, LLAMA_BLOCK, Keys, decoder, listed_attention
from steelyard.model.family import Sizes


def upper_layers_slide(sizes: Sizes, block: int) -> str:
    """Sliding from block ``max_window_layers`` on, where ``use_sliding_window`` says so; else full attention."""
    config = sizes.config
    slides = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    first = config.get("max_window_layers", 28)
    return listed_attention(sizes, block) or ("sliding_attention" if slides and block >= first else FULL)


FAMILY = decoder("qwen2", keys=Keys(default_kv_heads=32), block_tp=LLAMA_BLOCK, attention=upper_layers_slide)
