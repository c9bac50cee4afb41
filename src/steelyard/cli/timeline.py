"""``steelyard timeline``: one simulated step of a plan as a trace file for Perfetto."""

import json
from pathlib import Path
from typing import Annotated

from typing_extensions import TypedDict

from steelyard.cli import options
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


_COUNT = "Number of microbatches to show, half first, half last. Default: all, as far as the file stays below 8 MB."
Microbatches = Annotated[int | None, options.count("--microbatches", _COUNT, most=MOST_MICROBATCHES, least=2)]


@options.prints(Shown)
def timeline(
    path: options.PlanFile,
    output: Annotated[Path, options.written("Write the trace events (JSON) to this file.")],
    microbatches: Microbatches = None,
    cluster: options.OtherCluster = None,
    network: options.NetworkOption = None,
    memory: options.Memory = None,
    profile: options.ProfileOption = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the simulated timeline of a step for ui.perfetto.dev: passes with layers, sends and bubbles."""
    plan = read_plan(path)
    with options.progress("counting the model's layers", silent=as_json):
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
        options.print_json(shown)
        return
    print(
        f"{format_seconds(cost.step_time_s)} per step in simulation ({plan.schedule}), "
        f"bubbles {played.bubble_share():.1%} of the time of all stages"
        + (f"; {format_seconds(fixed_s)} per-step overhead after the passes" if fixed_s > 0 else "")
    )
    if shown["microbatches_shown"] < plan.num_microbatches:
        print(
            f"The file shows {shown['microbatches_shown']} of {plan.num_microbatches} microbatches, first and last "
            "(--microbatches)."
        )
    print(f"Written to {output} ({format_bytes(len(text.encode()))}). Open it at https://ui.perfetto.dev")
