"""Options that commands share and options of ``steelyard plan``: names, help, completion and parsing.

Also progress on standard error, which ``--json`` silences, and printing of JSON.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from steelyard import limits
from steelyard.engines import ENGINES
from steelyard.errors import UserError, nearest
from steelyard.hardware import devices, links
from steelyard.installed import require_training
from steelyard.model.own import BUILDER
from steelyard.model.read import hub_names, model_names
from steelyard.output import check_file, check_folder
from steelyard.precision import Precision
from steelyard.schedules import SCHEDULES
from steelyard.units import MOST_COUNT, parse_count

MODEL, CLUSTER, BUDGET, ENGINE = "Model", "Cluster", "Budget", "Engine and precision"
PARALLELISM, LEVER, SEARCH, OUTPUT = "Parallelism: fix it, or leave it to the search", "Levers", "Search", "Output"
GROUPS = (None, MODEL, CLUSTER, BUDGET, ENGINE, PARALLELISM, LEVER, SEARCH, OUTPUT)
"""Groups of options in the order of the help; None for common options, which come first."""


def complete_model(incomplete: str) -> list[str]:
    """Return the packaged models that begin with this text, by name or Hugging Face ID."""
    return [name for name in (*model_names(), *hub_names()) if name.startswith(incomplete)]


def complete_network(incomplete: str) -> list[str]:
    """Return the links that begin with this text, after the number of ports if one was typed."""
    ports, times, name = incomplete.rpartition("x") if incomplete[:1].isdigit() else ("", "", incomplete)
    return [ports + times + link.name for link in links() if link.name.startswith(name)]


def complete_one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion function for ``names``."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def complete_cluster(incomplete: str) -> list[str]:
    """Return completions of a cluster's device, ``8x8xh`` → ``8x8xh100-80gb``; nothing for another form."""
    parts = incomplete.split("x", 2)
    if len(parts) < 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return []
    start = f"{parts[0]}x{parts[1]}x"
    return [start + device.name for device in devices() if device.name.startswith(parts[2])]


LINE_EVERY_S = 10.0
"""Seconds between two lines of progress where standard error is no terminal."""
_COUNTED = re.compile(r"(\d+) of (up to )?(\d+)")


@contextmanager
def progress(first: str, *, silent: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current work on standard error, with the time that is left if it is counted.

    A terminal shows it at once; elsewhere a line is printed every `LINE_EVERY_S`. Shows nothing if ``silent``.
    """
    console, estimate = Console(stderr=True), _Estimate()
    if silent:
        yield lambda _: None
    elif console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(first)
            yield lambda text: bar.update(task, description=estimate.added_to(text))
    else:
        now, is_done = [first], threading.Event()

        def print_lines() -> None:
            while not is_done.wait(LINE_EVERY_S):
                print(f"... {now[0]}", file=sys.stderr)

        printing = threading.Thread(target=print_lines, daemon=True)
        printing.start()
        try:
            yield lambda text: now.__setitem__(0, estimate.added_to(text))
        finally:
            is_done.set()
            printing.join()


class _Estimate:
    """Seconds left of work whose texts begin with ``3 of 17``, as long as each part takes what those before it did."""

    began_s = 0.0
    total = ""

    def added_to(self, text: str) -> str:
        """Return the text with the time that is left, or the text itself if it is not counted."""
        counted = _COUNTED.match(text)
        if counted is None:
            return text
        number, most, total = int(counted[1]), counted[2] or "", counted[3]
        if number == 1 or total != self.total:
            self.began_s, self.total = time.monotonic(), total
            return text
        left_s = (time.monotonic() - self.began_s) / (number - 1) * (int(total) - number + 1)
        return f"{text} ({'at most ' if most else ''}about {max(left_s, 1):.0f} s left)"


Chosen = TypeVar("Chosen")


def whole(option: str, most: int, *, kilo: int = 1000, example: str = "8", least: int = 1) -> Callable[[Any], int]:
    """Return the parser of an option that is a whole number, as in ``64`` or ``4k``."""

    def parse(text: Any) -> int:
        return parse_count(str(text), field=option, least=least, most=most, kilo=kilo, example=example)

    return parse


def whole_or_max(option: str, most: int, example: str) -> Callable[[Any], int | Literal["max"]]:
    """Return the parser of an option that is a whole number, ``4k`` being 4096, or ``max``."""
    number = whole(option, most, kilo=1024, example=f"{example}, or {option} max")
    return lambda text: "max" if text == "max" else number(text)


def real(option: str, least: float, most: float, example: str) -> Callable[[Any], float]:
    """Return the parser of an option that is a number from ``least`` to ``most``."""

    def parse(text: Any) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise UserError(
                field=option,
                found=repr(text),
                expected=f"a number from {least:g} to {most:g}",
                hint=f"write for example {option} {example}",
            )
        return value

    return parse


def parse_image_size(text: str) -> tuple[int, int]:
    """Return height and width in ``448`` or ``448x672``; raises `UserError` for anything else."""
    sides = text.split("x")
    if len(sides) > 2 or any(not is_number(side, limits.MOST_PIXELS) for side in sides):
        raise UserError(
            field="--image-size",
            found=repr(text),
            expected=f"pixels per side, or HEIGHTxWIDTH, at most {limits.MOST_PIXELS}",
            hint="write for example --image-size 448",
        )
    return int(sides[0]), int(sides[-1])


def is_number(text: str, most: int) -> bool:
    """Return whether a text is a whole number from 1 to ``most``."""
    return text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= most


def check_choices(option: str, text: str, known: Mapping[str, Chosen]) -> tuple[Chosen, ...]:
    """Return the values of the names in ``none,full``, each once; raises `UserError` for an unknown name."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(
                field=option,
                found=repr(name),
                expected="one or more of " + ", ".join(known) + ", separated by commas",
                hint=nearest(name, known),
            )
    return tuple(known[name] for name in names)


def check_choice(option: str, text: str, choices: Any, *, hint: str = "") -> Any:
    """Return ``text`` if it is one of the literal ``choices``; raises `UserError` otherwise."""
    known = get_args(choices)
    if text not in known:
        expected = "one of " + ", ".join(known)
        raise UserError(field=option, found=repr(text), expected=expected, hint=hint or nearest(text, known))
    return text


def parse_precision(text: str, choices: Any = Precision) -> Any:
    """Return the precision of ``--precision``; raises `UserError` for another, with a hint for known formats."""
    nvfp4 = "plan with --precision nvfp4, for an engine that has it (--engine megatron)"
    return check_choice("--precision", text, choices, hint=nvfp4 if text.lower() == "fp4" else "")


Model = Annotated[
    str,
    typer.Argument(
        help="Packaged model (`steelyard models`) or its Hugging Face ID, path of a config.json, or FILE.py:FUNCTION "
        "that builds your own module (the file is run).",
        autocompletion=complete_model,
    ),
]
PlanFile = Annotated[Path, typer.Argument(help="Plan file, as `steelyard plan -o` writes it.", metavar="PLAN")]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="NODESxDEVICESxDEVICE, as in 1x8xa100-80gb, or a YAML file. Join groups of different devices by +.",
        metavar="CLUSTER",
        autocompletion=complete_cluster,
    ),
]
OtherCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Use another cluster than the plan's.",
        metavar="CLUSTER",
        autocompletion=complete_cluster,
        rich_help_panel=CLUSTER,
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        help="Link between nodes: ethernet-25 (one port per node), 8xinfiniband-ndr (eight). See `steelyard links`.",
        metavar="LINK",
        autocompletion=complete_network,
        rich_help_panel=CLUSTER,
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        help="Tokens per sample, as in 4096 or 4k. Default: length of an image or of your own module's sample.",
        metavar="TOKENS",
        parser=whole("--seq-len", limits.MOST_TOKENS, kilo=1024, example="4096"),
    ),
]
FileSeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        help="For --from: tokens per sample, if not in the file.",
        metavar="TOKENS",
        parser=whole("--seq-len", limits.MOST_TOKENS, kilo=1024, example="4096"),
    ),
]
_SAMPLES = whole("--global-batch", limits.MOST_SAMPLES, kilo=1024, example="64")
GlobalBatch = Annotated[
    int,
    typer.Option("--global-batch", help="Samples per step over all devices.", metavar="SAMPLES", parser=_SAMPLES),
]
FileBatch = Annotated[
    int | None,
    typer.Option("--global-batch", help="For --from: batch, if not in the file.", metavar="SAMPLES", parser=_SAMPLES),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="bf16, fp16 (with loss scaling), fp32; for engines that have them fp8, fp8-block, mxfp8, nvfp4. Master "
        "weights and reductions are fp32.",
        metavar="NAME",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Software that runs the plan: native (steelyard on stock PyTorch, default), megatron, torchtitan, … Its "
        "options follow its name: megatron+deepep.",
        autocompletion=complete_one_of(ENGINES),
        metavar="NAME",
    ),
]
Simplify = Annotated[
    float,
    typer.Option(
        "--simplify",
        help="Accept a plan this fraction slower than the fastest if it has fewer groups of layers, or stages no "
        "deeper than usual for models of its size (deeper ones must gain 7 %). 0: the fastest.",
        metavar="FRACTION",
        parser=real("--simplify", 0, 0.5, "0.01"),
        rich_help_panel=SEARCH,
    ),
]
AllEngines = Annotated[
    bool,
    typer.Option("--engines", help="Plan for every other engine and compare step times.", rich_help_panel=ENGINE),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", help="Memory budget per device, as in 80GB or 20GiB. Default: all memory.", metavar="SIZE"
    ),
]
MemoryMargin = Annotated[
    float | None,
    typer.Option(
        "--memory-margin",
        help="Fraction of device memory to keep free. Default: 0.05, 0 with --memory. Ignored if nothing fits "
        "otherwise.",
        metavar="FRACTION",
        parser=real("--memory-margin", 0, 0.9, "0.05"),
        rich_help_panel=BUDGET,
    ),
]
Imbalance = Annotated[
    float,
    typer.Option(
        help="Load of the busiest expert rank relative to the mean (assumed; training reports the measured value).",
        metavar="RATIO",
        rich_help_panel=MODEL,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Costs measured by `steelyard profile`; for groups of devices NAME=FILE,… Default: traced operations at "
        "catalogue rates.",
        metavar="FILE",
        rich_help_panel=CLUSTER,
    ),
]
MaxTp = Annotated[
    int | None,
    typer.Option(
        "--max-tp",
        help="Largest tensor-parallel degree to search.",
        metavar="N",
        parser=whole("--max-tp", limits.MOST_DEVICES),
        rich_help_panel=SEARCH,
    ),
]

TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        help="Seconds after which the search returns the best plan so far.",
        metavar="SECONDS",
        parser=real("--time-limit", 0, limits.MOST_SECONDS, "60"),
        rich_help_panel=SEARCH,
    ),
]
MOST_POINTS = 1000
"""Maximum number of budgets of a frontier."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also show all tables: stages, cost by term, plans that lost.")
]


def built_module(model: str) -> Any:
    """Return the user's own module for FILE.py:FUNCTION, split and verified; None for other models.

    The file is run; a line on standard error says so.
    """
    if BUILDER.fullmatch(model) is None:
        return None
    require_training("your own module is run to find its layers")
    from steelyard.modules.own_proof import build, own_model

    print(f"running {model.rpartition(':')[0]} to build the module", file=sys.stderr)
    return own_model(build(model))


def tried(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Option callback: raise `UserError` before any work if the file cannot be written."""
    if path is not None and not context.resilient_parsing:
        check_file(path, parameter.opts[0])
    return path


def is_file_name(path: Path) -> bool:
    """Return whether a path names a file rather than a folder: a suffix of letters, and no folder of that name.

    ``titan-0.3`` and ``llama3.1-8b`` are names of folders.
    """
    return path.suffix[1:].isalpha() and not path.is_dir()


def tried_file_or_folder(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Option callback: as `tried`, for a file if the path has a suffix and for a folder otherwise."""
    if path is not None and is_file_name(path):
        return tried(context, parameter, path)
    if path is not None and not context.resilient_parsing:
        check_folder(path, parameter.opts[0])
    return path


def print_json(value: Any) -> None:
    """Print a value as indented JSON in characters that standard output can show.

    Values of our file formats have the keys of the file; absent ones are left out.
    """

    def content(part: BaseModel) -> Any:
        return part.model_dump(mode="json", exclude_none=True)

    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode, default=content))


def check_page(path: Path) -> None:
    """Raise `UserError` unless ``--output`` names an HTML page."""
    if path.suffix.lower() != ".html":
        raise UserError(
            field="--output",
            found=repr(str(path)),
            expected="a path that ends in .html",
            hint=f"write for example -o {path.with_suffix('.html').name}",
        )


Batch = Annotated[
    Any,
    typer.Option(
        "--global-batch",
        help="Samples per step over all devices, or max: doubled while throughput grows and it fits. Default: one per "
        "device.",
        metavar="SAMPLES|max",
        parser=whole_or_max("--global-batch", limits.MOST_SAMPLES, "64"),
    ),
]
Length = Annotated[
    Any,
    typer.Option(
        "--seq-len",
        help="Tokens per sample, as in 4096 or 4k, or max: the longest that fits. Default: length of an image or of "
        "your own module's sample.",
        metavar="TOKENS|max",
        parser=whole_or_max("--seq-len", limits.MOST_TOKENS, "4096"),
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", callback=tried, help="Write the plan to this file, as in plan.json.", metavar="FILE"
    ),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        "--image-size",
        help="Pixels per side of all images, or HEIGHTxWIDTH, if the model reads any size. Default: from its config.",
        metavar="PIXELS",
        rich_help_panel=MODEL,
    ),
]
CalibrateBy = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibrate",
        help="Measured runs whose median ratio scales all predicted times: records of `train` or `measure`, or files "
        "with plan and step_time_s. Several may follow one --calibrate.",
        metavar="RUN...",
        rich_help_panel=CLUSTER,
    ),
]
Aim = Annotated[
    str,
    typer.Option(
        "--objective",
        help="time: the fastest plan; devices: the fewest devices, then the fastest.",
        metavar="NAME",
        rich_help_panel=BUDGET,
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(
        "--pp",
        "--stages",
        help="Number of pipeline stages.",
        metavar="N",
        parser=whole("--stages", limits.MOST_LAYERS),
        rich_help_panel=PARALLELISM,
    ),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        "--micro-batch",
        help="Samples of a microbatch per rank, in all blocks.",
        metavar="N",
        parser=whole("--micro-batch", limits.MOST_SAMPLES),
        rich_help_panel=PARALLELISM,
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        help="Number of microbatches per step (gradient accumulation steps).",
        metavar="N",
        parser=whole("--microbatches", limits.MOST_MICROBATCHES),
        rich_help_panel=PARALLELISM,
    ),
]
Remats = Annotated[
    str | None,
    typer.Option(
        "--remat",
        help="Choices of activation checkpointing, as in none,selective,full.",
        metavar="NAMES",
        rich_help_panel=PARALLELISM,
    ),
]
Schedules = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help=f"Pipeline schedules to search, as in {', '.join(SCHEDULES)}.",
        metavar="NAMES",
        rich_help_panel=PARALLELISM,
    ),
]
MaxStages = Annotated[
    int | None,
    typer.Option(
        "--max-stages",
        help="Maximum number of pipeline stages to search.",
        metavar="N",
        parser=whole("--max-stages", limits.MOST_DEVICES),
        rich_help_panel=SEARCH,
    ),
]
ZeroStages = Annotated[
    str | None,
    typer.Option(
        "--zero", help="ZeRO stages that fsdp may use, as in 1,2,3.", metavar="STAGES", rich_help_panel=PARALLELISM
    ),
]
WhichSpace = Annotated[
    str,
    typer.Option(
        "--space",
        help="full: all parallelism dimensions; paper: those of the Galvatron paper, for comparison.",
        metavar="NAME",
        rich_help_panel=SEARCH,
    ),
]
Uniform = Annotated[
    bool,
    typer.Option(
        "--uniform", help="One strategy for all layers, one remat choice for all blocks.", rich_help_panel=PARALLELISM
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        help="Fix the strategy of some layers, as in 'layers 0-3: tp=4, remat=full'. Repeatable.",
        metavar="TEXT",
        rich_help_panel=PARALLELISM,
    ),
]
Freezes = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        help="Module or parameter that is not trained, by its path, as in model.vision_tower; * matches any text. "
        "Repeatable.",
        metavar="PATH",
        rich_help_panel=MODEL,
    ),
]
Cuts = Annotated[
    str,
    typer.Option(
        "--partition",
        help="How layers are cut into stages: exact (searched), or for comparison bmw, memory-balanced, even.",
        metavar="NAME",
        rich_help_panel=SEARCH,
    ),
]
Top = Annotated[
    int,
    typer.Option(
        "--top",
        help="Number of plans that lost to list with -v, and to keep in the file for `measure`.",
        metavar="N",
        parser=whole("--top", 1000, least=0),
        rich_help_panel=OUTPUT,
    ),
]
Fallbacks = Annotated[
    int,
    typer.Option(
        "--fallbacks",
        help="Number of plans with less memory to keep in the file, for `train` to use if memory runs out.",
        metavar="N",
        parser=whole("--fallbacks", 100, least=0),
        rich_help_panel=OUTPUT,
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        help="Tokens of the whole training, as in 15T: adds days and device-hours.",
        metavar="TOKENS",
        parser=whole("--tokens", MOST_COUNT, example="15T"),
        rich_help_panel=BUDGET,
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        help="Dollars per device-hour: adds the cost of --tokens.",
        metavar="DOLLARS",
        parser=real("--price", 0, limits.MOST_PRICE, "2.5"),
        rich_help_panel=BUDGET,
    ),
]
SaveProblem = Annotated[
    Path | None,
    typer.Option(
        "--save-problem",
        callback=tried,
        help="Write the cost tables to this file, for `steelyard solve`.",
        metavar="FILE",
        rich_help_panel=OUTPUT,
    ),
]
