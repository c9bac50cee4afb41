"""CPU seconds of finding the plan for what is left after a loss, in a process that has planned before.

``python benchmarks/replanning.py``: for each row the least of some runs while a run waits, one search to the end, and
the steps of both plans. It takes about a minute.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.planning.complete import find_plan
from steelyard.planning.elastic import fastest_on, replan
from steelyard.planning.job import job_of
from steelyard.planning.request import request_of_plan

ROWS = (
    ("llama3-8b", "2x8xh100-80gb", 128, 8192, {"2x8xh100-80gb": (8, 7)}),
    ("llama3-8b", "8x8xh100-80gb", 256, 8192, {"8x8xh100-80gb": (8,) * 7}),
    ("mixtral-8x7b", "4x8xh100-80gb", 256, 8192, {"4x8xh100-80gb": (8,) * 3}),
    ("llama3-70b", "8x8xh100-80gb", 256, 8192, {"8x8xh100-80gb": (8,) * 7}),
    ("llama3-70b", "4x8xh100-80gb+8x8xa100-80gb", 512, 4096, {"4x8xh100-80gb": (8,) * 4, "8x8xa100-80gb": (8,) * 7}),
    ("llama3-70b", "4x8xh100-80gb+8x8xa100-80gb", 512, 4096, {"4x8xh100-80gb": (8,) * 3, "8x8xa100-80gb": (8,) * 8}),
)
"""Model, cluster, global batch, tokens of a sample, and the devices of each host that is left by pool."""
RUNS = 5


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    began_s = time.process_time()
    found = call()
    return time.process_time() - began_s, found


def main() -> None:
    """Prints a line for each row."""
    folder = Path()
    for model, cluster, batch, tokens, left in ROWS:
        plan = find_plan(model, cluster, global_batch=batch, seq_len=tokens)
        hosts = [count for counts in left.values() for count in counts]
        pools = [name for name, counts in left.items() for _ in counts] if plan.is_mixed else []
        runs = [
            timed(lambda plan=plan, hosts=hosts, pools=pools: replan(plan, hosts, folder, pools)) for _ in range(RUNS)
        ]
        in_order = {name: left[name] for name in plan.cluster.split("+")}
        request = request_of_plan(plan, folder=folder)
        job = job_of(request)
        whole_s, (whole, _) = timed(lambda request=request, job=job, left=in_order: fastest_on(request, job, left))
        seconds, now = min(each for each, _ in runs), runs[0][1].plan
        print(
            f"{model}, {cluster}, {left}: to the end {whole_s:.2f} s, step {whole.prediction.step_time_s:.2f} s, "
            f"{whole.prediction.certificate}; now {seconds:.2f} s, step {now.prediction.step_time_s:.2f} s, "
            f"{now.prediction.certificate}",
            flush=True,
        )


if __name__ == "__main__":
    main()
