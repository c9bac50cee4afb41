"""``steelyard profile``: measures layers and collectives on the processes of this host."""

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import AsJson, Model, PrecisionOption, SeqLen, print_json, write_page
from steelyard.cli.plan import check_precision
from steelyard.errors import InvalidProfileError, UserError
from steelyard.limits import MOST_DEVICES, MOST_SAMPLES, MOST_SECONDS
from steelyard.model.read import load_model
from steelyard.plan.file import dump_json, parse_file
from steelyard.plan.strategy import divisors
from steelyard.profiles.merge import merge_profiles
from steelyard.profiles.profile import Profile
from steelyard.report.profile_table import profile_view


def profile(
    model: Model,
    seq_len: SeqLen,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")],
    processes: Annotated[
        int,
        typer.Option(
            "--processes", "-n", help="Processes on this host: one per GPU, or CPU processes.", min=1, max=MOST_DEVICES
        ),
    ],
    samples: Annotated[
        str, typer.Option("--samples", help="Samples of a microbatch on one rank to measure, as in 1,2,4.")
    ] = "1,2,4",
    precision: PrecisionOption = "bf16",
    budget_s: Annotated[
        float,
        typer.Option("--budget", help="About how many seconds to measure.", min=1, max=MOST_SECONDS),
    ] = 60.0,
    merge: Annotated[
        Path | None, typer.Option("--merge", help="A profile of this model and machine to add the new one to.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what layers and collectives take on this machine."""
    from rich.console import Console

    from steelyard.profiler.launch import launch_profiler
    from steelyard.tracer.cache import cached_trace

    chain = load_model(model)
    earlier = None if merge is None else parse_file(merge, Profile, InvalidProfileError, what="profile")
    degrees = divisors(processes)
    traced = cached_trace(chain, seq_len=seq_len, precision=check_precision(precision), degrees=degrees)
    measured = launch_profiler(
        chain, traced, num_processes=processes, samples=parse_samples(samples), budget_s=budget_s
    )
    if earlier is not None:
        measured = merge_profiles(earlier, measured)
    write_page(output, dump_json(measured) + "\n")
    if as_json:
        print_json(measured.model_dump(mode="json", exclude_none=True))
        return
    Console().print(profile_view(measured))
    print(f"written to {output}; plan with: steelyard plan {model} --profile {output} --cluster 1x{processes}xcpu …")


def parse_samples(text: str) -> tuple[int, ...]:
    """The sorted counts in ``1,2,4``; raises `UserError` for anything else."""
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1 or counts[-1] > MOST_SAMPLES:
        raise UserError(
            field="--samples", found=repr(text), expected=f"whole numbers of 1 to {MOST_SAMPLES}", hint="write 1,2,4"
        )
    return counts
