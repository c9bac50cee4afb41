"""Search on cost tables of your own: 24 blocks on 8 devices, replicated, sharded or divided by tensor parallelism.

python examples/own_costs.py writes problem.json, whose format is explained in docs/how-to/problem-files.md, and solves
it within three budgets.
"""

import json
import subprocess

STRATEGIES = {  # per block: seconds of a microbatch, static bytes, bytes saved for the backward pass
    "dp8": (0.010, 3.2e9, 0.20e9),
    "fsdp8": (0.012, 0.4e9, 0.20e9),
    "tp8": (0.015, 0.4e9, 0.05e9),
}
times, static, saved = ([row[column] for row in STRATEGIES.values()] for column in range(3))
switch_s = [[0.0 if one == other else 0.002 for other in STRATEGIES] for one in STRATEGIES]
problem = {
    "version": 1,
    "name": "24 blocks on 8 devices",
    "budget_bytes": 80_000_000_000,
    "settings": [
        {
            "num_stages": 1,
            "num_microbatches": 4,
            "schedule": "1f1b",
            "strategies": list(STRATEGIES),
            "layers": [{"kind": "block", "count": 24}],
            "kinds": [
                {
                    "name": "block",
                    "legal": [True] * len(STRATEGIES),
                    "time_s": times,
                    "static_bytes": [int(size) for size in static],
                    "activation_bytes": [int(size) for size in saved],
                    "transient_bytes": [100_000_000] * len(STRATEGIES),
                }
            ],
            "switch_s": [{"kinds": ["block"], "seconds": switch_s}],
            "transfer_s": 0.0,
            "overhead_bytes": 1_000_000_000,
            "samples": 32,
        }
    ],
}
with open("problem.json", "w", encoding="utf-8") as file:
    json.dump(problem, file, indent=2)
for budget in ("90GB", "40GB", "14GB"):
    asked = ["steelyard", "solve", "problem.json", "--memory", budget, "--json"]
    found = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    counts = {name: found["strategies"].count(name) for name in STRATEGIES if name in found["strategies"]}
    print(f"{budget}: {found['step_s'] * 1e3:.0f} ms a step, {found['peak_bytes'] / 1e9:.1f} GB, {counts}")
