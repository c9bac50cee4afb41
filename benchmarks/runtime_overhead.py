"""Our step time over that of the shortest stock PyTorch script for the same thing, on 2 and 4 CPU processes.

Both train the same Llama in the same processes, step about, so that whatever else the machine does meets both alike. A
step is forward, backward, clipping and fused AdamW on the same tokens. The ratio is that of the medians of all repeats;
CPU seconds, the sum over all processes, are less disturbed by other work on the machine than the wall clock.

A model of as many layers whose tensors have next to no entries does the same in Python, autograd and collectives, and
computes nothing: its CPU seconds over those of the model are the host's share of a step, last but one of ours and last
of the stock script's.

Run: python benchmarks/runtime_overhead.py [--repeats N] [--processes 2 4] [--cases fsdp dp tp pipeline]
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.handwritten import dp, fsdp, pipeline, tp
from benchmarks.ranks import Step, on_ranks, training_step
from steelyard.modules.build import build_model
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import parse_strategy

NUM_BLOCKS, SEQ_LEN, GLOBAL_BATCH, VOCABULARY = 6, 256, 16, 512
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
SMALL_SEQ_LEN = 4
SMALL = {"hidden_size": 16, "intermediate_size": 16}
"""What a model has that computes next to nothing."""
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A uniform plan and the stock script for it."""

    dimension: str
    num_stages: int
    num_microbatches: int
    script: ModuleType


CASES = {
    "fsdp": Case(dimension="fsdp", num_stages=1, num_microbatches=1, script=fsdp),
    "dp": Case(dimension="dp", num_stages=1, num_microbatches=1, script=dp),
    "tp": Case(dimension="tp", num_stages=1, num_microbatches=1, script=tp),
    "pipeline": Case(dimension="dp", num_stages=2, num_microbatches=4, script=pipeline),
}


def plan_of(case: Case, *, is_small: bool = False) -> Plan:
    """The uniform plan of a case on all processes, blocks cut evenly."""
    size = dist.get_world_size() // case.num_stages
    strategy = parse_strategy(f"{case.dimension}{size}" if size > 1 else "single")
    ends = [1 + NUM_BLOCKS * (index + 1) // case.num_stages for index in range(case.num_stages)]
    ends[-1] += 1
    stages = tuple(
        StagePart(
            ranks=(index * size, (index + 1) * size - 1),
            runs=fold_runs(first, (strategy,) * (end - first)),
        )
        for index, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
    )
    return Plan(
        model=PlanModel(name="llama", config=CONFIG | (SMALL if is_small else {})),
        cluster="cpu",
        seq_len=SMALL_SEQ_LEN if is_small else SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        num_microbatches=case.num_microbatches,
        precision="fp32",
        stages=stages_of(stages),
    )


Seconds = tuple[float, float]
"""Of a step: wall of the slowest process, and CPU of all."""


def measure(step: Step, tokens: torch.Tensor) -> Seconds:
    """Wall seconds of the slowest process, and CPU seconds of all, of one step."""
    dist.barrier()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    step(tokens)
    found = torch.tensor([time.perf_counter() - started_s, time.process_time() - started_cpu_s])
    wall = found[:1].clone()
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(found)
    return wall.item(), found[1].item()


def compare(case: Case, repeats: int, *, is_small: bool = False) -> list[tuple[Seconds, Seconds]]:
    """For each repeat the seconds of our step and of the stock script's."""
    plan = plan_of(case, is_small=is_small)
    theirs = case.script.build(build_model(plan.chain(), seed=0), case.num_microbatches)
    ours = training_step(plan)
    found = []
    for repeat in range(WARM_UP + repeats):
        tokens = torch.randint(
            VOCABULARY, (GLOBAL_BATCH, plan.seq_len + 1), generator=torch.Generator().manual_seed(repeat)
        )
        first, second = (ours, theirs) if repeat % 2 else (theirs, ours)
        times = {id(each): measure(each, tokens) for each in (first, second)}
        found.append((times[id(ours)], times[id(theirs)]))
    return found[WARM_UP:]


def compare_all(names: list[str], repeats: int) -> None:
    """All cases on one rank; the first prints."""
    for name in names:
        found, small = (compare(CASES[name], repeats, is_small=each) for each in (False, True))
        if dist.get_rank() == 0:
            print(row(f"{name}, {dist.get_world_size()}", found, small), flush=True)


def row(name: str, found: list[tuple[Seconds, Seconds]], small: list[tuple[Seconds, Seconds]]) -> str:
    """Medians and ratios of one case."""
    host = [statistics.median(pair[who][1] for pair in small) for who in (0, 1)]
    ours_s, theirs_s = (statistics.median(pair[who][0] for pair in found) for who in (0, 1))
    ours_cpu_s, theirs_cpu_s = (statistics.median(pair[who][1] for pair in found) for who in (0, 1))
    paired = statistics.median(ours[0] / theirs[0] for ours, theirs in found)
    wall = f"{ours_s * 1e3:8.0f} {theirs_s * 1e3:8.0f} {ours_s / theirs_s:6.3f} {paired:6.3f}"
    cpu = f"{ours_cpu_s * 1e3:8.0f} {theirs_cpu_s * 1e3:8.0f} {ours_cpu_s / theirs_cpu_s:6.3f}"
    return f"{name:12} {wall} {cpu}   {host[0] / ours_cpu_s:5.1%} {host[1] / theirs_cpu_s:5.1%}"


def main() -> None:
    """Prints a row per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    print(f"{'plan, ranks':12}  ours ms stock ms  ratio paired  our CPU    stock  ratio    host stock", flush=True)
    for count in arguments.processes:
        on_ranks(count, lambda: compare_all(arguments.cases, arguments.repeats))


if __name__ == "__main__":
    main()
