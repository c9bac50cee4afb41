"""Small configs of model types without a family file, of many structures."""

from typing import Any

_SMALL = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    **{"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64, "sliding_window": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}

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
    "bloom": {**_SMALL, "n_layer": 2, "n_head": 4},
    "xglm": {**_SMALL, "d_model": 64, "attention_heads": 4, "ffn_dim": 96, "num_layers": 2, "activation_dropout": 0.0},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64, "vocab_size": 128},
    "deepseek_v2": {
        **{**_SMALL, **_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **_LATENT,
        "n_shared_experts": 1,
    },
    "hunyuan_v1_moe": {**_SMALL, **_EXPERTS, "head_dim": 16, "moe_topk": 2},
    "mamba": {**_SMALL, "state_size": 8, "expand": 2, "time_step_rank": 16},
    "qwen3_next": {
        **{**_SMALL, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32},
        **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "apertus": {**_SMALL},
    "biogpt": {**_SMALL},
    "nemotron": {**_SMALL},
    "stablelm": {**_SMALL},
    "helium": {**_SMALL, "head_dim": 16},
    "seed_oss": {**_SMALL, "head_dim": 16},
    "electra": {**_SMALL, "embedding_size": 32, "architectures": ["ElectraForMaskedLM"]},
    "rembert": {
        **_SMALL,
        "input_embedding_size": 32,
        "output_embedding_size": 96,
        "architectures": ["RemBertForMaskedLM"],
    },
    "roberta": {**_SMALL, **_NO_DROPOUT, "architectures": ["RobertaForMaskedLM"]},
}
BESIDE_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        **{**_SMALL, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 32},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True},
        **{"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 128},
    },
    "zamba2": {
        **{**_SMALL, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
        **{"hybrid_layer_ids": [1, 3], "mamba_d_state": 8, "mamba_headdim": 32, "n_mamba_heads": 4, "chunk_size": 16},
        **{"num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32},
    },
    "mpnet": {**_SMALL, **_NO_DROPOUT, "architectures": ["MPNetForMaskedLM"]},
}
"""Models whose blocks read more than the hidden state that depends on parameters."""
"""A type ignores keys that it does not know."""

_IMAGES = {"image_size": 32, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
IMAGE_CONFIGS: dict[str, dict[str, Any]] = {
    "dinov2": {**_IMAGES, "num_labels": 10},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32, "num_labels": 10},
}

_STACKS = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 128, "max_position_embeddings": 64}
_STACKS |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
_STACKS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0}
ENCODER_CONFIGS: dict[str, dict[str, Any]] = {
    "bart": {**_STACKS, "architectures": ["BartForConditionalGeneration"]},
    "blenderbot-small": {**_STACKS, "architectures": ["BlenderbotSmallForConditionalGeneration"]},
    "mt5": {
        **{"d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 96, "vocab_size": 128},
        **{"dropout_rate": 0.0, "pad_token_id": 0, "architectures": ["MT5ForConditionalGeneration"]},
    },
}
"""Models with an encoder and a decoder."""
EXPERT_CONFIGS: dict[str, dict[str, Any]] = {
    "switch_transformers": {
        **{"d_model": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 96},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 8, "expert_capacity": 64},
        **{"dropout_rate": 0.0, "router_jitter_noise": 0.0, "vocab_size": 128, "decoder_start_token_id": 0},
        "architectures": ["SwitchTransformersForConditionalGeneration"],
    },
}
"""Whose experts are modules of their own, of which a rank's tokens may choose none."""

PADDED_CONFIGS: dict[str, dict[str, Any]] = {
    "pegasus_x": {
        **{**_STACKS, "max_position_embeddings": 128, "block_size": 64, "num_global_tokens": 8},
        "architectures": ["PegasusXForConditionalGeneration"],
    },
}
"""Models whose sequence length is a multiple of a window."""
LENGTH_CONFIGS: dict[str, dict[str, Any]] = {
    "cpmant": {
        **{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "dim_head": 16, "dim_ff": 96},
        **{"vocab_size": 128, "prompt_length": 8, "prompt_types": 4, "segment_types": 4, "pad_token_id": 0},
    },
}
"""Whose states are longer than the samples."""


OTHERWISE_CONFIGS: dict[str, dict[str, Any]] = {
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 128},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "hy_v4": {
        **{**_SMALL, **_EXPERTS, **_LATENT, "num_hidden_layers": 3, "n_routed_experts": 4, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 4, "hc_mult": 3},
    },
    "mllama": {
        "architectures": ["MllamaForCausalLM"],
        "text_config": {**_SMALL, "num_hidden_layers": 3, "cross_attention_layers": [1]},
    },
    "roformer": {**_SMALL, **_NO_DROPOUT, "embedding_size": 64, "is_decoder": True},
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_head": 16, "d_inner": 96, "vocab_size": 128, "dropout": 0.0},
    "rwkv": {
        **{"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"vocab_size": 128, "context_length": 64},
    },
    "zaya": {
        **{**_SMALL, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 1, "head_dim": 16},
        **{"moe_intermediate_size": 32, "layer_types": ["hybrid"] * 3},
    },
    "squeezebert": {
        **{**_SMALL, **_NO_DROPOUT, "embedding_size": 64, "architectures": ["SqueezeBertForMaskedLM"]},
    },
    "neomme": {
        **{**_SMALL, "num_hidden_layers": 3, "embedding_rank": 32, "head_dim": 16, "patch_size": 4},
        **{"sliding_window": 256, "architectures": ["NeoMMEForMaskedLM"]},
    },
    "minimax": {**_SMALL, **_EXPERTS, "head_dim": 16, "layer_types": ["full_attention", "linear_attention"]},
}
"""Models whose blocks read values, hold frozen tables, put tokens first or pass two states, or with parameters outside
blocks."""
_SPEECH = {key: value for key, value in _STACKS.items() if key != "max_position_embeddings"}
_SPEECH |= {"max_source_positions": 24, "max_target_positions": 64}
_PATCHES = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": [16, 24]}
_TURNED = {
    **{key: value for key, value in _SMALL.items() if key not in ("pad_token_id", "sliding_window")},
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}
_VISION_TOKENS = {
    f"{name}_token_id": 127 - n for n, name in enumerate(("image", "video", "vision_start", "vision_end"))
}
FEATURE_CONFIGS: dict[str, dict[str, Any]] = {
    "whisper": {**_SPEECH, "num_mel_bins": 8, "begin_suppress_tokens": None},
    "llava": {
        "vision_config": {
            **{"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
            **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32},
        },
        "text_config": {"model_type": "llama", **_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"image_token_index": 127, "architectures": ["LlavaForConditionalGeneration"]},
    },
    "qwen2_vl": {
        "vision_config": {**_PATCHES, "depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **{"text_config": _TURNED, "architectures": ["Qwen2VLForConditionalGeneration"], **_VISION_TOKENS},
    },
    "qwen2_5_vl": {
        "vision_config": {
            **{**_PATCHES, "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48},
            **{"window_size": 16, "fullatt_block_indexes": [1]},
        },
        **{"text_config": _TURNED, "architectures": ["Qwen2_5_VLForConditionalGeneration"], **_VISION_TOKENS},
    },
    "qwen3_vl": {
        "vision_config": {
            **{**_PATCHES, "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48},
            **{"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
        },
        "text_config": {**_TURNED, "num_hidden_layers": 3, "head_dim": 16},
        **{"architectures": ["Qwen3VLForConditionalGeneration"], **_VISION_TOKENS},
    },
    "speech_to_text": {**_SPEECH, "input_feat_per_channel": 8, "conv_channels": 32},
}
"""Whose samples hold more than token ids."""
_ALL = (
    SPLIT_CONFIGS
    | BESIDE_CONFIGS
    | IMAGE_CONFIGS
    | ENCODER_CONFIGS
    | EXPERT_CONFIGS
    | PADDED_CONFIGS
    | LENGTH_CONFIGS
    | OTHERWISE_CONFIGS
    | FEATURE_CONFIGS
)


def split_config(model_type: str) -> dict[str, Any]:
    """The config of a type."""
    return {"model_type": model_type, **_ALL[model_type]}
