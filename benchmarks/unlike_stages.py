"""Plans over two pools of processes of unlike speed: predicted and measured gain over even cuts and each pool alone.

Needs two cores. All processes of a pool share one of them. With ``3+1`` three share the first and one has the second;
with ``2+2`` two share each, and on the second other processes, which do nothing else, take their share of it. Each pool
is profiled by itself, as a user with two kinds of nodes does, and the plans are made from the two profiles; handing
over between the pools is measured between two processes with a core each. All plans run in turn, several times over,
each time in new processes; a plan's step is the median of all its timed steps. The mixed plan has to gain over even
cuts what was predicted, within 15 %.

Run: python benchmarks/unlike_stages.py [2+2] [3+1] [--steps N] [--rounds N] [--profile-seconds S]
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ranks import on_ranks, training_step
from steelyard.cost.predict import predict
from steelyard.hardware import Cluster
from steelyard.hardware.parse import pools_from_yaml
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import divisors
from steelyard.planning.choose import plan_job
from steelyard.planning.job import job_of
from steelyard.planning.price import describe, summarise
from steelyard.planning.request import make_request
from steelyard.planning.variants import even_plan
from steelyard.profiler.launch import launch_profiler
from steelyard.profiles.profile import Profile
from steelyard.tracer.cache import cached_trace
from steelyard.units import format_seconds

SEQ_LEN, GLOBAL_BATCH, VOCABULARY = 128, 24, 512
CONFIG = {
    "model_type": "llama",
    "hidden_size": 192,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 576,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQ_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SAMPLES = (1, 2, 4)
WARM_UP = 2
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Processes on one core, with so many others there that only take their share of it."""

    name: str
    num_processes: int
    core: int
    num_idlers: int = 0


CASES = {
    "2+2": (
        Pool(name="quick", num_processes=2, core=0),
        Pool(name="slow", num_processes=2, core=1, num_idlers=2),
    ),
    "3+1": (Pool(name="shared", num_processes=3, core=0), Pool(name="own", num_processes=1, core=1)),
}


@contextmanager
def idlers(pools: tuple[Pool, ...]) -> Iterator[None]:
    """The processes that take their share of the pools' cores."""
    running = []
    for pool in pools:
        for _ in range(pool.num_idlers):
            process = os.fork()
            if not process:
                os.sched_setaffinity(0, {pool.core})
                while True:
                    pass
            running.append(process)
    try:
        yield
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def profiled(pools: tuple[Pool, ...], chain: ModelChain, seconds: float) -> dict[str, Profile]:
    """What layers and collectives take on the processes of each pool, and handing over from one pool to the other."""
    cores = {pool.core for pool in pools}
    crossing = measured_on(cores, 2, chain, seconds / 2).collective("send_recv", 2, strided=False)
    assert crossing is not None, "measured between two processes"
    between = (crossing.model_copy(update={"strided": True}),)
    found = {pool.name: measured_on({pool.core}, pool.num_processes, chain, seconds) for pool in pools}
    return {name: each.model_copy(update={"collectives": each.collectives + between}) for name, each in found.items()}


def measured_on(cores: set[int], num_processes: int, chain: ModelChain, seconds: float) -> Profile:
    """The profile of so many processes, which inherit the cores of this one."""
    traced = cached_trace(chain, seq_len=SEQ_LEN, precision="fp32", degrees=divisors(num_processes))
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return launch_profiler(chain, traced, num_processes=num_processes, samples=SAMPLES, budget_s=seconds)
    finally:
        os.sched_setaffinity(0, everywhere)


def machines(pools: tuple[Pool, ...]) -> Cluster:
    rows = "".join(
        f"  - {{name: {pool.name}, num_nodes: 1, devices_per_node: {pool.num_processes}, "
        f"device: {{name: {pool.name}-cpu, kind: cpu, memory_GiB: 4}}, intra_link: loopback}}\n"
        for pool in pools
    )
    found = pools_from_yaml(f"version: 1\nlink: loopback\npools:\n{rows}")
    assert found.is_mixed, "two pools were written"
    return found


def timed(plan: Plan, pools: tuple[Pool, ...], num_steps: int) -> list[float]:
    """Seconds of steps of a plan, each rank on the core of its pool."""
    by_name = {pool.name: pool for pool in pools}
    cores = [by_name[name].core for name in plan.cluster.split("+") for _ in range(by_name[name].num_processes)]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "steps"
        on_ranks(len(cores), lambda: _train(plan, cores, num_steps, written))
        return [float(line) for line in written.read_text().split()]


def _train(plan: Plan, cores: list[int], num_steps: int, written: Path) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[dist.get_rank()]})
    step, seconds = training_step(plan), []
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(WARM_UP + num_steps):
        dist.barrier()
        began_s = time.perf_counter()
        step(tokens)
        dist.barrier()
        seconds.append(time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        written.write_text(" ".join(map(str, seconds[WARM_UP:])))


def planned(pools: tuple[Pool, ...], chain: ModelChain, profiles: dict[str, Profile]) -> dict[str, tuple[Plan, float]]:
    """The plans to compare with their predicted seconds a step; the first is the one that the search chooses."""
    job = job_of(
        make_request(
            chain, machines(pools), global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision="fp32", profile=profiles
        )
    )
    mixed, even = plan_job(job), even_plan(job, Decisions())
    if mixed.plan is None or mixed.cost is None or even is None:
        sys.exit("no plan fits")
    found = {
        "mixed plan": (mixed.plan, mixed.cost.step_time_s),
        "even cuts": (even, predict(even, job).step_time_s),
    }
    for pool in job.by_group:
        alone = plan_job(pool, top=0)
        if alone.plan is not None and alone.cost is not None:
            found[f"{pool.cluster.name} alone"] = alone.plan, alone.cost.step_time_s
    return found


def compare(name: str, num_steps: int, num_rounds: int, profile_s: float) -> bool:
    """Prints predicted and measured steps and gains; whether that over even cuts came out as predicted."""
    pools, chain = CASES[name], chain_from_config(CONFIG, name="llama")
    with idlers(pools):
        plans = planned(pools, chain, profiled(pools, chain, profile_s))
        seconds: dict[str, list[float]] = {each: [] for each in plans}
        for _ in range(num_rounds):
            for each, (plan, _) in plans.items():
                seconds[each] += timed(plan, pools, num_steps)
    measured = {each: statistics.median(found) for each, found in seconds.items()}
    print(f"{name} processes")
    first = next(iter(plans))
    errors = {}
    for each, (plan, predicted_s) in plans.items():
        sizes = ", ".join(f"{len(stage.layers)} layers on {stage.num_devices}" for stage in plan.parts)
        print(f"  {each}: {sizes}; {describe(plan.pipeline)}; {summarise(plan)}")
        ratio = predicted_s / measured[each]
        print(
            f"    predicted {format_seconds(predicted_s)}, measured {format_seconds(measured[each])} ({ratio:.2f})",
            end="",
        )
        if each != first:
            gains = predicted_s / plans[first][1], measured[each] / measured[first]
            errors[each] = gains[1] / gains[0] - 1
            print(f"; {first} faster × {gains[0]:.2f} predicted, × {gains[1]:.2f} measured ({errors[each]:+.0%})")
        else:
            print()
    return abs(errors["even cuts"]) <= TOLERANCE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="2+2|3+1", default=list(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    asked = parser.parse_args()
    as_predicted = [compare(case, asked.steps, asked.rounds, asked.profile_seconds) for case in asked.cases]
    sys.exit(not all(as_predicted))
