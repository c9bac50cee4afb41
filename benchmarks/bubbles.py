"""Bubbles of pipeline schedules: simulated against torch's runs of them over our stages, on 4 processes.

The passes of a tiny Llama are stretched to given times by sleeping, so that other work on the machine disturbs them
little and cores are not needed: order, sends and waits are real, times of passes are not. A bubble is what is left of
a step, from the first pass of any rank to the last one, in which a rank does none.

Run: python benchmarks/bubbles.py
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ranks import on_ranks
from steelyard.cost.pass_order import StageLimit, best_order
from steelyard.cost.simulator import StageTimes, simulate
from steelyard.modules.build import build_model
from steelyard.plan.plan import Plan
from steelyard.runtime.parallel_model import parallelize
from steelyard.runtime.pipeline_part import PipelinePart
from tests.runtime.models import FAMILY_CONFIGS, make_plan

PROCESSES, NUM_BLOCKS, WARM_UP = 4, 8, 1
SECONDS = {"forward_one_chunk": 0.40, "backward_one_chunk": 0.48, "backward_weight_one_chunk": 0.32}
"""Of all chunks of a stage: a forward pass, a backward pass without its weight pass, and a weight pass."""
CASES = [
    (schedule, chunks, count)
    for schedule, chunks in (
        ("1f1b", 1),
        ("interleaved-1f1b", 2),
        ("interleaved-zero-bubble", 2),
        ("zero-bubble-auto", 2),
        ("zb-v", 2),
        ("dualpipe-v", 2),
    )
    for count in (4, 8)
    if schedule != "dualpipe-v" or count >= 2 * PROCESSES
]


def plan_of(schedule: str, chunks: int, num_microbatches: int) -> Plan:
    """A plan of one rank a stage, in the best order with as many more passes in flight and pending as stages."""
    per_part = NUM_BLOCKS // (PROCESSES * chunks)
    parts = [["single"] * per_part for _ in range(PROCESSES * chunks)]
    parts[0].append("single")
    parts[-1].append("single")
    plan = make_plan(
        FAMILY_CONFIGS["llama"] | {"num_hidden_layers": NUM_BLOCKS},
        *(", ".join(part) for part in parts),
        num_microbatches=num_microbatches,
        global_batch=num_microbatches,
        seq_len=16,
        schedule=schedule,
        num_devices=PROCESSES,
        num_chunks=chunks,
    )
    if not plan.pipeline.schedule.orders_by_time:
        return plan
    limits = [
        StageLimit(
            in_flight=plan.pipeline.in_flight(stage) + PROCESSES, waiting=plan.pipeline.waiting(stage) + PROCESSES
        )
        for stage in range(PROCESSES)
    ]
    return plan.model_copy(update={"pass_order": best_order(times_of(plan), plan.pipeline, limits)})


def times_of(plan: Plan) -> list[StageTimes]:
    """The times of each part, as the passes are stretched."""
    forward_s, backward_s, weight_s = (each / plan.num_chunks for each in SECONDS.values())
    times = StageTimes(forward_s=forward_s, backward_s=backward_s + weight_s, weight_s=weight_s)
    return [times] * len(plan.parts)


def seconds_of(plan: Plan) -> dict[str, float]:
    """Seconds of each pass through a part: a backward pass does the work of a weight pass if there are none."""
    seconds = dict(SECONDS)
    if not plan.pipeline.schedule.splits_backward:
        seconds["backward_one_chunk"] += seconds.pop("backward_weight_one_chunk")
    return {name: each / plan.num_chunks for name, each in seconds.items()}


def simulated(plan: Plan) -> float:
    """The bubble of a step as it is predicted."""
    return simulate(times_of(plan), plan.pipeline).bubble_share()


def measured(plan: Plan) -> float:
    """The bubble of a step that this rank and the others run."""
    passes: list[tuple[float, float]] = []

    def stretched(work: Any, least_s: float, *arguments: Any, **keywords: Any) -> Any:
        started_s = time.perf_counter()
        found = work(*arguments, **keywords)
        time.sleep(max(0.0, started_s + least_s - time.perf_counter()))
        passes.append((started_s, time.perf_counter()))
        return found

    seconds = seconds_of(plan)

    def stretch(name: str) -> Any:
        work, whole_s = getattr(PipelinePart, name), seconds[name] + seconds.get("backward_weight_one_chunk", 0.0)

        def stretched_pass(*arguments: Any, **keywords: Any) -> Any:
            is_whole = keywords.get("full_backward", False)  # of DualPipeV: a backward pass with its weight pass
            return stretched(work, whole_s if is_whole else seconds[name], *arguments, **keywords)

        return stretched_pass

    with mock.patch.multiple(PipelinePart, **{name: stretch(name) for name in seconds}):
        model = parallelize(build_model(plan.chain(), seed=0), plan)
        for _ in range(WARM_UP + 1):
            passes.clear()
            dist.barrier()
            model.train_step(lambda samples: torch.zeros((len(samples), plan.seq_len + 1), dtype=torch.long))
    ends = torch.tensor([-passes[0][0], passes[-1][1]], dtype=torch.float64)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    worked = torch.tensor(sum(end - start for start, end in passes), dtype=torch.float64)
    dist.all_reduce(worked)
    return 1 - float(worked / (PROCESSES * ends.sum()))


def run() -> None:
    """Runs every case; the first rank prints them."""
    for schedule, chunks, count in CASES:
        plan = plan_of(schedule, chunks, count)
        found = measured(plan)
        if dist.get_rank() == 0:
            print(
                f"{schedule:24} {count:3} microbatches: {simulated(plan):6.1%} simulated, {found:6.1%} run", flush=True
            )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    on_ranks(PROCESSES, run)
