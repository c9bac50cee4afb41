"""Which layer of a stage is at work when it holds most, and what plans of another version are predicted to take now.

Of every plan of `bank/` in a file that `same_results.py` wrote, each stage is predicted again. Prints how often the
last layer, the one before, the first or another binds, the ratio of the bytes of tensors now to those in the file, and
the stages that differ most.

Run: python benchmarks/memory_moments.py RESULTS.json
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bank.questions import planning_questions

from steelyard.cost.job import Job, JobConfig
from steelyard.cost.memory import _of_pairs, _runs
from steelyard.cost.predict import memory_terms
from steelyard.plan.strategy import Strategy, parse_strategy
from steelyard.schedules import PipelineConfig, find_schedule

SHOWN = 12


def fullest_layer(
    parts: Sequence[range], strategies: Sequence[Strategy], stage: int, config: JobConfig
) -> tuple[int, int]:
    """The place of the layer at work when a stage holds most, and how many layers it has; of chunks the fullest one."""
    chain, mine = config.job.chain, [parts[part] for part in config.pipeline.parts_of(stage)]
    pairs = list(dict.fromkeys((chain.layers[layer], strategies[layer]) for part in mine for layer in part))
    tables, _ = _of_pairs(config, pairs)
    found = []
    for run in _runs(mine, chain.num_layers) if config.pipeline.num_chunks > 1 else mine:
        own = [tables.strategies.index(strategies[layer]) for layer in run]
        moments = tables.moments_of(tables.run_types(run), own, config.pipeline.in_flight(stage))
        found.append((int(moments.max()), int(moments.argmax()), len(run)))
    return max(found)[1:]


def stages(results: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Name, binding moment and ratio of every stage."""
    for name, question in planning_questions():
        record = results.get(name, {})
        plan = record.get("plan", record)
        if "stages" not in plan:
            continue
        job: Job = question.args[0]()  # type: ignore[attr-defined]
        parts, strategies, ranks = [], [], []
        for part in plan["stages"]:
            first = len(strategies)
            for run in part["runs"]:
                span, text = run.split(" ", 1)
                begin, end = map(int, span.split("-"))
                strategies += [parse_strategy(text)] * (end - begin + 1)
            parts.append(range(first, len(strategies)))
            ranks.append(part["ranks"])
        count = len(dict.fromkeys(ranks))
        pipeline = PipelineConfig(
            num_stages=count,
            num_chunks=len(parts) // count,
            num_microbatches=plan["microbatches"],
            schedule=find_schedule(plan["schedule"]),
        )
        configs = (JobConfig(job=job, pipeline=pipeline),) * count
        now = memory_terms(parts, strategies, configs)
        for stage, (terms, then) in enumerate(zip(now, plan["terms"], strict=True)):
            sizes = [
                sum(num_bytes for term, num_bytes in each.items() if term != "allocator slack")
                for each in (terms, then["memory_bytes"])
            ]
            place, layers = fullest_layer(parts, strategies, stage, configs[stage])
            moment = {0: "first", layers - 2: "before the last", layers - 1: "last"}.get(place, "another")
            yield f"{name}, stage {stage}", moment, sizes[0] / sizes[1]


def main() -> None:
    """Prints the figures."""
    found = list(stages(json.loads(Path(sys.argv[1]).read_text())))
    ratios = sorted(ratio for _, _, ratio in found)
    for moment, count in Counter(moment for _, moment, _ in found).most_common():
        print(f"{count:5d} of {len(found)} stages are fullest as the layer works that is {moment}")
    print(f"ratio: median {statistics.median(ratios):.4f}, 90 % {ratios[int(0.9 * len(ratios))]:.4f}")
    print(f"least {ratios[0]:.4f}, most {ratios[-1]:.4f}")
    for name, moment, ratio in sorted(found, key=lambda each: -abs(each[2] - 1))[:SHOWN]:
        print(f"{ratio:8.4f}  {moment:15s}  {name}")


if __name__ == "__main__":
    main()
