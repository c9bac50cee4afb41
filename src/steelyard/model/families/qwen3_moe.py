"""Qwen3 with a mixture of experts: in the feed-forward part of most blocks every token takes a few of many experts.

Under tensor parallelism the experts are divided between the ranks. Source: ``models/qwen3_moe`` of transformers 5.
"""

from steelyard.model.decoder import DENSE, LLAMA_BLOCK, Keys, config_value, decoder, dense_ffn
from steelyard.model.families.qwen2 import upper_layers_slide
from steelyard.model.family import Sizes


def _is_sparse(sizes: Sizes, block: int) -> bool:
    step = sizes.size("decoder_sparse_step", default=1)
    return block not in config_value(sizes, "mlp_only_layers", []) and (block + 1) % step == 0


def _kind(sizes: Sizes, block: int) -> str:
    return "sparse" if _is_sparse(sizes, block) else DENSE


def _ffn(sizes: Sizes, keys: Keys) -> tuple[tuple[str, int], ...]:
    sparse = [_is_sparse(sizes, block) for block in range(sizes.size(keys.blocks))]
    experts = (("experts", sizes.size("num_experts", default=128)),) if any(sparse) else ()
    return experts + (() if all(sparse) else dense_ffn(sizes, keys))


FAMILY = decoder(
    "qwen3_moe",
    keys=Keys(default_kv_heads=4),
    block_tp=LLAMA_BLOCK | {"mlp": "experts"},
    attention=upper_layers_slide,
    kind_of_block=_kind,
    ffn=_ffn,
)
