"""Llama 1 to 3, and models that are published under its name: RMS norms, rotary positions, a gated feed-forward part.

Source: ``models/llama`` of transformers 5.
"""

from steelyard.model.decoder import LLAMA_BLOCK, decoder

FAMILY = decoder("llama", block_tp=LLAMA_BLOCK)
