"""Options of ``steelyard plan`` alone, and the decisions that they add up to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import most_tp, tried
from steelyard.cli.words import check_choice, check_choices
from steelyard.errors import UserError
from steelyard.limits import MOST_LAYERS, MOST_MICROBATCHES, MOST_PRICE
from steelyard.plan.decisions import Decisions, Partition, Space
from steelyard.plan.strategy import Remat
from steelyard.schedules import SCHEDULES

Batch = Annotated[
    str | None,
    typer.Option(
        "--global-batch",
        help="Samples of a step over all devices; max: doubled while throughput grows and it fits; default: one "
        "for each device.",
        metavar="INTEGER|max",
    ),
]
Length = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        help="Tokens of a sample; max: the most that fit; default: what an image or your own module's sample has.",
        metavar="INTEGER|max",
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", callback=tried, help="Where to write the plan.")]
ImageSize = Annotated[
    str | None,
    typer.Option(
        "--image-size",
        help="Pixels of a side of all images, or HEIGHTxWIDTH, of a model that reads them in any size (qwen2_vl); "
        "default: vision_config.image_size of its config.",
    ),
]
CalibrateBy = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibrate",
        help="Measured runs whose median scales all predicted times: records of `train` or `measure`, or files "
        "that name plan and step_time_s. Several after one --calibrate, behind MODEL.",
        metavar="RUN...",
    ),
]
Aim = Annotated[
    str, typer.Option("--objective", help="time: the fastest plan; devices: the fewest devices, then the fastest.")
]
Stages = Annotated[
    int | None, typer.Option("--stages", help="Fix the number of pipeline stages.", min=1, max=MOST_LAYERS)
]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", help="Fix the number of microbatches.", min=1, max=MOST_MICROBATCHES)
]
Remats = Annotated[
    str | None, typer.Option("--remat", help="Choices of activation checkpointing, as in none,selective,full.")
]
Schedules = Annotated[
    str | None, typer.Option("--schedule", help=f"Pipeline schedules to search, as in {','.join(SCHEDULES)}.")
]
ZeroStages = Annotated[str | None, typer.Option("--zero", help="ZeRO stages that fsdp may use, as in 2,3.")]
WhichSpace = Annotated[
    str, typer.Option("--space", help="full: all parallelism dimensions; paper: those of Galvatron, never mixed.")
]
Uniform = Annotated[
    bool,
    typer.Option("--uniform", help="One strategy everywhere, one remat choice for all blocks."),
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", help="Decide beforehand, as in 'layers 0-3: tp=4, remat=full'; may be repeated."),
]
Freezes = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        help="What is not trained: a module or parameter by its path in the model, as in model.vision_tower, "
        "with * as in a shell; may be repeated.",
    ),
]
Cuts = Annotated[
    str, typer.Option("--partition", help="How stages are cut: exact, or for comparison bmw, memory-balanced, even.")
]
Top = Annotated[
    int,
    typer.Option(
        "--top",
        help="How many of the plans that lost to show; the best so many are kept for `measure`.",
        min=0,
        max=1000,
    ),
]
Fallbacks = Annotated[
    int,
    typer.Option(
        "--fallbacks",
        help="Plans of less memory to keep in the file, for `train` to go on with when memory runs out.",
        min=0,
        max=100,
    ),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="Tokens of the whole training, as in 15T: how many days it takes.")
]
Price = Annotated[
    float | None,
    typer.Option("--price", help="Dollars for a device-hour: what the --tokens cost.", min=0, max=MOST_PRICE),
]
SaveProblem = Annotated[
    Path | None, typer.Option("--save-problem", callback=tried, help="Write the cost tables for `steelyard solve`.")
]


def decisions_of(
    *,
    max_tp: int | None,
    stages: int | None,
    microbatches: int | None,
    remat: str | None,
    schedule: str | None,
    zero: str | None,
    space: str,
    uniform: bool,
    pins: tuple[str, ...],
    partition: str,
) -> Decisions:
    """Return what these options decide; raises `UserError` for an unknown choice."""
    remats = {each.value: each for each in Remat}
    schedules = {name: name for name in SCHEDULES}
    chosen_space = check_choice("--space", space, Space)
    chosen_partition = check_choice("--partition", partition, Partition)
    return Decisions(
        pins=pins,
        num_stages=stages,
        num_microbatches=microbatches,
        schedules=None if schedule is None else check_choices("--schedule", schedule, schedules),
        remats=None if remat is None else check_choices("--remat", remat, remats),
        variants=None if zero is None else {"zero": check_choices("--zero", zero, {"2": 2, "3": 3})},
        max_degrees=most_tp(max_tp),
        uniform=True if uniform else None,
        space=None if chosen_space == "full" else chosen_space,
        partition=None if chosen_partition == "exact" else chosen_partition,
    )


def runs_of(named: Sequence[Path] | None, words: Sequence[str]) -> tuple[Path, ...]:
    """Return the runs of ``--calibrate a b c``; raises `UserError` for words that belong to nothing."""
    if words and not named:
        raise UserError(
            field="plan",
            found=f"{' '.join(words)!r} behind the model",
            expected="one model, and options",
            hint="runs stand after --calibrate, as in --calibrate first.json second.json",
        )
    return (*(named or ()), *map(Path, words))
