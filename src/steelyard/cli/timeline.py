"""``steelyard timeline``: one step of a plan, pass by pass, as a file that Perfetto shows."""

import json
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import AsJson, Memory, ProfileOption, print_json, write_page
from steelyard.cli.progress import progress
from steelyard.cost.predict import predict
from steelyard.limits import MOST_MICROBATCHES
from steelyard.plan.file import read_plan
from steelyard.planning.price import job_of
from steelyard.report.trace_events import default_num_shown, trace_events
from steelyard.units import format_bytes, format_seconds


def timeline(
    path: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the trace events (JSON).")],
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
    memory: Memory = None,
    profile: ProfileOption = None,
    as_json: AsJson = False,
) -> None:
    """Write the simulated timeline of a step: passes, sends and bubbles of every stage, for ui.perfetto.dev."""
    plan = read_plan(path)
    with progress("counting the model's layers", silent=as_json):
        job = job_of(plan, cluster=cluster, memory=memory, profile=profile)
    played = predict(plan, job).timeline
    content = trace_events(played, plan, num_shown=microbatches or default_num_shown(plan))
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    write_page(output, text + "\n")
    shown = content["otherData"]
    if as_json:
        print_json(shown)
        return
    print(
        f"{format_seconds(played.step_time_s)} a step as simulated ({plan.schedule}), "
        f"bubbles {played.bubble_share():.1%} of all stages' time"
    )
    if shown["microbatches_shown"] < plan.num_microbatches:
        print(
            f"shown: {shown['microbatches_shown']} of {plan.num_microbatches} microbatches, the first and the last; "
            "choose with --microbatches"
        )
    print(f"written to {output} ({format_bytes(len(text.encode()))}); open it at https://ui.perfetto.dev")
