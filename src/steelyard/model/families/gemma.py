"""Gemma: Llama's block with embeddings that are scaled, and tied to the head.

Source: ``models/gemma`` of transformers 5; without the keys it takes 16 key-value heads of size 256.
"""

from steelyard.model.decoder import LLAMA_BLOCK, Keys, decoder

FAMILY = decoder("gemma", keys=Keys(default_kv_heads=16, default_head_dim=256, default_tied=True), block_tp=LLAMA_BLOCK)
