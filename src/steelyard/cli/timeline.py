"""``steelyard timeline``: one step of a plan, pass by pass, as a file that Perfetto shows."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import TypedDict

from steelyard.cli.options import AsJson, Memory, NetworkOption, ProfileOption, print_json, prints, progress, tried
from steelyard.cost.predict import layer_times, predict
from steelyard.limits import MOST_MICROBATCHES
from steelyard.output import write_file
from steelyard.plan.file import read_plan
from steelyard.planning.job import job_of
from steelyard.planning.request import Elsewhere, request_of_plan
from steelyard.report.trace_events import default_num_shown, trace_events
from steelyard.units import format_bytes, format_seconds


class Shown(TypedDict):
    """The step that a timeline shows."""

    model: str
    cluster: str
    schedule: str
    step_time_s: float
    fixed_s: float
    bubble_share: float
    microbatches: int
    microbatches_shown: int


@prints(Shown)
def timeline(
    path: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=tried, help="Where to write the trace events (JSON).")
    ],
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            help="Show the passes of so many microbatches, half of them the first, half the last; "
            "default: all, or as many as keep the file below 8 MB.",
            min=2,
            max=MOST_MICROBATCHES,
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Simulate it on another cluster than the plan names.")
    ] = None,
    network: NetworkOption = None,
    memory: Memory = None,
    profile: ProfileOption = None,
    as_json: AsJson = False,
) -> None:
    """Write the simulated timeline of a step for ui.perfetto.dev: passes, with their layers, sends and bubbles."""
    plan = read_plan(path)
    with progress("counting the model's layers", silent=as_json):
        given = Elsewhere(cluster=cluster, network=network, memory=memory, profile=profile)
        job = job_of(request_of_plan(plan, folder=path.parent, **given))
    cost, layers = predict(plan, job), layer_times(plan, job)
    played, fixed_s = cost.timeline, cost.step_time_s - cost.timeline.step_time_s
    shown_count = microbatches or default_num_shown(plan)
    content = trace_events(played, plan, num_shown=shown_count, layers=layers, fixed_s=fixed_s)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    write_file(output, text + "\n", "--output")
    shown = content["otherData"]
    if as_json:
        print_json(shown)
        return
    print(
        f"{format_seconds(cost.step_time_s)} a step as simulated ({plan.schedule}), "
        f"bubbles {played.bubble_share():.1%} of all stages' time"
        + (f"; {format_seconds(fixed_s)} of it fixed, after the passes" if fixed_s > 0 else "")
    )
    if shown["microbatches_shown"] < plan.num_microbatches:
        print(
            f"shown: {shown['microbatches_shown']} of {plan.num_microbatches} microbatches, the first and the last; "
            "choose with --microbatches"
        )
    print(f"written to {output} ({format_bytes(len(text.encode()))}); open it at https://ui.perfetto.dev")
