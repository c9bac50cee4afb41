"""``steelyard explore``: a page of solved plans with controls for memory, devices, length or batch, and software."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from steelyard.cli import options
from steelyard.cli.frontier import parse_counts
from steelyard.output import command, write_file
from steelyard.plan.choices import Exploration
from steelyard.planning.explore import LIMIT_S
from steelyard.planning.explore import explore as solved_plans
from steelyard.planning.request import make_request
from steelyard.report.html import explore_page
from steelyard.units import format_bytes

Size = Literal["seq-len", "global-batch"]
_VARY = "Third slider: seq-len or global-batch."
_DEVICES = "Device counts, as in 8,16,32. Default: also half and twice as many."
_TIME_LIMIT = "CPU seconds for all searches; the page names what is not solved by then."


@options.prints(Exploration)
@options.with_levers
def explore(
    model: options.Model,
    cluster: options.ClusterOption,
    global_batch: options.GlobalBatch,
    output: Annotated[Path, options.written("Write the page (.html) to this file.")],
    seq_len: options.SeqLen = None,
    image_size: options.ImageSize = None,
    network: options.NetworkOption = None,
    memory: options.Memory = None,
    memory_margin: options.MemoryMargin = None,
    precision: options.PrecisionOption = "bf16",
    engine: options.EngineOption = None,
    profile: options.ProfileOption = None,
    vary: Annotated[str, options.option("--vary", "NAME", _VARY, options.SEARCH)] = "seq-len",
    devices: Annotated[str | None, options.option("--devices", "LIST", _DEVICES, options.SEARCH)] = None,
    price: Annotated[float | None, options.price("Dollars per device-hour: adds the cost of tokens.")] = None,
    time_limit: Annotated[float, options.seconds("--time-limit", _TIME_LIMIT)] = LIMIT_S,
    as_json: options.AsJson = False,
    *,
    levers: Mapping[str, str | None],
) -> None:
    """Write one offline page that answers: the plan, memory, time and cost at every choice, and what to change next."""
    options.check_page(output)
    is_batch = options.check_choice("--vary", vary, Size) == "global-batch"
    counts = None if devices is None else parse_counts(devices)
    given: dict[str, object] = {
        "--network": network,
        "--precision": None if precision == "bf16" else precision,
        "--profile": profile,
        "--memory-margin": memory_margin,
        "--global-batch": None if is_batch else global_batch,
        "--seq-len": seq_len if is_batch else None,
        "--image-size": image_size,
        **{f"--{name}": text for name, text in levers.items()},
    }
    words = [word for name, value in given.items() if value is not None for word in (name, value)]
    with options.progress("counting the model's layers", silent=as_json) as show:
        request = make_request(
            model,
            cluster,
            global_batch=global_batch,
            seq_len=seq_len,
            network=network,
            image_size=options.parse_image_size(image_size),
            memory=memory,
            memory_margin=memory_margin,
            profile=profile,
            own=options.built_module(model),
            precision=options.parse_precision(precision),
            engine=engine,
            levers=levers,
        )
        found = solved_plans(
            request,
            command("plan", model, *words),
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
