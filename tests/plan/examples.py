"""Plans made by hand: a model of four blocks on four devices in two stages, as JSON-like content."""

import copy
from typing import Any

from steelyard.errors import InvalidPlanError
from steelyard.plan.file import parse_value
from steelyard.plan.plan import Plan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "sliding_window": None,
}
COST_SOURCE = {
    "method": "measured",
    "model_name": "tiny",
    "config_hash": "0",
    "seq_len": 64,
    "precision": "fp32",
    "device": "cpu",
    "device_kind": "cpu",
    "num_devices": 4,
    "torch": "0",
    "transformers": "0",
    "created": "2026-01-01",
}
PREDICTION = {
    "step_time_s": 1.5,
    "tokens_per_s_per_device": 100.0,
    "mfu": 0.4,
    "budget_bytes": 1000,
    "stages": [
        {"time_s": {"compute": 0.25}, "memory_bytes": {"parameters": 10, "activations": 20}},
        {"time_s": {"compute": 0.5, "tp": 0.125}, "memory_bytes": {"parameters": 30}},
    ],
    "certificate": {"status": "optimal", "gap": 0.0},
    "lower_bound_s": 1.5,
    "profile": COST_SOURCE,
    "backend": "gloo",
    "alternatives": [{"description": "dp4", "reason": "does not fit"}],
}
CONTENT: dict[str, Any] = {
    "version": 1,
    "model": {"name": "tiny", "config": CONFIG},
    "cluster": "1x4xcpu",
    "seq_len": 64,
    "global_batch": 16,
    "num_microbatches": 4,
    "precision": "fp32",
    "schedule": "1f1b",
    "stages": [
        {"ranks": [0, 1], "runs": [{"layers": [0, 1], "parallel": "dp2"}, {"layers": [2, 2], "parallel": "fsdp2"}]},
        {
            "ranks": [2, 3],
            "runs": [
                {"layers": [3, 4], "parallel": "tp2", "sp": True, "remat": "full"},
                {"layers": [5, 5], "parallel": "fsdp2", "zero": 2},
            ],
        },
    ],
    "prediction": PREDICTION,
}


def changed(*changes: tuple[list[str | int], Any]) -> dict[str, Any]:
    """The valid content with the value at each path replaced; ``...`` removes it."""
    content = copy.deepcopy(CONTENT)
    for (*parents, last), value in changes:
        inner: Any = content
        for part in parents:
            inner = inner[part]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return content


def one_stage(parallel: str, *, devices: int, **changes: Any) -> dict[str, Any]:
    """Content of a plan of one stage in which every layer has the same levels."""
    runs = [{"layers": [0, 5], "parallel": parallel}]
    return {**CONTENT, "stages": [{"ranks": [0, devices - 1], "runs": runs}], "prediction": None, **changes}


def read(content: Any) -> Plan:
    """The plan that the content describes."""
    return parse_value(content, Plan, InvalidPlanError, what="plan")
