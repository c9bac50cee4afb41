"""Predicted against measured: step time and memory of plans of 2 and 4 CPU processes, and how well plans are ranked.

For each number of processes and in each round the model is profiled, every plan is priced from that profile, and all
plans are then run one after another, each in processes of its own: process groups that earlier plans leave behind slow
later ones down (their threads wake up all the time), by a factor of up to two after a dozen plans. The searched plan
for the same job, without a budget that binds, is among them: its measured time over the best is the regret.

Measured seconds of a step are the mean of the faster half of the timed steps, as the profiler takes its seconds: what
disturbs from outside only makes a step longer. The machine also drifts by tens of per cent within minutes, which says
nothing about the model of costs: predicted and measured seconds are means over the rounds, and the errors of each
round alone stand beside. Memory is what the tensors of a process hold at most.

Run: python benchmarks/prediction_accuracy.py [--model M] [--seq-len S] [--global-batch B] [--processes 2 4]
     [--lever NAME=TEXT ...] [--rounds N] [--steps N] [--json OUT]
"""

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ranks import on_ranks
from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.levers import Levers
from steelyard.model.read import load_model
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.job import job_of
from steelyard.planning.price import with_price
from steelyard.planning.request import changed_chain, make_request, request_of_plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.units import format_bytes, format_seconds

MEMORY = "1GiB"
NUM_WARMUP_STEPS = 2
"""The first makes optimizer states, the second measures memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was predicted and measured of one plan."""

    name: str
    processes: int
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan by hand: a strategy for each third of the layers (one for all if it is one), and a pipeline."""

    strategies: tuple[str, ...]
    microbatches: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def name(self) -> str:
        """As it stands in the table."""
        parts = [" | ".join(self.strategies), f"{self.microbatches} mb"]
        if self.stages > 1:
            parts.append(f"{self.stages} st {self.schedule.removesuffix('-1f1b')}")
        return ", ".join(parts)


CASES = {
    2: (
        Case(strategies=("dp2",)),
        Case(strategies=("dp2",), microbatches=4),
        Case(strategies=("fsdp2",), microbatches=2),
        Case(strategies=("fsdp2 remat=full",), microbatches=2),
        Case(strategies=("fsdp2 zero2",), microbatches=2),
        Case(strategies=("tp2",), microbatches=2),
        Case(strategies=("tp2+sp",), microbatches=2),
        Case(strategies=("single",), microbatches=4, stages=2),
        Case(strategies=("single",), microbatches=4, stages=2, schedule="gpipe"),
        Case(strategies=("fsdp2", "dp2", "tp2"), microbatches=2),
    ),
    4: (
        Case(strategies=("dp4",)),
        Case(strategies=("dp4",), microbatches=2),
        Case(strategies=("fsdp4",), microbatches=4),
        Case(strategies=("fsdp4 remat=full",), microbatches=2),
        Case(strategies=("tp4+sp",), microbatches=2),
        Case(strategies=("dp2-tp2",), microbatches=2),
        Case(strategies=("fsdp2-tp2+sp",), microbatches=2),
        Case(strategies=("dp2",), microbatches=4, stages=2),
        Case(strategies=("fsdp2 remat=full",), microbatches=8, stages=2),
        Case(strategies=("tp2+sp",), microbatches=8, stages=2, schedule="gpipe"),
        Case(strategies=("single",), microbatches=8, stages=4),
        Case(strategies=("dp2",), microbatches=4, stages=2, schedule="interleaved-1f1b", chunks=2),
        Case(strategies=("fsdp4", "dp2-tp2", "tp4"), microbatches=2),
    ),
}


def build(job: Job, case: Case) -> Plan:
    """The plan of a case, its layers cut evenly over the parts of the pipeline."""
    chain, processes = job.chain, job.cluster.num_devices
    num_parts, size = case.stages * case.chunks, processes // case.stages
    layer_types = [parse_strategy(text) for text in case.strategies]
    strategies = tuple(layer_types[layer * len(layer_types) // chain.num_layers] for layer in range(chain.num_layers))
    cuts = [round(index * chain.num_layers / num_parts) for index in range(num_parts + 1)]
    parts = tuple(
        StagePart(
            ranks=(index % case.stages * size, index % case.stages * size + size - 1),
            runs=fold_runs(first, strategies[first:end]),
        )
        for index, (first, end) in enumerate(pairwise(cuts))
    )
    return Plan(
        model=PlanModel(name=chain.name, config=dict(chain.config), frozen=chain.freeze),
        levers=job.levers.texts,
        cluster=job.cluster.name,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        num_microbatches=case.microbatches,
        precision="fp32",
        schedule=case.schedule,
        stages=stages_of(parts),
    )


def measure_profile(
    model: str, processes: int, seq_len: int, budget_s: float, levers: Mapping[str, str] = MappingProxyType({})
) -> Profile:
    """The measured profile of a model on this many processes, as levers change it."""
    from steelyard.profiler.launch import launch_profiler
    from steelyard.tracer.cache import cached_trace

    degrees = tuple(degree for degree in (1, 2, 4) if processes % degree == 0)
    chain = changed_chain(load_model(model), Levers.of(levers), ())
    traced = cached_trace(chain, seq_len=seq_len, precision="fp32", degrees=degrees)
    return launch_profiler(chain, traced, num_processes=processes, samples=(1, 2, 4, 8), budget_s=budget_s)


def named_plans(job: Job) -> list[tuple[str, Plan]]:
    """The plans by hand that the levers of the job allow, and the searched one, which may be one of them."""
    named = []
    for case in CASES[job.cluster.num_devices]:
        try:
            named.append((case.name, build(job, case)))
        except UserError as error:
            print(f"left out: {case.name}: {error.found}")
    searched = plan_job(job).plan
    if searched is None:
        return named
    same = [number for number, (_, plan) in enumerate(named) if runs_alike(plan, searched)]
    for number in same:
        named[number] = (f"{named[number][0]} (searched)", named[number][1])
    return named if same else [*named, ("searched", searched)]


def runs_alike(first: Plan, second: Plan) -> bool:
    """Whether two plans of one job are the same but for what was predicted."""
    return all(getattr(first, name) == getattr(second, name) for name in ("num_microbatches", "schedule", "stages"))


def run_plans(plans: Sequence[Plan], processes: int, steps: int) -> list[RunRecord]:
    """The records of the plans, run one after another, each by processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        records = [Path(folder) / f"record{index}.json" for index in range(len(plans))]
        for plan, record in zip(plans, records, strict=True):
            on_ranks(processes, partial(train_plan, plan, steps, record))
        return [RunRecord.model_validate_json(record.read_text()) for record in records]


def train_plan(plan: Plan, steps: int, path: Path) -> None:
    """What every process does; the first one writes the record."""
    import torch.distributed as dist

    from steelyard.integrations.run import train
    from steelyard.runtime.options import TrainOptions

    with redirect_stdout(sys.stderr):
        record = train(plan, sysconfig.get_path("stdlib"), TrainOptions(steps=steps))
    if dist.get_rank() == 0:
        path.write_text(record.model_dump_json())


def undisturbed_s(record: RunRecord) -> float:
    """The mean seconds of the faster half of the timed steps."""
    times = sorted(step.time_s for step in record.steps[NUM_WARMUP_STEPS:])
    kept = times[: (len(times) + 1) // 2]
    return sum(kept) / len(kept)


def measure_rounds(processes: int, options: argparse.Namespace) -> list[list[Row]]:
    """The rows of each round on this many processes: profile, predict, run everything. The search is of the first."""
    rounds: list[list[Row]] = []
    plans: list[tuple[str, Plan]] = []
    for _ in range(options.rounds):
        levers = dict(text.split("=", 1) for text in options.lever)
        profile = measure_profile(options.model, processes, options.seq_len, options.budget, levers)
        if not plans:
            job = job_of(
                make_request(
                    options.model,
                    f"1x{processes}xcpu",
                    global_batch=options.global_batch,
                    seq_len=options.seq_len,
                    precision="fp32",
                    memory=MEMORY,
                    profile=profile,
                    levers=levers,
                )
            )
            plans = named_plans(job)
        named = [
            (name, with_price(plan, job_of(request_of_plan(plan, memory=MEMORY, profile=profile))))
            for name, plan in plans
        ]
        records = run_plans([plan for _, plan in named], processes, options.steps)
        rounds.append([row_of(name, plan, record) for (name, plan), record in zip(named, records, strict=True)])
    return rounds


def row_of(name: str, plan: Plan, record: RunRecord) -> Row:
    """What was predicted of a plan beside what was found as it ran; memory is that of the tightest stage."""
    assert plan.prediction is not None, f"{name} was priced"
    peaks = [
        (prediction.total_bytes, max(rank.peak_bytes for rank in record.ranks if rank.stage == stage))
        for stage, prediction in enumerate(plan.prediction.stages)
    ]
    expected, found = min(peaks, key=lambda pair: pair[0] / pair[1])
    return Row(
        name=name,
        processes=len(record.ranks),
        predicted_s=plan.prediction.step_time_s,
        measured_s=undisturbed_s(record),
        predicted_bytes=expected,
        measured_bytes=found,
    )


def mean_row(rows: Sequence[Row]) -> Row:
    """One plan over all rounds: mean seconds, and the bytes of the round with the tightest."""
    tightest = min(rows, key=lambda row: row.predicted_bytes / row.measured_bytes)
    return replace(
        tightest,
        predicted_s=statistics.mean(row.predicted_s for row in rows),
        measured_s=statistics.mean(row.measured_s for row in rows),
    )


def show(rows: Sequence[Row]) -> None:
    """Prints the rows, and for each number of processes what the errors and the regret are."""
    print(
        f"{'plan':34}{'n':>3}{'predicted':>11}{'measured':>11}{'ratio':>7}{'predicted':>11}{'measured':>11}{'ratio':>7}"
    )
    for row in rows:
        seconds = f"{format_seconds(row.predicted_s):>11}{format_seconds(row.measured_s):>11}"
        held = f"{format_bytes(row.predicted_bytes):>11}{format_bytes(row.measured_bytes):>11}"
        time_ratio, byte_ratio = row.predicted_s / row.measured_s, row.predicted_bytes / row.measured_bytes
        print(f"{row.name:34}{row.processes:>3}{seconds}{time_ratio:7.2f}{held}{byte_ratio:7.3f}")
    errors = [abs(row.predicted_s / row.measured_s - 1) for row in rows]
    print(f"time: median error {statistics.median(errors):.1%} (target 10 %), worst {max(errors):.1%} (target 25 %)")
    ratios = [row.predicted_bytes / row.measured_bytes for row in rows]
    print(
        f"memory: predicted over measured, the tightest stage, {min(ratios):.3f} to {max(ratios):.3f} "
        f"(target 1 to 1.1), median {statistics.median(ratios):.3f}"
    )
    for processes in sorted({row.processes for row in rows}):
        mine = [row for row in rows if row.processes == processes]
        fastest, first = min(mine, key=lambda row: row.measured_s), min(mine, key=lambda row: row.predicted_s)
        print(
            f"{processes} processes: fastest {fastest.name}; ranked first {first.name}, "
            f"regret {first.measured_s / fastest.measured_s - 1:.1%}"
        )


def main() -> None:
    """Prints a row for each plan and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-demo", help="as `steelyard plan` takes it: a name, config or folder")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--lever", nargs="*", default=[], metavar="NAME=TEXT", help="as in train=lora:r=8")
    parser.add_argument("--rounds", type=int, default=2, help="how often all is profiled, priced and run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], choices=sorted(CASES))
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each profile, about")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows: list[Row] = []
    for processes in options.processes:
        rounds = measure_rounds(processes, options)
        for number, own in enumerate(rounds, start=1):
            errors = [abs(row.predicted_s / row.measured_s - 1) for row in own]
            median, worst = statistics.median(errors), max(errors)
            print(f"{processes} processes, round {number} alone: median error {median:.1%}, worst {worst:.1%}")
        rows += [mean_row(same) for same in zip(*rounds, strict=True)]
        if options.json is not None:
            options.json.write_text(json.dumps([{name: getattr(row, name) for name in Row.__slots__} for row in rows]))
    show(rows)
    busy, cores = os.getloadavg()[1], os.cpu_count()
    print(f"load of the machine over the last 5 minutes: {busy:.1f} on {cores} cores; other work makes times worthless")


if __name__ == "__main__":
    main()
