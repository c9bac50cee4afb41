"""How long a whole search takes, without tracing: all pipeline degrees and microbatch counts, one thread.

Compared in one run with the textbook grid program at 1 MB steps (`tests/oracles/grid.py`) over the same configurations,
once: one pass over all layers of each, which is the work of evenly cut stages with equal microbatches in flight. The
tables have the size and shape of real decoders (`tests/problems/`); they are not predictions. Times are CPU seconds of
this process: the median of repeated searches, or one search where it takes seconds. Growth of memory is what the
process grew by.

`jobs` plans models that were traced, with all dimensions, three times: search with the tables that it makes, acceptance
with those that it makes, and the search alone, again with all tables that it asked for, as the other parts measure it.

Run: OMP_NUM_THREADS=1 python benchmarks/search_speed.py [PARTS ...]
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job
from steelyard.cost.tables import CostTables
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import level_dimensions
from steelyard.planning.choose import accept
from steelyard.planning.job import job_of
from steelyard.planning.problem import make_tables
from steelyard.planning.request import make_request
from steelyard.search import OnDemand, SearchResult, SpaceOptions, search
from steelyard.units import format_seconds
from tests.oracles import grid
from tests.problems.patterned import deep_configs
from tests.problems.transformer import LLAMA3_8B, LLAMA3_405B, decoder_configs

GB = 10**9
BUDGETS_GB = (24, 36, 40, 80)
REPEATS = 5
JOBS = (
    ("llama3-8b", "1x8xh100-80gb", 64, 32768),
    ("llama3-8b", "8x8xh100-80gb", 512, 8192),
    ("mixtral-8x22b", "8x8xh100-80gb", 512, 8192),
    ("llama3-405b", "2048x8xh100-80gb", 2048, 8192),
)
"""Model, cluster, batch, sequence length."""

FIRST_USE = """
import time
from steelyard.search import search
from tests.problems.transformer import LLAMA3_8B, decoder_configs
configurations = decoder_configs(LLAMA3_8B, num_devices=8, global_batch=64, most_stages=8, most_microbatches=64)
for _ in range(2):
    start = time.process_time()
    search(configurations, 36 * 10**9)
    print(time.process_time() - start)
"""


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_mib() -> float:
    """Most memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(name: str, result: SearchResult, seconds: float) -> None:
    """One line: what was found, how well it is proven, and in what time."""
    status = result.status if result.status != "feasible" else f"gap {result.gap:.2%}"
    print(f"  {name}: {status}, {format_seconds(seconds)}, peak {peak_mib():.0f} MiB", flush=True)


def full_space() -> SpaceOptions:
    """All dimensions that take ranks of their own and are worth a search, with every mode."""
    return SpaceOptions(
        dimensions=level_dimensions(),
        modes={},
        mixes_samples=True,
        max_degrees={"tp": 8},
        devices_per_node=8,
    )


def small() -> None:
    """The size of a published planner's example, beside the textbook program: one of it between two of ours."""
    configs = decoder_configs(
        LLAMA3_8B,
        num_devices=8,
        global_batch=64,
        most_stages=8,
        most_microbatches=64,
        space=SpaceOptions(max_degrees={"tp": 8}, devices_per_node=8),
        most_strategies=50,
    )
    print(f"32 layers, embedding and head, 8 devices, {len(configs)} configurations, up to 50 strategies")
    for budget_gb in BUDGETS_GB:
        _beside_the_grid(configs, budget_gb)


def full() -> None:
    """The two sizes again with all parallelism dimensions."""
    for decoder, devices, batch, stages in ((LLAMA3_8B, 8, 64, 8), (LLAMA3_405B, 16384, 2048, 128)):
        configs = decoder_configs(
            decoder,
            num_devices=devices,
            global_batch=batch,
            most_stages=stages,
            most_microbatches=batch,
            space=full_space(),
        )
        most = max(len(each.strategies) for each in configs)
        print(
            f"{decoder.num_blocks} blocks, {devices:,} devices, {len(configs)} configurations, up to {most} strategies"
        )
        for budget_gb in (36, 80):
            result = search(configs, budget_gb * GB)
            seconds = statistics.median(
                cpu_s(lambda some=configs, gb=budget_gb: search(some, gb * GB)) for _ in range(REPEATS)
            )
            show(f"{budget_gb} GB", result, seconds)


def jobs() -> None:
    """Real jobs with all dimensions: search and planning with acceptance, both with tables, and search alone."""
    for model, cluster, batch, seq_len in JOBS:
        print(f"{model}, {seq_len:,} tokens, batch {batch}, {cluster}")
        times: dict[str, list[float]] = {"tables and search": [], "tables and acceptance": [], "search alone": []}
        for _ in range(REPEATS):
            job = job_of(
                make_request(
                    model,
                    cluster,
                    global_batch=batch,
                    seq_len=seq_len,
                    precision="bf16",
                )
            )
            made, found, results = [], [], []
            times["tables and search"].append(
                cpu_s(lambda of=job, into=made: into.append(_with_tables(make_tables(of, Decisions()), of)))
            )
            times["tables and acceptance"].append(
                cpu_s(lambda of=job, into=found: into.append(accept(of, make_tables(of, Decisions()))))
            )
            times["search alone"].append(
                cpu_s(lambda of=job, of_made=made[0], into=results: into.append(search(of_made, usable_bytes(of))))
            )
        configs, result = made[0], results[0]
        num_made = sum(each.is_made for each in configs)
        most = max(len(each.tables.strategies) for each in configs if each.is_made)
        seconds = ", ".join(f"{name} {format_seconds(statistics.median(each))}" for name, each in times.items())
        print(
            f"  {len(configs)} configurations, {num_made} with tables, up to {most} strategies: {seconds}; "
            f"{result.status} within the tables, accepted {found[0].search.status}, gap {found[0].search.gap:.2%}",
            flush=True,
        )


def _with_tables(configs: Sequence[OnDemand], job: Job) -> Sequence[OnDemand]:
    """The configurations of a job with all tables that a search of them asks for."""
    search(configs, usable_bytes(job))
    return configs


def _beside_the_grid(configs: Sequence[CostTables], budget_gb: int) -> None:
    budget = budget_gb * GB
    result = search(configs, budget)
    ours: list[float] = []
    textbook = 0.0
    for part in range(REPEATS):
        ours += [cpu_s(lambda: search(configs, budget)) for _ in range(3)]
        textbook += cpu_s(lambda some=configs[part::REPEATS]: [grid.least_seconds(each, budget) for each in some])
    median = statistics.median(ours)
    print(
        f"  {budget_gb} GB: {result.status}, whole search {format_seconds(median)}; "
        f"grid program {format_seconds(textbook)}; ratio {textbook / median:.0f}",
        flush=True,
    )


def large() -> None:
    """Llama-3-405B on 16,384 devices."""
    configs = decoder_configs(
        LLAMA3_405B, num_devices=16384, global_batch=2048, most_stages=128, most_microbatches=2048
    )
    print(f"126 blocks, embedding and head, 16,384 devices, {len(configs)} configurations")
    result = search(configs, 80 * GB)
    show("80 GB", result, statistics.median(cpu_s(lambda: search(configs, 80 * GB)) for _ in range(REPEATS)))


def deep() -> None:
    """Four layer types in a repeating pattern on 64 devices; the budgets grow with the depth, from tight to ample."""
    print("layers of four types in a repeating pattern, 64 devices")
    for num_layers, budgets_gb in (
        (125, (12, 24, 40)),
        (250, (24, 40, 48)),
        (500, (44, 64, 80)),
        (1000, (80, 96, 141)),
    ):
        configs = deep_configs(num_layers, num_devices=64, global_batch=512)
        for budget_gb in budgets_gb:
            start = time.process_time()
            result = search(configs, budget_gb * GB, time_limit_s=120)
            show(f"{num_layers} layers, {budget_gb} GB", result, time.process_time() - start)


def unlike() -> None:
    """A thousand layers, no two alike."""
    print("1,000 layers all unlike, 64 devices, time limit 60 s")
    configs = deep_configs(1000, num_devices=64, global_batch=512, all_unlike=True)
    start = time.monotonic()
    result = search(configs, 96 * GB, time_limit_s=60)
    show("96 GB", result, time.monotonic() - start)


def first() -> None:
    """The first search of a fresh installation compiles; the second process finds the result on disk."""
    print("first use, an empty cache, then the cache on disk")
    with TemporaryDirectory() as cache:
        for which in ("empty", "cached"):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_USE],
                env={**os.environ, "NUMBA_CACHE_DIR": cache},
                cwd=Path(__file__).parents[1],
                capture_output=True,
                text=True,
                check=True,
            )
            cold, warm = map(float, done.stdout.split())
            print(f"  {which}: {format_seconds(cold - warm)} more than a warm search", flush=True)


PARTS = {"small": small, "large": large, "full": full, "jobs": jobs, "deep": deep, "unlike": unlike, "first": first}


def main() -> None:
    """Runs the parts named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PARTS", help=", ".join(PARTS))
    for name in parser.parse_args().parts or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
