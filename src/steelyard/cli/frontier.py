"""``steelyard frontier``: time against memory, and time and cost against the number of devices."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import options
from steelyard.cli.job_options import JobOptions
from steelyard.cost.job import ASSUMED_IMBALANCE
from steelyard.errors import UserError
from steelyard.limits import MOST_DEVICES, MOST_PRICE
from steelyard.output import write_file
from steelyard.plan.choices import TradeOffs
from steelyard.plan.decisions import Decisions
from steelyard.planning.frontier import find_offers, find_trade_offs
from steelyard.planning.job import job_of
from steelyard.planning.request import PlanRequest
from steelyard.report.frontier_table import frontier_view
from steelyard.report.html import frontier_page
from steelyard.report.tables import console
from steelyard.search import TIME_LIMIT_S

POINTS = 16
MOST_COUNTS = 32
_DEVICES = "Device counts to compare, as in 8,16,32. Default: some around the cluster's."
_PRICE = (
    "Price per device-hour: adds the cost of tokens. By device type, as in h100-80gb=2.5,a100-40gb=1.1: "
    "compares all parts of the cluster."
)


@options.prints(TradeOffs)
@options.with_levers
def frontier(
    job: JobOptions,
    output: Annotated[Path | None, options.written("Write the figures as an HTML page.")] = None,
    memory_margin: options.MemoryMargin = None,
    profile: options.ProfileOption = None,
    imbalance: options.Imbalance = ASSUMED_IMBALANCE,
    points: Annotated[int, options.points("Number of memory budgets to search.", "16", options.SEARCH)] = POINTS,
    devices: Annotated[str | None, options.option("--devices", "COUNTS", _DEVICES, options.CLUSTER)] = None,
    price: Annotated[str | None, options.option("--price", "PRICE", _PRICE, options.BUDGET)] = None,
    max_tp: options.MaxTp = None,
    time_limit: options.TimeLimit = TIME_LIMIT_S,
    as_json: options.AsJson = False,
) -> None:
    """Show time against memory and against the number of devices; with --price by device type, what to rent."""
    if output is not None:
        options.check_page(output)
    counts = None if devices is None else parse_counts(devices)
    prices = parse_prices(price)
    with options.progress("counting the model's layers", silent=as_json) as show:
        request = job.request(
            profile=profile,
            own=options.built_module(job.model),
            memory_margin=memory_margin,
            imbalance=imbalance,
            decisions=Decisions(max_degrees=None if max_tp is None else {"tp": max_tp}),
            time_limit_s=time_limit,
        )
        if isinstance(prices, dict) or request.is_mixed:
            if option := "--devices" if devices is not None else "--profile" if profile is not None else "":
                raise UserError(
                    field=option,
                    found="set with prices by device type, or with several device groups",
                    expected="neither: parts of the cluster are planned at catalogue rates",
                    hint=f"leave {option} out",
                )
            found = _offers(request, prices, show)
        else:
            found = find_trade_offs(
                request, max_searches=points, device_counts=counts, price_per_device_hour=prices, progress=show
            )
    if output is not None:
        write_file(output, frontier_page(found), "--output")
    if as_json:
        options.print_json(found)
    else:
        console().print(frontier_view(found))
        if output is not None:
            print(f"Figures written to {output}.")
    if not found.points and all(point.step_time_s is None for point in (*found.devices, *found.offers)):
        raise typer.Exit(1)


def _offers(request: PlanRequest, prices: Mapping[str, float] | float | None, show: Callable[[str], None]) -> TradeOffs:
    """Return step times and costs on parts of the cluster."""
    if isinstance(prices, float):
        raise UserError(
            field="--price",
            found=f"{prices:g} for all devices of {request.cluster.name}",
            expected="a price per device type, to compare device groups",
            hint="write for example --price h100-80gb=2.5,a100-40gb=1.1",
        )
    whole = job_of(request)
    return TradeOffs(
        model=whole.chain.name,
        cluster=request.cluster.name,
        seq_len=whole.seq_len,
        global_batch=whole.global_batch,
        precision=whole.precision,
        budget_bytes=whole.budget_bytes,
        offers=find_offers(request, prices=prices or {}, progress=show),
    )


def parse_prices(text: str | None) -> dict[str, float] | float | None:
    """Return the price in ``2.5``, or those in ``h100-80gb=2.5,a100-40gb=1.1`` by name; raises `UserError` else."""
    if text is None:
        return None
    parse = options.real("--price", 0, MOST_PRICE, "2.5, or --price h100-80gb=2.5,a100-40gb=1.1")
    if "=" not in text:
        return parse(text)
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name.strip(): parse(value) for name, _, value in pairs}
    if len(found) < len(pairs):
        raise UserError(
            field="--price", found=repr(text), expected="each device type once", hint="give one price per type"
        )
    return found


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the device counts in ``8,16,32``; raises `UserError` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_COUNTS or not all(options.is_number(part, MOST_DEVICES) for part in parts):
        raise UserError(
            field="--devices",
            found=repr(text),
            expected=f"at most {MOST_COUNTS} whole numbers from 1 to {MOST_DEVICES}, separated by commas",
            hint="write for example --devices 8,16,32",
        )
    return tuple(int(part) for part in parts)
