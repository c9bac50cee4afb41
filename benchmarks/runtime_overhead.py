"""Our step time over that of the shortest stock PyTorch script for the same thing, on 4 CPU processes.

Both train the same Llama in the same processes, step about, so that whatever else the machine does meets both alike. A
step is forward, backward, clipping and fused AdamW on the same tokens. The ratio is that of the medians of all repeats;
CPU seconds, the sum over all processes, are less disturbed by other work on the machine than the wall clock.

Run: python benchmarks/runtime_overhead.py [--repeats N] [--cases fsdp dp tp pipeline]
"""

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.handwritten import dp, fsdp, pipeline, tp
from steelyard.modules.build import build_model
from steelyard.plan.plan import Plan, PlanModel, StagePlan, fold_runs
from steelyard.plan.strategy import parse_strategy
from steelyard.processes.group import quiet_notices
from steelyard.runtime.optimizer import LocalAdamW
from steelyard.runtime.parallel_model import parallelize_plan

PROCESSES, NUM_BLOCKS, SEQ_LEN, GLOBAL_BATCH, VOCABULARY = 4, 6, 256, 16, 512
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 768,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQ_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WARM_UP = 2
Step = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A uniform plan and the stock script for it."""

    strategy: str
    num_stages: int
    num_microbatches: int
    script: ModuleType


CASES = {
    "fsdp": Case(strategy="fsdp4", num_stages=1, num_microbatches=1, script=fsdp),
    "dp": Case(strategy="dp4", num_stages=1, num_microbatches=1, script=dp),
    "tp": Case(strategy="tp4", num_stages=1, num_microbatches=1, script=tp),
    "pipeline": Case(strategy="dp2", num_stages=2, num_microbatches=4, script=pipeline),
}


def plan_of(case: Case) -> Plan:
    """The uniform plan of a case, blocks cut evenly."""
    size = PROCESSES // case.num_stages
    ends = [1 + NUM_BLOCKS * (index + 1) // case.num_stages for index in range(case.num_stages)]
    ends[-1] += 1
    stages = tuple(
        StagePlan(
            ranks=(index * size, (index + 1) * size - 1),
            runs=fold_runs(first, (parse_strategy(case.strategy),) * (end - first)),
        )
        for index, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
    )
    return Plan(
        model=PlanModel(name="llama", config=CONFIG),
        cluster="cpu",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        num_microbatches=case.num_microbatches,
        precision="fp32",
        stages=stages,
    )


def our_step(plan: Plan) -> Step:
    """One step of a plan with our runtime."""
    model = parallelize_plan(plan)
    optimizers = model.make_optimizers(lambda parameters: LocalAdamW(parameters, lr=1e-3))

    def step(tokens: torch.Tensor) -> None:
        model.train_step(lambda samples: tokens[samples])
        model.clip_gradients(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure(step: Step, tokens: torch.Tensor) -> tuple[float, float]:
    """Wall seconds of the slowest process, and CPU seconds of all, of one step."""
    dist.barrier()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    step(tokens)
    found = torch.tensor([time.perf_counter() - started_s, time.process_time() - started_cpu_s])
    wall = found[:1].clone()
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(found)
    return wall.item(), found[1].item()


def compare(case: Case, repeats: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """For each repeat the seconds of our step and of the stock script's."""
    plan = plan_of(case)
    theirs = case.script.build(build_model(plan.chain(), seed=0), case.num_microbatches)
    ours = our_step(plan)
    found = []
    for repeat in range(WARM_UP + repeats):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(repeat))
        first, second = (ours, theirs) if repeat % 2 else (theirs, ours)
        times = {id(each): measure(each, tokens) for each in (first, second)}
        found.append((times[id(ours)], times[id(theirs)]))
    return found[WARM_UP:]


def run_rank(rank: int, store: str, names: list[str], repeats: int) -> None:
    """All cases on one rank; the first prints."""
    quiet_notices()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, PROCESSES),
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=300),
    )
    for name in names:
        found = compare(CASES[name], repeats)
        if rank == 0:
            print(row(name, found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def row(name: str, found: list[tuple[tuple[float, float], tuple[float, float]]]) -> str:
    """Medians and ratios of one case."""
    ours_s, theirs_s = (statistics.median(pair[who][0] for pair in found) for who in (0, 1))
    ours_cpu_s, theirs_cpu_s = (statistics.median(pair[who][1] for pair in found) for who in (0, 1))
    paired = statistics.median(ours[0] / theirs[0] for ours, theirs in found)
    wall = f"{ours_s * 1e3:8.0f} {theirs_s * 1e3:8.0f} {ours_s / theirs_s:6.3f} {paired:6.3f}"
    return f"{name:10} {wall} {ours_cpu_s * 1e3:8.0f} {theirs_cpu_s * 1e3:8.0f} {ours_cpu_s / theirs_cpu_s:6.3f}"


def fork(*arguments: object) -> int:
    """The id of a new process that runs a rank."""
    process = os.fork()
    if process:
        return process
    try:
        run_rank(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Prints a row per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'plan':10}  ours ms stock ms  ratio paired  our CPU    stock  ratio", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork(rank, f"{folder}/store", arguments.cases, arguments.repeats) for rank in range(PROCESSES)]
        failed = [rank for rank, process in enumerate(ranks) if os.waitpid(process, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main()
