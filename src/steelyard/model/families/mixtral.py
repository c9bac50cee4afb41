"""Mixtral: Mistral's block whose feed-forward part is a mixture of experts, of which every token takes two.

Under tensor parallelism the experts are divided between the ranks.

Source: ``models/mixtral`` of transformers 5; without the keys it takes 8 key-value heads, 8 experts and no window.
"""

from steelyard.model.decoder import LLAMA_BLOCK, Keys, decoder
from steelyard.model.family import Sizes


def _experts(sizes: Sizes, _keys: Keys) -> tuple[tuple[str, int], ...]:
    return (("experts", sizes.size("num_local_experts", default=8)),)


FAMILY = decoder("mixtral", keys=Keys(default_kv_heads=8), block_tp=LLAMA_BLOCK | {"mlp": "experts"}, ffn=_experts)
