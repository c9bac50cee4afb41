"""Choose what to rent from a frontier: python examples/read_frontier.py MODEL CLUSTER DOLLARS_AN_HOUR.

Prints the memory that costs less than 5 % of the speed, and the cluster size with the cheapest tokens.
"""

import json
import subprocess
import sys

model, cluster, price = sys.argv[1:4] or ("llama3-8b", "1x8xa100-80gb", "2.5")
job = ["--cluster", cluster, "--seq-len", "4096", "--global-batch", "64", "--price", price]
asked = ["steelyard", "frontier", model, *job, "--points", "8", "--devices", "4,8,16", "--json"]
found = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
# keys and types: steelyard schema frontier --json
fastest = min(point["step_time_s"] for point in found["points"])
for point in found["points"]:
    print(f"{point['memory_bytes'] / 2**30:6.1f} GiB: {point['step_time_s']:.2f} s a step")
small = min(point["memory_bytes"] for point in found["points"] if point["step_time_s"] <= 1.05 * fastest)
print(f"{small / 2**30:.1f} GiB per device are enough for 95 % of the speed")
sizes = [each for each in found["devices"] if "cost_per_billion_tokens" in each]
best = min(sizes, key=lambda each: each["cost_per_billion_tokens"])
print(f"cheapest tokens: {best['num_devices']} devices, {best['cost_per_billion_tokens']:.0f} dollars per billion")
