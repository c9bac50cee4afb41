"""``steelyard explore``: a page of solved plans with controls for memory, devices, length or batch, and software."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from steelyard.cli import options
from steelyard.cli.frontier import parse_counts
from steelyard.cli.job_options import JobOptions
from steelyard.output import command, write_file
from steelyard.plan.choices import Exploration
from steelyard.planning.explore import LIMIT_S
from steelyard.planning.explore import explore as solved_plans
from steelyard.report.html import explore_page
from steelyard.units import format_bytes

Size = Literal["seq-len", "global-batch"]
_VARY = "Third slider: seq-len or global-batch."
_DEVICES = "Device counts, as in 8,16,32. Default: also half and twice as many."
_TIME_LIMIT = "CPU seconds for all searches; the page names what is not solved by then."


@options.prints(Exploration)
@options.with_levers
def explore(
    job: JobOptions,
    output: Annotated[Path, options.written("Write the page (.html) to this file.")],
    memory_margin: options.MemoryMargin = None,
    profile: options.ProfileOption = None,
    vary: Annotated[str, options.option("--vary", "NAME", _VARY, options.SEARCH)] = "seq-len",
    devices: Annotated[str | None, options.option("--devices", "LIST", _DEVICES, options.SEARCH)] = None,
    price: Annotated[float | None, options.price("Dollars per device-hour: adds the cost of tokens.")] = None,
    time_limit: Annotated[float, options.seconds("--time-limit", _TIME_LIMIT)] = LIMIT_S,
    as_json: options.AsJson = False,
) -> None:
    """Write one offline page that answers: the plan, memory, time and cost at every choice, and what to change next."""
    options.check_page(output)
    is_batch = options.check_choice("--vary", vary, Size) == "global-batch"
    counts = None if devices is None else parse_counts(devices)
    given = job.flags() | {"--profile": profile, "--memory-margin": memory_margin}
    for of_the_page in ("--cluster", "--memory", "--engine", "--global-batch" if is_batch else "--seq-len"):
        del given[of_the_page]
    words = [word for name, value in given.items() if value is not None for word in (name, value)]
    with options.progress("counting the model's layers", silent=as_json) as show:
        own = options.built_module(job.model)
        request = job.request(memory_margin=memory_margin, profile=profile, own=own)
        found = solved_plans(
            request,
            command("plan", job.model, *words),
            device_counts=counts,
            batches=is_batch,
            limit_s=time_limit,
            price_per_device_hour=price,
            progress=show,
        )
    text = explore_page(found)
    write_file(output, text, "--output")
    if as_json:
        options.print_json(found)
    else:
        size = format_bytes(len(text.encode()))
        print(f"{len(found.points)} of {found.num_places} choices solved, {len(found.plans)} plans")
        print(f"Written to {output} ({size}).")
    if not found.plans:
        raise typer.Exit(1)
