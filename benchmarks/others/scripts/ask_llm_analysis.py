"""Asks llm-analysis: standard input has questions as JSON, the last line of standard output the estimates."""

import json
import logging
import sys

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import DtypeConfig, ModelConfig, ParallelismConfig, get_gpu_config_by_name

logging.disable(logging.CRITICAL)
EFFICIENCY = 0.5
"""Of peak FLOP/s: ``constant.py`` calls it about what Megatron-LM reaches."""
GPUS = {
    ("A100", 80): "a100-sxm-80gb",
    ("A100", 40): "a100-sxm-40gb",
    ("H100", 80): "h100-sxm-80gb",
    ("V100", 32): "v100-sxm-32gb",
    ("V100", 16): "v100-sxm-16gb",
}
REMAT = {
    "none": ActivationRecomputation.NONE,
    "selective": ActivationRecomputation.SELECTIVE,
    "full": ActivationRecomputation.FULL,
}


def estimate(asked):
    """Peak bytes, bytes of states and seconds of a step; None where a run is not in its scope."""
    gpu = GPUS.get((asked["gpu"], asked["gpu_mem_gb"]))
    if gpu is None or asked["class"] != "dense 16-bit" or asked["remat"] not in REMAT:
        return None
    analysis = LLMAnalysis(
        ModelConfig(
            name=asked["id"],
            num_layers=asked["layers"],
            n_head=asked["heads"],
            hidden_dim=asked["hidden"],
            vocab_size=asked["vocab"],
            max_seq_len=asked["seq_len"],
            num_key_value_heads=asked["kv_heads"],
            ffn_embed_dim=asked["ffn"],
            expansion_ratio=asked["ffn"] / asked["hidden"],
        ),
        get_gpu_config_by_name(gpu),
        DtypeConfig(),
        ParallelismConfig(
            tp_size=asked["tp"], pp_size=asked["pp"], dp_size=asked["dp"], sp_size=asked["tp"] if asked["sp"] else 1
        ),
        flops_efficiency=EFFICIENCY,
    )
    found = analysis.training(
        batch_size_per_gpu=asked["mbs"],
        gradient_accumulation_steps=asked["microbatches"],
        global_batch_size=asked["gbs"],
        seq_len=asked["seq_len"],
        activation_recomputation=REMAT[asked["remat"]],
        ds_zero=DSZeRO(asked["zero"]),
        mlp_gated_linear_units=asked["gated"],
    )
    return {
        "peak_bytes": found["(weight+op_state+grad+act)_memory_per_gpu"],
        "states_bytes": found["(weight+op_state+grad)_memory_per_gpu"],
        "step_time_s": found["latency_per_iter"],
    }


answers = {}
for question in json.load(sys.stdin):
    try:
        answer = estimate(question)
    except (AssertionError, ValueError):
        continue
    if answer is not None:
        answers[question["id"]] = answer
print(json.dumps(answers))
