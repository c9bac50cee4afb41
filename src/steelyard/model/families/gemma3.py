"""Gemma 3, the language model: five blocks in six attend to a window and rotate positions by another base.

Source: ``models/gemma3`` of transformers 5, ``Gemma3ForCausalLM``. Not here: the vision tower (``gemma3``).
"""

from steelyard.model.decoder import FULL, config_value, decoder, listed_attention, project_capped
from steelyard.model.families.gemma2 import BLOCK, KEYS
from steelyard.model.family import Sizes


def _attention(sizes: Sizes, block: int) -> str:
    period = config_value(sizes, "sliding_window_pattern", 6)
    return listed_attention(sizes, block) or ("sliding_attention" if (block + 1) % period else FULL)


FAMILY = decoder(
    "gemma3_text",
    keys=KEYS,
    block_tp=BLOCK,
    run={"head": project_capped},
    attention=_attention,
    rotary_by_attention=True,
)
