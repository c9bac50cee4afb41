"""Small configs of model types without a family file, of many structures."""

from typing import Any

_SMALL = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    **{"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64, "sliding_window": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

SPLIT_CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": {**_SMALL},
    "olmo2": {**_SMALL},
    "cohere2": {**_SMALL, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
    "starcoder2": {**_SMALL},
    "granite": {**_SMALL, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "glm4": {**_SMALL, "head_dim": 16},
    "qwen2_moe": {**_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "gpt_oss": {**_SMALL, **_EXPERTS, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {**_SMALL},
    "roberta": {**_SMALL, "architectures": ["RobertaForMaskedLM"]},
}
"""What is here beside the keys of a type is ignored by it."""


def split_config(model_type: str) -> dict[str, Any]:
    """The config of a type."""
    return {"model_type": model_type, **SPLIT_CONFIGS[model_type]}
