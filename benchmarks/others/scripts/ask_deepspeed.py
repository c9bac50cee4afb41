"""Asks DeepSpeed: standard input has questions as JSON, the last line of standard output the estimates."""

import json
import sys

from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs


def estimate(asked):
    """Bytes of model states on a GPU; None where a run is not in its scope."""
    if asked["zero"] < 2 or any(asked[name] > 1 for name in ("tp", "pp", "cp", "ep")) or asked["lora"]:
        return None
    per_node = min(asked["dp"], asked["gpus_per_node"])
    nodes = asked["dp"] // per_node
    if asked["zero"] == 2:
        found = estimate_zero2_model_states_mem_needs(asked["params"], per_node, nodes, cpu_offload=False)
    else:
        found = estimate_zero3_model_states_mem_needs(
            asked["params"],
            asked["largest_layer_params"],
            per_node,
            nodes,
            cpu_offload=False,
            cpu_offload_params=False,
        )
    return {"states_bytes": found[1]}


answers = {each["id"]: estimate(each) for each in json.load(sys.stdin) if each["class"] in ("dense 16-bit", "8-bit")}
print()
print(json.dumps({name: answer for name, answer in answers.items() if answer is not None}))
