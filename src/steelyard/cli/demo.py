"""``steelyard demo``: profile, plan, train and compare on this machine's CPU."""

import sysconfig
from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import TypedDict

from steelyard.cli.options import AsJson, count, option, print_json, prints
from steelyard.installed import require_training
from steelyard.limits import MOST_STEPS
from steelyard.model.read import load_model
from steelyard.output import command, make_folder, write_file
from steelyard.plan.dimensions import DIMENSIONS
from steelyard.plan.dimensions.dimension import States
from steelyard.plan.file import dump_json, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.complete import complete
from steelyard.planning.job import job_of
from steelyard.planning.price import peak_bytes, uniform_plan
from steelyard.planning.request import make_request
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.report.plan_table import answer_view
from steelyard.report.run_table import comparison_table, profile_view
from steelyard.report.tables import console
from steelyard.units import format_bytes

MODEL = "llama-demo"
NUM_PROCESSES = 4
SEQ_LEN = 256
GLOBAL_BATCH = 16
MEMORY = "44MiB"
"""Budget in which neither plain DDP fits nor any single strategy as fast as the best mix."""


class Shown(TypedDict):
    """Files that the demo wrote."""

    profile: Profile
    plan: Plan
    record: RunRecord


@prints(Shown)
def demo(
    steps: Annotated[int, count("--steps", "Training steps.", most=MOST_STEPS)] = 30,
    memory: Annotated[str, option("--memory", "SIZE", "Memory budget per process.")] = MEMORY,
    folder: Annotated[Path, option("--folder", "FOLDER", "Folder for profile, plan and record.")] = Path("demo-run"),
    as_json: AsJson = False,
) -> None:
    """Profile 4 CPU processes, plan and train a small Llama on Python's source, compare. About four minutes."""
    require_training("`steelyard demo` measures and trains")
    from steelyard.profiler.launch import launch_profiler
    from steelyard.runtime.launch import launch
    from steelyard.runtime.options import TrainOptions
    from steelyard.tracer.cache import cached_trace

    shown = console(stderr=as_json)
    make_folder(folder, "--folder")
    chain = load_model(MODEL)

    shown.print(f"\n1. Measure {NUM_PROCESSES} processes of this machine (minutes; counted below)", style="bold")
    traced = cached_trace(chain, seq_len=SEQ_LEN, precision="fp32", degrees=(1, 2, NUM_PROCESSES))
    profile = launch_profiler(chain, traced, num_processes=NUM_PROCESSES, samples=(1, 2, 8))
    write_file(folder / "profile.json", dump_json(profile) + "\n", "--folder")
    shown.print(profile_view(profile))

    shown.print(f"\n2. Plan within {memory} per process", style="bold")
    request = make_request(
        MODEL,
        f"1x{NUM_PROCESSES}xcpu",
        global_batch=GLOBAL_BATCH,
        seq_len=SEQ_LEN,
        precision="fp32",
        memory=memory,
        profile=profile,
        num_next_best=0,
        num_fallbacks=0,
    )
    job = job_of(request)
    replicating = next(dimension for dimension in DIMENSIONS.values() if dimension.states is States.REPLICATED)
    replicated = uniform_plan(job, f"{replicating}{NUM_PROCESSES}")
    needed, budget = peak_bytes(replicated), job.budget_bytes
    shown.print(
        f"Plain DDP ({replicated.num_microbatches} microbatches) needs {format_bytes(needed)} per process and "
        f"{'does not fit' if needed > budget else 'fits'} in {format_bytes(budget)}."
    )
    result = complete(request)
    if result.plan is None:
        shown.print(f"Nothing fits: {result.miss_text}")
        raise typer.Exit(1)
    write_plan(result.plan, folder / "plan.json")
    shown.print(answer_view(result.plan, file=folder / "plan.json"))

    shown.print(f"\n3. Train {steps} steps on the source of Python's standard library", style="bold")
    options = TrainOptions(steps=steps, record=folder / "record.json")
    record = launch(folder / "plan.json", sysconfig.get_path("stdlib"), options, stdout_to_stderr=as_json)
    assert record is not None, "a run that ends well writes its record"

    shown.print("\n4. Compare", style="bold")
    first, last = record.steps[0].loss, record.steps[-1].loss
    shown.print(f"loss {first:.3f} → {last:.3f} in {len(record.steps)} steps, {record.tokens_per_s:,.0f} tokens/s")
    shown.print(comparison_table(record))
    shown.print(
        f"Profile, plan and record are in {folder}/. Next: {command('explain', folder / 'plan.json')}", markup=False
    )
    if as_json:
        print_json(Shown(profile=profile, plan=result.plan, record=record))
