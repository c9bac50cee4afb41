"""Best order of passes beside interleaved 1F1B and interleaved zero-bubble, in the simulator, for published jobs.

Each published run in chunks is priced on our own runtime with its own strategies, stages, chunks and microbatches, one
of each shape of pipeline. Of its row only the configuration is used, none of its measurements. The order is found
twice: within the passes that interleaved zero-bubble has in flight and pending, and with as many more of both as there
are stages. The bound is of all orders, whatever their memory.

Run: python benchmarks/pass_orders.py
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from published_runs.jobs import Skipped, case_of
from published_runs.rows import PublishedRun, read_runs

from steelyard.cost.pass_order import StageLimit, best_order, order_bound_s
from steelyard.cost.predict import pass_times
from steelyard.engines.native import NATIVE
from steelyard.schedules import SCHEDULES, PipelineConfig

FIXED = [each for each in SCHEDULES.values() if each.takes_chunks and not each.orders_by_time]
BY_TIMES = next(each for each in SCHEDULES.values() if each.orders_by_time)
MOST_PASSES = 4096
"""Maximum number of forward passes of a pipeline, to end within a minute."""


def cases() -> Iterator[tuple[PublishedRun, PipelineConfig, tuple[float, ...]]]:
    """Yields a run of each shape of pipeline: step times by schedule, in both orders, their bound, and seconds."""
    seen = set()
    for run in read_runs(Path(__file__).parent / "published_runs" / "data"):
        case = case_of(run)
        if isinstance(case, Skipped) or case.plan.num_chunks == 1:
            continue
        plan = case.plan.model_copy(update={"schedule": BY_TIMES.name})
        pipeline = plan.pipeline
        if pipeline in seen or pipeline.num_stages * pipeline.num_passes > MOST_PASSES:
            continue
        if BY_TIMES.refusal(pipeline) is None:
            seen.add(pipeline)
            times = pass_times(plan, replace(case.job, engine=NATIVE))
            found = [times.timeline(replace(pipeline, schedule=each)).step_time_s for each in FIXED]
            started_s = time.process_time()
            for more in (0, pipeline.num_stages):
                limits = [
                    StageLimit(in_flight=pipeline.in_flight(stage) + more, waiting=pipeline.waiting(stage) + more)
                    for stage in range(pipeline.num_stages)
                ]
                rows = best_order(times.parts, pipeline, limits, **times.options)
                found.append(times.timeline(replace(pipeline, pass_order=rows)).step_time_s)
            spent_s = time.process_time() - started_s
            yield run, pipeline, (*found, order_bound_s(times.parts, pipeline), spent_s)


def main() -> None:
    print("| model | stages × chunks, microbatches | 1F1B | zero-bubble | its memory | more | above bound | CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for run, shape, (usual_s, filled_s, ordered_s, roomy_s, bound_s, spent_s) in cases():
        gains = " | ".join(f"{each / usual_s - 1:+.1%}" for each in (filled_s, ordered_s, roomy_s))
        print(
            f"| {run.text('model')} | {shape.num_stages} × {shape.num_chunks}, {shape.num_microbatches} "
            f"| {usual_s:.2f} s | {gains} | {roomy_s / bound_s - 1:.1%} | {spent_s:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
