"""Asks ftuneai: standard input has questions as JSON, the last line of standard output the estimates."""

import json
import sys

from ftuneai.core.memory import MemoryEstimator
from ftuneai.core.models import FineTuneMethod, LoRATarget, ModelSpec, ShardingStrategy, TrainingConfig
from ftuneai.core.time import TimeEstimator
from ftuneai.loader import get_gpu

SHARDING = {
    0: ShardingStrategy.NONE,
    1: ShardingStrategy.ZERO_1,
    2: ShardingStrategy.ZERO_2,
    3: ShardingStrategy.ZERO_3,
}
STEPS = 1_000_000
"""Steps of the job whose time is asked, since it is rounded to hundredths of an hour."""
SCOPE = ("dense 16-bit", "adapters")


def estimate(asked):
    """Peak bytes and seconds of a step; None where a run is not in its scope."""
    degrees = (asked[name] for name in ("tp", "pp", "cp", "ep"))
    if asked["class"] not in SCOPE or any(degree > 1 for degree in degrees) or asked["low_precision"]:
        return None
    model = ModelSpec(
        name=asked["id"],
        parameters=asked["params"],
        hidden_size=asked["hidden"],
        num_layers=asked["layers"],
        num_attention_heads=asked["heads"],
        num_kv_heads=asked["kv_heads"],
        intermediate_size=asked["ffn"],
        vocab_size=asked["vocab"],
        max_seq_length=asked["seq_len"],
    )
    config = TrainingConfig(
        model=asked["id"],
        method=FineTuneMethod.LORA if asked["lora"] else FineTuneMethod.FULL,
        lora_rank=asked["lora"] or 16,
        lora_target=LoRATarget.ALL_LINEAR,
        batch_size=asked["mbs"],
        seq_length=asked["seq_len"],
        gradient_checkpointing=asked["remat"] == "full",
        flash_attention=True,
        sharding=SHARDING[asked["zero"]],
        num_gpus=asked["dp"],
    )
    found = {"peak_bytes": MemoryEstimator(model, config).estimate().total_gb * 1024**3}
    try:
        gpu = get_gpu(f"{asked['gpu']}-{asked['gpu_mem_gb']}GB")
    except (KeyError, ValueError):
        return found
    time = TimeEstimator(model, config).estimate(gpu, asked["gbs"] * STEPS, epochs=1, num_gpus=asked["dp"])
    return {**found, "step_time_s": time.total_hours * 3600 / STEPS}


answers = {}
for question in json.load(sys.stdin):
    try:
        answer = estimate(question)
    except ValueError:
        continue
    if answer is not None:
        answers[question["id"]] = answer
print(json.dumps(answers))
