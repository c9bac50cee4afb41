"""Predicted against measured step time and memory of plans of 4 CPU processes, and how well plans are ranked.

Profiles once, then prices and trains each plan for a few steps. The searched plan for the same job, without a budget
that binds, is among them: its measured time over the best measured time is the regret.

Run: python benchmarks/prediction_accuracy.py [--steps N]
"""

import argparse
import statistics
import sysconfig
import tempfile
from itertools import pairwise
from pathlib import Path

from steelyard.cost.setting import Job
from steelyard.model.read import load_model
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan, PlanModel, StagePlan, fold_runs
from steelyard.plan.strategy import parse_strategy
from steelyard.planning import PlanOptions, make_job, plan_job, price_plan
from steelyard.profiler.launch import launch_profiler
from steelyard.runtime.launch import launch
from steelyard.runtime.options import TrainOptions
from steelyard.tracer.cache import cached_trace
from steelyard.units import format_bytes, format_seconds

MODEL, SEQ_LEN, GLOBAL_BATCH, PROCESSES = "llama-demo", 256, 16, 4
UNIFORM = [
    ("dp4", 1, 1),
    ("dp4", 2, 1),
    ("fsdp4", 1, 1),
    ("fsdp4", 4, 1),
    ("fsdp4 remat=full", 2, 1),
    ("tp4", 2, 1),
    ("tp4+sp", 2, 1),
    ("dp2-tp2", 2, 1),
    ("fsdp2-tp2+sp", 2, 1),
    ("tp2-dp2", 2, 1),
    ("dp2", 4, 2),
    ("fsdp2 remat=full", 8, 2),
    ("tp2+sp", 8, 2),
    ("single", 8, 4),
]
"""Strategy, microbatches, stages."""


def uniform(job: Job, text: str, num_microbatches: int, num_stages: int) -> Plan:
    """One strategy everywhere, layers cut evenly."""
    layers, size = job.chain.num_layers, PROCESSES // num_stages
    cuts = [round(index * layers / num_stages) for index in range(num_stages + 1)]
    stages = tuple(
        StagePlan(
            ranks=(index * size, index * size + size - 1),
            runs=fold_runs(first, (parse_strategy(text),) * (end - first)),
        )
        for index, (first, end) in enumerate(pairwise(cuts))
    )
    chain = job.chain
    return Plan(
        model=PlanModel(name=chain.name, config=dict(chain.config)),
        cluster=job.cluster.name,
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        num_microbatches=num_microbatches,
        precision="fp32",
        stages=stages,
    )


def main() -> None:
    """Prints a row per plan and the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    steps = parser.parse_args().steps
    chain = load_model(MODEL)
    traced = cached_trace(chain, seq_len=SEQ_LEN, precision="fp32", tp_degrees=(1, 2, 4))
    profile = launch_profiler(chain, traced, num_processes=PROCESSES, samples=(1, 2, 4, 8))
    job = make_job(
        MODEL,
        f"1x{PROCESSES}xcpu",
        global_batch=GLOBAL_BATCH,
        seq_len=SEQ_LEN,
        precision="fp32",
        memory="1GiB",
        profile=profile,
    )
    named = [(f"{text}, {m} mb, {p} st", uniform(job, text, m, p)) for text, m, p in UNIFORM]
    searched = plan_job(job, PlanOptions()).plan
    if searched is not None:
        named.append(("searched", searched))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in named:
            priced = price_plan(plan, memory="1GiB", profile=profile)
            prediction = priced.prediction
            path = Path(folder) / "plan.json"
            write_plan(priced, path)
            record = launch(path, sysconfig.get_path("stdlib"), TrainOptions(steps=steps))
            if prediction is None:
                continue
            peak = max(rank.peak_bytes for rank in record.ranks)
            expected = max(stage.total_bytes for stage in prediction.stages)
            rows.append((name, prediction.step_time_s, record.median_step_s, expected, peak))
    show(rows)


def show(rows: list[tuple[str, float, float, int, int]]) -> None:
    """Prints the rows, the medians, and the regret of the searched plan."""
    print(
        f"{'plan':30} {'predicted':>10} {'measured':>10} {'ratio':>6} {'predicted':>10} {'measured':>10} {'ratio':>6}"
    )
    for name, predicted_s, measured_s, expected, peak in rows:
        time_columns = (
            f"{format_seconds(predicted_s):>10} {format_seconds(measured_s):>10} {predicted_s / measured_s:6.2f}"
        )
        print(f"{name:30} {time_columns} {format_bytes(expected):>10} {format_bytes(peak):>10} {expected / peak:6.2f}")
    errors = [abs(predicted_s / measured_s - 1) for _, predicted_s, measured_s, _, _ in rows]
    print(f"time: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    ratios = [expected / peak for *_, expected, peak in rows]
    middle = statistics.median(ratios)
    print(f"memory: predicted over measured {min(ratios):.2f} to {max(ratios):.2f}, median {middle:.2f}")
    fastest = min(rows, key=lambda row: row[2])
    first = min(rows, key=lambda row: row[1])
    print(f"fastest measured: {fastest[0]}; ranked first: {first[0]}, regret {first[2] / fastest[2] - 1:.1%}")


if __name__ == "__main__":
    main()
