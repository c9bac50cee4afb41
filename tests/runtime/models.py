"""Small models of every family, and plans for them, that the tests of the runtime share."""

from typing import Any

from steelyard.plan.plan import Plan, fold_runs
from steelyard.plan.strategy import parse_strategy

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


def make_plan(
    config: str | dict[str, Any],
    *stages: str,
    num_microbatches: int = 4,
    global_batch: int = 32,
    seq_len: int = 32,
    schedule: str = "1f1b",
    precision: str = "fp32",
    num_devices: int = 8,
    num_chunks: int = 1,
) -> Plan:
    """A plan whose stages are given as strategies separated by commas, one per layer.

    Interleaved, they are the parts of the pipeline: chunk 0 of every stage, then chunk 1, and so on.
    """
    num_stages = len(stages) // num_chunks
    size = num_devices // num_stages
    parts, first_layer = [], 0
    for index, stage in enumerate(stages):
        strategies = tuple(parse_strategy(text.strip()) for text in stage.split(","))
        runs = [run.model_dump(mode="json") for run in fold_runs(first_layer, strategies)]
        first_rank = index % num_stages * size
        parts.append({"ranks": [first_rank, first_rank + size - 1], "runs": runs})
        first_layer += len(strategies)
    return Plan.model_validate(
        {
            "model": {"name": "test", "config": CONFIGS[config] if isinstance(config, str) else config},
            "cluster": "test",
            "seq_len": seq_len,
            "global_batch": global_batch,
            "num_microbatches": num_microbatches,
            "precision": precision,
            "schedule": schedule,
            "stages": parts,
        }
    )
