"""Small models of every family and their plans, shared by the runtime tests."""

from collections.abc import Mapping
from typing import Any

import steelyard.modules  # noqa: F401  which splits them
from steelyard.model.own import Split
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import parse_strategy
from tests.schedules.examples import pipeline

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "num_hidden_layers": 6},
    "llama-tied": {"model_type": "llama", **_SIZES, "num_hidden_layers": 2, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_SIZES, "num_hidden_layers": 2, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **_SIZES, "num_hidden_layers": 2},
    "qwen3": {"model_type": "qwen3", **_SIZES, "num_hidden_layers": 2, "head_dim": 16},
    "gpt_neox": {
        **{key: value for key, value in _SIZES.items() if key not in ("num_key_value_heads", "rms_norm_eps")},
        "model_type": "gpt_neox",
        "num_hidden_layers": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
    },
}

_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
_NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **_TINY} for name in ("llama", "qwen2", "qwen3", "gemma")},
    "qwen3 with two key-value heads": {"model_type": "qwen3", **_TINY, "num_key_value_heads": 2},
    "mistral with one key-value head": {
        "model_type": "mistral",
        **_TINY,
        "sliding_window": 8,
        "num_key_value_heads": 1,
    },
    "mistral": {"model_type": "mistral", **_TINY, "sliding_window": 8},
    "gpt_neox": {
        **{key: value for key, value in _TINY.items() if key not in ("num_key_value_heads", "head_dim")},
        "model_type": "gpt_neox",
    },
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    },
    "gemma2": {"model_type": "gemma2", **_TINY, "sliding_window": 8},
    "gemma3_text": {"model_type": "gemma3_text", **_TINY, "sliding_window": 8, "sliding_window_pattern": 2},
    "mixtral": {"model_type": "mixtral", **_TINY, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", **_TINY, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "mlp_only_layers": [0]},
    },
    "deepseek_v3": {
        **{key: value for key, value in _TINY.items() if key not in ("head_dim", "num_key_value_heads")},
        **{"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
        **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4, "num_key_value_heads": 4},
        **{"bos_token_id": 0, "eos_token_id": 1},
    },
    "bert": {
        **{key: value for key, value in _TINY.items() if key not in ("num_key_value_heads", "head_dim")},
        **{"model_type": "bert", **_NO_BERT_DROPOUT},
    },
    "vit": {
        **{"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 48, "image_size": 16, "patch_size": 4, "num_labels": 10, **_NO_BERT_DROPOUT},
    },
    "t5": {
        **{"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2},
        **{"num_heads": 4, "vocab_size": 64, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    },
    "swin": {
        **{"model_type": "swin", "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2]},
        **{"num_heads": [2, 4], "window_size": 4, "num_labels": 10, "drop_path_rate": 0.0, **_NO_BERT_DROPOUT},
    },
}
"""The smallest model of every family that four processes can divide."""


def make_plan(
    config: str | dict[str, Any] | None,
    *stages: str,
    num_microbatches: int = 4,
    global_batch: int = 32,
    seq_len: int = 32,
    schedule: str = "1f1b",
    precision: str = "fp32",
    num_devices: int = 8,
    num_chunks: int = 1,
    split: Split | None = None,
    sizes: tuple[int, ...] | None = None,
    levers: Mapping[str, str] | None = None,
) -> Plan:
    """A plan whose stages are given as strategies separated by commas, one per layer; all alike without ``sizes``.

    With chunks, they are the parts of the pipeline in the order of the layers.
    """
    num_stages = len(stages) // num_chunks
    sizes = sizes or (num_devices // num_stages,) * num_stages
    parts, first_layer = [], 0
    for index, stage in enumerate(stages):
        strategies = tuple(parse_strategy(text.strip()) for text in stage.split(","))
        place = pipeline(num_stages, num_microbatches, schedule, num_chunks).stage_of(index)
        ranks = (sum(sizes[:place]), sum(sizes[: place + 1]) - 1)
        parts.append(StagePart(ranks=ranks, runs=fold_runs(first_layer, strategies)))
        first_layer += len(strategies)
    return Plan.model_validate(
        {
            "model": {
                "name": "test",
                "config": CONFIGS[config] if isinstance(config, str) else config,
                "split": split and split.model_dump(mode="json"),
            },
            "cluster": "test",
            "seq_len": seq_len,
            "global_batch": global_batch,
            "num_microbatches": num_microbatches,
            "precision": precision,
            "schedule": schedule,
            "levers": dict(levers or {}),
            "stages": [stage.model_dump(mode="json") for stage in stages_of(parts)],
        }
    )
