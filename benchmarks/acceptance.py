"""What the walk accepts beyond the tables of the search, what is proven of it, and how long that takes.

For each job and budget: the least time by the search's closed form within the tables of the settings alone, that of the
plan that the walk accepts, its gap, how much of the budget it takes, and CPU seconds of one search and of the whole
acceptance (floors, searches and walks). Costs are traced, rates those of the catalogue.

Run: OMP_NUM_THREADS=1 python benchmarks/acceptance.py [job] ...
"""

import sys
import time
from dataclasses import dataclass, replace

from steelyard.cost.build import usable_bytes
from steelyard.plan.decisions import Decisions
from steelyard.planning.acceptance import accept
from steelyard.planning.job import job_of
from steelyard.planning.problem import make_tables
from steelyard.planning.request import make_request
from steelyard.planning.walked_settings import walked_bytes
from steelyard.search import search
from steelyard.units import GIB, format_seconds


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A job of a packaged model, with budgets in GiB."""

    model: str
    cluster: str
    global_batch: int
    seq_len: int
    budgets_gib: tuple[float, ...]


PROBLEMS = {
    "readme": Problem(
        model="llama3-8b", cluster="1x8xa100-80gb", global_batch=64, seq_len=4096, budgets_gib=(79, 40, 30, 24, 20)
    ),
    "70b": Problem(
        model="llama3-70b", cluster="8x8xh100-80gb", global_batch=512, seq_len=8192, budgets_gib=(79, 40, 24)
    ),
    "13b": Problem(
        model="llama2-13b", cluster="2x8xa100-40gb", global_batch=128, seq_len=4096, budgets_gib=(39, 24, 18)
    ),
    "old-70b": Problem(
        model="llama2-70b", cluster="4x8xa100-80gb", global_batch=64, seq_len=4096, budgets_gib=(79, 50)
    ),
    "qwen": Problem(
        model="qwen2.5-7b", cluster="1x4xa100-80gb", global_batch=32, seq_len=8192, budgets_gib=(79, 50, 40)
    ),
    "mistral": Problem(
        model="mistral-7b", cluster="2x8xh100-80gb", global_batch=256, seq_len=8192, budgets_gib=(79, 40, 20, 12)
    ),
}


def show(problem: Problem) -> None:
    """A line for each budget."""
    job = job_of(
        make_request(
            problem.model,
            problem.cluster,
            global_batch=problem.global_batch,
            seq_len=problem.seq_len,
            precision="bf16",
            memory=None,
            profile=None,
        )
    )
    tables = make_tables(job, Decisions())
    print(f"{problem.model} on {problem.cluster}, {len(tables)} settings")
    search(tables, usable_bytes(job))
    for budget_gib in problem.budgets_gib:
        tight = replace(job, budget_bytes=int(budget_gib * GIB))
        start = time.process_time()
        before = search(tables, usable_bytes(tight)).best
        between = time.process_time()
        found = accept(tight, tables)
        spent_s, whole_s = between - start, time.process_time() - between
        by_tables = format_seconds(before.score_s) if before else "nothing"
        if found.ranked:
            best = found.ranked[0]
            used = walked_bytes(best.plan, tight) / usable_bytes(tight)
            accepted = f"{format_seconds(best.outcome.score_s)}, gap {found.search.gap:.2%}, {used:.1%} of the budget"
        else:
            accepted = "nothing"
        print(
            f"  {budget_gib} GiB: {by_tables}; accepted {accepted}; "
            f"search {format_seconds(spent_s)}, acceptance {format_seconds(whole_s)}",
            flush=True,
        )


def main() -> None:
    """Shows the jobs named on the command line, or all."""
    for name in sys.argv[1:] or PROBLEMS:
        show(PROBLEMS[name])


if __name__ == "__main__":
    main()
