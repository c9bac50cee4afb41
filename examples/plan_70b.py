"""Plan Llama-3-70B on 64 H100 and print its memory: python examples/plan_70b.py [MODEL CLUSTER].

Needs no GPU and no torch. Writes plan.json for `steelyard explain`, `report`, `train` and `export`.
"""

import sys

import steelyard

model, cluster = sys.argv[1:3] or ("llama3-70b", "8x8xh100-80gb")
plan = steelyard.find_plan(model, cluster, global_batch=64, seq_len=8192)
prediction = plan.prediction
assert prediction is not None, "find_plan predicts every plan that it returns"
print(f"{prediction.step_time_s:.2f} s a step in {plan.num_stages} stages of {plan.num_microbatches} microbatches")
for index, stage in enumerate(prediction.stages):
    terms = sorted(stage.memory_bytes.items(), key=lambda term: -term[1])
    print(f"stage {index}: " + ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in terms[:3]))
steelyard.write_plan(plan, "plan.json")
print("why this plan: steelyard explain plan.json")
