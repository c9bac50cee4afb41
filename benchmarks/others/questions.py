"""A published run as plain numbers: the model's sizes, the plan with the framework's defaults, and the device."""

from collections.abc import Mapping
from typing import Any

from published_runs.classes import class_of, is_low_precision
from published_runs.frameworks import framework_of
from published_runs.jobs import Case

Question = Mapping[str, Any]


def question_of(case: Case) -> Question:
    """The numbers of a run that this project can price, by name; sizes in elements, degrees in ranks."""
    run, pipeline = case.run, case.plan
    strategy = pipeline.strategies[1]
    framework = framework_of(run)
    assert framework is not None, "of every run that is priced"
    count = {name: run.count(name) or 0 for name in ("layers", "hidden", "heads", "ffn", "vocab", "mbs", "gbs", "gpus")}
    kv_heads, head_dim = run.count("kv_heads") or count["heads"], run.count("head_dim")
    head_dim = head_dim or count["hidden"] // count["heads"]
    gated = run.text("mlp_type") in ("swiglu", "geglu")
    degrees = {name: run.count(name) or 1 for name in ("tp", "pp", "vpp", "cp", "ep")}
    dp = count["gpus"] // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    attention = count["hidden"] * head_dim * 2 * (count["heads"] + kv_heads)
    block = attention + (3 if gated else 2) * count["hidden"] * count["ffn"] + 2 * count["hidden"]
    embedding = count["vocab"] * count["hidden"]
    tied = run.text("tied_emb") == "True"
    return {
        "id": run.id,
        "class": class_of(run),
        "framework": run.text("framework").lower(),
        "gpu": run.text("gpu"),
        "gpu_mem_gb": run.count("gpu_mem_gb") or case.job.cluster.device.known_memory_bytes() // 10**9,
        "gpus_per_node": run.count("gpus_per_node") or 8,
        **count,
        **degrees,
        "dp": dp,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "gated": gated,
        "tied": tied,
        "seq_len": case.job.seq_len,
        "microbatches": count["gbs"] // (count["mbs"] * dp),
        "sp": bool(strategy.mode("sp")),
        "remat": str(strategy.remat),
        "zero": framework.zero_stage(run),
        "lora": run.count("lora") or 0,
        "low_precision": is_low_precision(run),
        "params": count["layers"] * block + embedding * (1 if tied else 2) + count["hidden"],
        "largest_layer_params": max(block, embedding),
    }
