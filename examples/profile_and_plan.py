"""Measure this machine's CPU processes, then plan with the measured costs: python examples/profile_and_plan.py [N].

On a host with GPUs the same two calls measure and plan for these. A profile of one process plans for any number.
"""

import subprocess
import sys

import steelyard

processes, samples = int((sys.argv[1:] or ["1"])[0]), "1,2"
job = ["llama-demo", "--seq-len", "64", "--precision", "fp32"]
measuring = [*("-n", str(processes)), *("--samples", samples), *("--budget", "5"), *("-o", "profile.json")]
subprocess.run(["steelyard", "profile", *job, *measuring], check=True)
plan = steelyard.find_plan(
    "llama-demo",
    f"1x{processes}xcpu",
    global_batch=4 * processes,
    seq_len=64,
    precision="fp32",
    memory="2GiB",
    profile="profile.json",
)
assert plan.prediction is not None, "find_plan predicts every plan that it returns"
print(
    f"{plan.prediction.step_time_s * 1e3:.0f} ms a step, by costs measured here: {plan.prediction.profile.is_measured}"
)
