"""How long a whole search takes, without tracing: all pipeline degrees and microbatch counts, one thread.

Compared in one run with the textbook grid program at 1 MB steps (`tests/oracles/grid.py`) over the same settings,
once: one pass over all layers of each, which is the work of evenly cut stages with equal microbatches in flight. The
tables have the size and shape of real decoders (`tests/problems/transformer.py`); they are not predictions. Times are
CPU seconds of this process, medians.

Run: OMP_NUM_THREADS=1 python benchmarks/search_speed.py
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from steelyard.search import SpaceOptions, search
from steelyard.units import format_seconds
from tests.oracles import grid
from tests.problems.transformer import LLAMA3_8B, LLAMA3_405B, decoder_settings

GB = 10**9
BUDGETS_GB = (24, 36, 40, 80)


def median_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Median CPU seconds, after one warm-up."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def main() -> None:
    options = SpaceOptions(max_tp=8, devices_per_node=8)
    settings = decoder_settings(
        LLAMA3_8B,
        num_devices=8,
        global_batch=64,
        most_stages=8,
        most_microbatches=64,
        space=options,
        most_strategies=50,
    )
    print(f"32 layers, 8 devices, {len(settings)} settings, up to 50 strategies")
    for budget_gb in BUDGETS_GB:
        result = search(settings, budget_gb * GB)
        ours = median_s(lambda budget=budget_gb * GB: search(settings, budget))
        start = time.process_time()
        for tables in settings:
            grid.least_seconds(tables, budget_gb * GB)
        textbook = time.process_time() - start
        print(
            f"  {budget_gb:3d} GB: {result.status}, whole search {format_seconds(ours)}; "
            f"grid program {format_seconds(textbook)}; ratio {textbook / ours:.0f}"
        )
    large = decoder_settings(LLAMA3_405B, num_devices=16384, global_batch=2048, most_stages=128, most_microbatches=2048)
    result = search(large, 80 * GB)
    seconds = median_s(lambda: search(large, 80 * GB), repeats=3)
    print(f"126 blocks, 16384 devices, {len(large)} settings: {result.status}, {format_seconds(seconds)}")
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
