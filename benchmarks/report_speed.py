"""How long `steelyard report` takes and how large its page is: the whole command in a process of its own.

The plan is Llama-3-405B (126 blocks, embedding, head) in 16 pipeline stages, searched first; its layers have been
traced by then, as they are wherever a plan is made. Wall and CPU seconds of the process, imports included, medians of
repeated runs after one that is not counted. The frontier and the baselines have a second of computing; without
`--time-limit` the command searches until all are found, which takes a large plan a minute or more.

Run: OMP_NUM_THREADS=1 python benchmarks/report_speed.py
"""

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from steelyard.units import MB, format_bytes, format_seconds

COMMAND = (sys.executable, "-c", "from steelyard.cli import main; main()")
JOB = ("llama3-405b", "--cluster", "64x8xh100-80gb", "--seq-len", "8192", "--global-batch", "1024", "--stages", "16")
REPEATS = 5
WANTED_S, WANTED_BYTES = 3.0, 8 * MB


def run(*arguments: str) -> tuple[float, float]:
    """Wall and CPU seconds of one command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*COMMAND, *arguments], check=True, capture_output=True)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints one line with a second of searching, and one without."""
    with TemporaryDirectory() as folder:
        plan, page = str(Path(folder) / "plan.json"), str(Path(folder) / "plan.html")
        run("plan", *JOB, "-o", plan)
        print(f"report of 126 blocks in 16 stages; wanted: {WANTED_S:.0f} s, {format_bytes(WANTED_BYTES)}")
        for name, options in ((f"--time-limit {limit}", ("--time-limit", limit)) for limit in ("1", "0")):
            run("report", plan, "-o", page, *options)
            found = [run("report", plan, "-o", page, *options) for _ in range(REPEATS)]
            wall_s, cpu_s = (statistics.median(values) for values in zip(*found, strict=True))
            size = format_bytes(Path(page).stat().st_size)
            print(f"{name:16} wall {format_seconds(wall_s)}, CPU {format_seconds(cpu_s)}, {size}")


if __name__ == "__main__":
    main()
