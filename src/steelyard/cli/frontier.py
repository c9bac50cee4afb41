"""``steelyard frontier``: time against memory, and time and money against the number of devices."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from steelyard.cli.options import (
    MOST_POINTS,
    AsJson,
    ClusterOption,
    GlobalBatch,
    MaxTp,
    Memory,
    MemoryMargin,
    Model,
    NetworkOption,
    PrecisionOption,
    ProfileOption,
    SeqLen,
    TimeLimit,
    check_page,
    cluster_with,
    most_tp,
    print_json,
    tried,
)
from steelyard.cli.plan import check_precision
from steelyard.cli.progress import progress
from steelyard.errors import UserError
from steelyard.limits import MOST_DEVICES
from steelyard.output import write_file
from steelyard.planning import PlanOptions, find_trade_offs, make_job
from steelyard.report.frontier_table import frontier_view
from steelyard.report.html import frontier_page
from steelyard.search import TIME_LIMIT_S

POINTS = 16
MOST_COUNTS = 32


def frontier(
    model: Model,
    cluster: ClusterOption,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    network: NetworkOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=tried, help="Write the figures: a path that ends in .html."),
    ] = None,
    memory: Memory = None,
    memory_margin: MemoryMargin = None,
    precision: PrecisionOption = "bf16",
    profile: ProfileOption = None,
    points: Annotated[
        int,
        typer.Option("--points", help="Memory budgets to search: more give a finer frontier.", min=3, max=MOST_POINTS),
    ] = POINTS,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="Device counts to compare, as in 8,16,32; default: a few around the cluster's."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", help="Price of a device-hour, to show the cost of tokens.", min=0, max=1e9),
    ] = None,
    max_tp: MaxTp = None,
    time_limit: TimeLimit = TIME_LIMIT_S,
    as_json: AsJson = False,
) -> None:
    """Show every time/memory trade-off, and what more or fewer devices would do."""
    if output is not None:
        check_page(output)
    counts = None if devices is None else parse_counts(devices)
    with progress("counting the model's layers", silent=as_json) as show:
        job = make_job(
            model,
            cluster_with(cluster, network),
            global_batch=global_batch,
            seq_len=seq_len,
            precision=check_precision(precision),
            memory=memory,
            memory_margin=memory_margin,
            profile=profile,
        )
        found = find_trade_offs(
            job,
            PlanOptions(max_degrees=most_tp(max_tp), time_limit_s=time_limit),
            max_searches=points,
            device_counts=counts,
            price_per_device_hour=price,
            progress=show,
        )
    if output is not None:
        write_file(output, frontier_page(found), "--output")
    if as_json:
        print_json(found.model_dump(mode="json", exclude_none=True))
    else:
        console = Console()
        console.print(frontier_view(found))
        if output is not None:
            console.print(f"figures written to {output}")
    if not found.points and all(point.step_time_s is None for point in found.devices):
        raise typer.Exit(1)


def parse_counts(text: str) -> tuple[int, ...]:
    """The device counts in ``8,16,32``; raises `UserError` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_COUNTS or not all(_is_count(part) for part in parts):
        raise UserError(
            field="--devices",
            found=repr(text),
            expected=f"whole numbers of 1 to {MOST_DEVICES}, at most {MOST_COUNTS} of them",
            hint="write for example --devices 8,16,32",
        )
    return tuple(int(part) for part in parts)


def _is_count(text: str) -> bool:
    return (
        text.isascii() and text.isdigit() and len(text) < len(str(MOST_DEVICES)) + 1 and 0 < int(text) <= MOST_DEVICES
    )
