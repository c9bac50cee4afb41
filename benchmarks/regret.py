"""Is the searched plan the fastest? Measured against all uniform plans that fit, on 4 CPU processes.

For two models and two memory budgets each: profile the machine once, search, and train the searched plan and every
uniform one (same strategy for all layers, layers cut evenly) that is predicted to fit, each in new processes: process
groups that earlier plans leave behind would slow it down. The fastest of them and the searched plan then run again,
more often: the least of many noisy medians is too low. Regret is the searched plan's median step time in this second
round over the least one, its own included; gain is that of the fastest uniform plan over the searched one.

Run: python benchmarks/regret.py [--rounds N] [--models wide deep] [--profiles FOLDER]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ranks import on_ranks, training_step
from steelyard.cost.job import Job
from steelyard.errors import InvalidProfileError, UserError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import dump_json, parse_file
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.job import job_of
from steelyard.planning.price import with_price
from steelyard.planning.request import make_request
from steelyard.profiler.launch import launch_profiler
from steelyard.profiles.profile import Profile
from steelyard.tracer.cache import cached_trace
from steelyard.units import format_bytes

PROCESSES, SEQ_LEN, GLOBAL_BATCH, VOCABULARY = 4, 128, 16, 512
WARM_UP, STEPS, FINAL_STEPS = 1, 4, 16
"""Steps of a run that are not timed, that are in the first round, and that are in the second."""
SIZES = {
    "wide": {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 768},
    "deep": {"hidden_size": 128, "num_hidden_layers": 8, "intermediate_size": 384},
}
SAMPLES, PROFILE_S = (1, 2, 4, 8, 16), 25.0
"""Samples of one rank that are timed, and about how long the profiler takes once its processes run."""
NUM_FINALISTS, FINAL_ROUNDS = 4, 3
"""Uniform plans that run again with the searched one, and how much more often than in the first round."""
BUDGET_SHARES = (2.0, 0.6)
"""Budgets, as shares of what plain replication takes."""
STAGE_STRATEGIES = {
    1: ("dp4", "fsdp4", "fsdp4 zero2", "tp4", "tp4+sp", "dp2-tp2", "fsdp2-tp2", "fsdp2-tp2+sp", "fsdp4 remat=full"),
    2: ("dp2", "fsdp2", "tp2", "tp2+sp", "fsdp2 remat=full"),
    4: ("single", "single remat=full"),
}
MICROBATCHES = {1: (1, 2), 2: (4,), 4: (4,)}


def config_of(name: str) -> dict[str, Any]:
    """The Hugging Face config of a model."""
    return {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": SEQ_LEN,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **SIZES[name],
    }


def uniform_plans(job: Job) -> dict[str, Plan]:
    """Every uniform plan that is legal for the model, by its name."""
    found = {}
    for num_stages, texts in STAGE_STRATEGIES.items():
        for text in texts:
            for num_microbatches in MICROBATCHES[num_stages]:
                name = f"{text}, {num_microbatches} microbatches, {num_stages} stages"
                try:
                    found[name] = uniform(job, text, num_microbatches, num_stages)
                except UserError:
                    continue
    return found


def uniform(job: Job, text: str, num_microbatches: int, num_stages: int) -> Plan:
    """One strategy everywhere, layers cut evenly."""
    chain, size = job.chain, PROCESSES // num_stages
    cuts = [round(index * chain.num_layers / num_stages) for index in range(num_stages + 1)]
    stages = tuple(
        StagePart(
            ranks=(index * size, index * size + size - 1),
            runs=fold_runs(first, (parse_strategy(text),) * (end - first)),
        )
        for index, (first, end) in enumerate(pairwise(cuts))
    )
    return Plan(
        model=PlanModel(name=chain.name, config=dict(chain.config)),
        cluster=job.cluster.name,
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        num_microbatches=num_microbatches,
        precision="fp32",
        stages=stages_of(stages),
    )


def peak_bytes(plan: Plan) -> int:
    """The most bytes that a process is predicted to take."""
    assert plan.prediction is not None
    return max(stage.total_bytes for stage in plan.prediction.stages)


def measured_profile(name: str, chain: ModelChain, traced: Profile, folder: Path | None) -> Profile:
    """The machine's profile of a model; read from ``folder`` where an earlier run left it, else measured."""
    path = None if folder is None else folder / f"{name}.json"
    if path is not None and path.exists():
        return parse_file(path, Profile, InvalidProfileError, what="profile")
    profile = launch_profiler(chain, traced, num_processes=PROCESSES, samples=SAMPLES, budget_s=PROFILE_S)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_json(profile))
    return profile


def plans_of(name: str, profiles: Path | None) -> dict[str, dict[str, Plan]]:
    """For each budget the searched plan, as ``searched``, and the uniform ones that fit."""
    config = config_of(name)
    chain = chain_from_config(config, name=name)
    traced = cached_trace(chain, seq_len=SEQ_LEN, precision="fp32", degrees=(1, 2, 4))
    profile = measured_profile(name, chain, traced, profiles)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        roomy = job_within(path, "4GiB", profile)
        uniforms = {text: with_price(plan, roomy) for text, plan in uniform_plans(roomy).items()}
        replicated = peak_bytes(uniforms["dp4, 1 microbatches, 1 stages"])
        found = {}
        for share in BUDGET_SHARES:
            budget = int(share * replicated)
            searched = plan_job(job_within(path, f"{budget // 2**20}MiB", profile), Decisions()).plan
            if searched is None:
                print(f"{name}, {format_bytes(budget)}: nothing fits", flush=True)
                continue
            fitting = {text: plan for text, plan in uniforms.items() if peak_bytes(plan) <= budget}
            found[f"{name}, {format_bytes(budget)}"] = {"searched": searched, **fitting}
    return found


def job_within(config: Path, memory: str, profile: Profile) -> Job:
    """The planning job under a memory budget."""
    return job_of(
        make_request(
            str(config),
            f"1x{PROCESSES}xcpu",
            global_batch=GLOBAL_BATCH,
            seq_len=SEQ_LEN,
            precision="fp32",
            memory=memory,
            profile=profile,
        )
    )


Medians = dict[str, float]
"""Median seconds of a step, by the name of the plan."""


def measure(plans: Mapping[str, Plan], *, rounds: int, steps: int) -> Medians:
    """The median seconds of a step of each plan, over rounds in which each runs in new processes."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            times[name] += step_times(plan, steps)
    return {name: statistics.median(each) for name, each in times.items()}


def step_times(plan: Plan, steps: int) -> list[float]:
    """The seconds that the slowest of new processes took for each of so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        on_ranks(PROCESSES, partial(time_steps, plan, steps, path))
        return json.loads(path.read_text())


def time_steps(plan: Plan, steps: int, path: Path) -> None:
    """What every process does; the first one writes the seconds."""
    step, times = training_step(plan), []
    for repeat in range(WARM_UP + steps):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(repeat))
        dist.barrier()
        started_s = time.perf_counter()
        step(tokens)
        slowest = torch.tensor(time.perf_counter() - started_s)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item())
    if dist.get_rank() == 0:
        path.write_text(json.dumps(times[WARM_UP:]))


def fastest(medians: Medians) -> list[str]:
    """Names of plans, the fastest first."""
    return sorted(medians, key=lambda name: medians[name])


def show(title: str, plans: dict[str, Plan], first: Medians, final: Medians) -> None:
    """A row per plan with the medians of both rounds, the regret and the gain."""
    print(f"{title} ({len(plans) - 1} uniform plans fit)")
    for name in [*fastest(final), *(other for other in fastest(first) if other not in final)]:
        predicted = plans[name].prediction
        assert predicted is not None
        again = f"{final[name] * 1e3:7.0f} ms" if name in final else " " * 10
        print(f"  {name:44} {first[name] * 1e3:7.0f} ms {again}, predicted {predicted.step_time_s * 1e3:7.0f} ms")
    searched = plans["searched"]
    layers = ", ".join(
        f"{run.layers[0]}-{run.layers[1]} {run.strategy}" for part in searched.parts for run in part.runs
    )
    print(f"  searched: {searched.num_microbatches} microbatches, {searched.num_stages} stages: {layers}")
    best_uniform = min((seconds for name, seconds in final.items() if name != "searched"), default=float("nan"))
    regret, gain = final["searched"] / min(final.values()), best_uniform / final["searched"]
    print(f"  searched over best: {regret:.3f}; best uniform over searched: {gain:.3f}", flush=True)


def compare(title: str, plans: dict[str, Plan], rounds: int) -> None:
    """Measures all plans of a case, then the fastest again, and prints what came out."""
    first = measure(plans, rounds=rounds, steps=STEPS)
    finalists = [name for name in fastest(first) if name != "searched"][:NUM_FINALISTS]
    again = {name: plans[name] for name in ("searched", *finalists)}
    final = measure(again, rounds=FINAL_ROUNDS * rounds, steps=FINAL_STEPS)
    show(title, plans, first, final)


def main() -> None:
    """Prints a block per model and budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1, help="how often all plans are run")
    parser.add_argument("--models", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--profiles", type=Path, help="folder to keep the machine's profiles in, and to read them from")
    arguments = parser.parse_args()
    for name in arguments.models:
        for title, plans in plans_of(name, arguments.profiles).items():
            compare(title, plans, arguments.rounds)


if __name__ == "__main__":
    main()
