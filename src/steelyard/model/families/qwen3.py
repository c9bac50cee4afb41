"""Qwen3: Llama's block with a norm on every query and key head.

Source: ``models/qwen3`` of transformers 5; without the keys it takes 32 key-value heads of size 128.
"""

from steelyard.model.decoder import LLAMA_BLOCK, Keys, decoder
from steelyard.model.families.qwen2 import upper_layers_slide

FAMILY = decoder(
    "qwen3",
    keys=Keys(default_kv_heads=32, default_head_dim=128),
    block_tp=LLAMA_BLOCK,
    attention=upper_layers_slide,
)
