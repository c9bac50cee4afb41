"""Options that commands share and options of ``steelyard plan``: names, help, completion and parsing.

Also options from registries, one for each lever and one for the degree of each parallelism dimension, progress on
standard error, which ``--json`` silences, and printing of JSON.
"""

import inspect
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from steelyard import limits
from steelyard.engines import ENGINES
from steelyard.errors import UserError, nearest
from steelyard.hardware import devices, links
from steelyard.installed import require_training
from steelyard.levers import LEVERS
from steelyard.limits import MOST_DEVICES
from steelyard.model.own import BUILDER
from steelyard.model.read import NO_IMAGES, hub_names, model_names
from steelyard.output import check_file, check_folder
from steelyard.plan.dimensions import DIMENSIONS
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
        now, is_done, began_s = [first], threading.Event(), time.monotonic()

        def print_lines() -> None:
            while not is_done.wait(LINE_EVERY_S):
                print(f"... {now[0]} ({time.monotonic() - began_s:.0f} s so far)", file=sys.stderr)

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
Command = TypeVar("Command", bound=Callable[..., None])


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


def parse_image_size(text: str | None) -> tuple[int, int] | Literal["none"] | None:
    """Return height and width in ``448`` or ``448x672``; ``none`` and None stay. Raises `UserError` for other text."""
    if text is None:
        return None
    if text == NO_IMAGES:
        return NO_IMAGES
    sides = text.split("x")
    if len(sides) > 2 or any(not is_number(side, limits.MOST_PIXELS) for side in sides):
        raise UserError(
            field="--image-size",
            found=repr(text),
            expected=f"pixels per side, or HEIGHTxWIDTH, at most {limits.MOST_PIXELS}, or none",
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
    """Return ``text`` if it is one of ``choices``, a literal type or a tuple; raises `UserError` otherwise."""
    known = get_args(choices) or choices
    if text not in known:
        expected = "one of " + ", ".join(known)
        raise UserError(field=option, found=repr(text), expected=expected, hint=hint or nearest(text, known))
    return text


def parse_precision(text: str, choices: Any = Precision) -> Any:
    """Return the precision of ``--precision``; raises `UserError` for another, with a hint for known formats."""
    nvfp4 = "plan with --precision nvfp4, for an engine that has it (--engine megatron)"
    return check_choice("--precision", text, choices, hint=nvfp4 if text.lower() == "fp4" else "")


def option(flags: str, metavar: str | None, text: str, group: str | None = None, **more: Any) -> Any:
    """Return an option of these ``flags``, separated by blanks, in a group of the help."""
    return typer.Option(*flags.split(), metavar=metavar, help=text, rich_help_panel=group, **more)


def count(flags: str, text: str, group: str | None = None, *, most: int, metavar: str = "N", **number: Any) -> Any:
    """Return an option that is a whole number up to ``most``; ``number`` goes to `whole`."""
    return option(flags, metavar, text, group, parser=whole(flags.split(maxsplit=1)[0], most, **number))


def seconds(flag: str, text: str, example: str = "60") -> Any:
    """Return an option of the search that is a number of seconds."""
    return option(flag, "SECONDS", text, SEARCH, parser=real(flag, 0, limits.MOST_SECONDS, example))


def points(text: str, example: str, group: str | None = None) -> Any:
    """Return the option for the number of memory budgets of a frontier."""
    return count("--points", text, group, most=1000, least=3, example=example)


def price(text: str) -> Any:
    """Return the option for the price of a device-hour in dollars."""
    return option("--price", "DOLLARS", text, BUDGET, parser=real("--price", 0, limits.MOST_PRICE, "2.5"))


Model = Annotated[
    str,
    typer.Argument(
        help="Packaged model (`steelyard models`) or its Hugging Face ID, path of a config.json, or FILE.py:FUNCTION "
        "that builds your own module (the file is run).",
        autocompletion=complete_model,
    ),
]
PlanFile = Annotated[Path, typer.Argument(help="Plan file, as `steelyard plan -o` writes it.", metavar="PLAN")]
_CLUSTER = "NODESxDEVICESxDEVICE, as in 1x8xa100-80gb, or a YAML file. Join groups of different devices by +."
ClusterOption = Annotated[str, option("--cluster", "CLUSTER", _CLUSTER, autocompletion=complete_cluster)]
_OTHER = "Use another cluster than the plan's."
OtherCluster = Annotated[str | None, option("--cluster", "CLUSTER", _OTHER, CLUSTER, autocompletion=complete_cluster)]
_NETWORK = "Link between nodes: ethernet-25 (one port per node), 8xinfiniband-ndr (eight). See `steelyard links`."
NetworkOption = Annotated[str | None, option("--network", "LINK", _NETWORK, CLUSTER, autocompletion=complete_network)]
_LENGTHS: Any = {"most": limits.MOST_TOKENS, "kilo": 1024, "example": "4096", "metavar": "TOKENS"}
_SEQ_LEN = "Tokens per sample, as in 4096 or 4k. Default: length of an image or of your own module's sample."
SeqLen = Annotated[int | None, count("--seq-len", _SEQ_LEN, **_LENGTHS)]
FileSeqLen = Annotated[int | None, count("--seq-len", "For --from: tokens per sample, if not in the file.", **_LENGTHS)]
_SAMPLES: Any = {"most": limits.MOST_SAMPLES, "kilo": 1024, "example": "64", "metavar": "SAMPLES"}
GlobalBatch = Annotated[int, count("--global-batch", "Samples per step over all devices.", **_SAMPLES)]
FileBatch = Annotated[int | None, count("--global-batch", "For --from: batch, if not in the file.", **_SAMPLES)]
FileMicroBatch = Annotated[
    int | None, count("--micro-batch", "For --from: samples of a microbatch per rank, if not in the file.", **_SAMPLES)
]
_PROFILED = "Measure the micro-batch sizes that plans of this batch can use."
ProfiledBatch = Annotated[int | None, count("--global-batch", _PROFILED, **_SAMPLES)]
_PRECISION = "bf16, fp16 (with loss scaling), fp32; for engines that have them fp8, fp8-block, mxfp8, nvfp4."
PrecisionOption = Annotated[str, option("--precision", "NAME", _PRECISION)]
_ENGINE = (
    "Software that runs the plan: native (steelyard, default), megatron, torchtitan, … with options: megatron+deepep."
)
EngineOption = Annotated[str | None, option("--engine", "NAME", _ENGINE, autocompletion=complete_one_of(ENGINES))]
_SIMPLIFY = (
    "Accept a plan this fraction slower than the fastest if it has fewer groups of layers, or no more stages than "
    "usual for its size (more must gain 7 %). 0: the fastest."
)
Simplify = Annotated[
    float, option("--simplify", "FRACTION", _SIMPLIFY, SEARCH, parser=real("--simplify", 0, 0.5, "0.01"))
]
_ENGINES = "Plan for every other engine and compare step times."
AllEngines = Annotated[bool, option("--engines", None, _ENGINES, ENGINE)]
_MEMORY = "Memory budget per device, as in 80GB or 20GiB. Default: all memory."
Memory = Annotated[str | None, option("--memory", "SIZE", _MEMORY)]
_MARGIN = "Fraction of device memory to keep free. Default: 0.05, 0 with --memory. Ignored if nothing fits otherwise."
MemoryMargin = Annotated[
    float | None, option("--memory-margin", "FRACTION", _MARGIN, BUDGET, parser=real("--memory-margin", 0, 0.9, "0.05"))
]
_IMBALANCE = "Load of the busiest expert rank relative to the mean (assumed; training reports the measured value)."
Imbalance = Annotated[float, option("--imbalance", "RATIO", _IMBALANCE, MODEL)]
_PROFILE = "Costs measured by `steelyard profile`; for device groups NAME=FILE,… Default: traced, at catalogue rates."
ProfileOption = Annotated[str | None, option("--profile", "FILE", _PROFILE, CLUSTER)]
MaxTp = Annotated[
    int | None, count("--max-tp", "Largest tensor-parallel degree to search.", SEARCH, most=limits.MOST_DEVICES)
]
TimeLimit = Annotated[
    float, seconds("--time-limit", "CPU seconds after which the search returns the best plan so far.")
]
AsJson = Annotated[bool, option("--json", None, "Print JSON.", OUTPUT)]
Verbose = Annotated[bool, option("--verbose -v", None, "Also show all tables: stages, cost by term, plans that lost.")]
_BUILDER = "FILE.py:FUNCTION of the plan's own module; the file is run."
Builder = Annotated[str | None, option("--builder", "FILE", _BUILDER)]


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


def written(text: str, **more: Any) -> Any:
    """Return the option for an output file, which is tried before any work."""
    return option("--output -o", "FILE", text, callback=tried, **more)


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


def prints(kind: Any) -> Callable[[Command], Command]:
    """Declare the type of the value that a command prints with ``--json``: `steelyard schema` and tools of `steelyard
    mcp` show its schema."""

    def declare(command: Command) -> Command:
        command.json_type = kind  # type: ignore[attr-defined]
        return command

    return declare


def print_json(value: Any) -> None:
    """Print a value as indented JSON in characters that standard output can show.

    Values of our file formats have the keys of the file; absent ones are left out.
    """

    def content(part: Any) -> Any:
        return TypeAdapter(type(part)).dump_python(part, mode="json", exclude_none=True)

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


_BATCH = "Samples per step over all devices, or max: doubled while throughput grows. Default: one per device."
Batch = Annotated[
    Any,
    option("--global-batch", "SAMPLES|max", _BATCH, parser=whole_or_max("--global-batch", limits.MOST_SAMPLES, "64")),
]
_LENGTH = _SEQ_LEN.replace("4k.", "4k, or max: the longest that fits.")
Length = Annotated[
    Any, option("--seq-len", "TOKENS|max", _LENGTH, parser=whole_or_max("--seq-len", limits.MOST_TOKENS, "4096"))
]
Output = Annotated[Path | None, written("Write the plan to this file, as in plan.json.")]
_IMAGE = (
    "Pixels per side of all images, or HEIGHTxWIDTH, if the model reads any size; none: its text alone. Default: from "
    "its config."
)
ImageSize = Annotated[str | None, option("--image-size", "PIXELS", _IMAGE, MODEL)]
_CALIBRATE = (
    "Measured runs whose median ratio scales all predicted times: records of `train` or `measure`, or files with plan "
    "and step_time_s. Several may follow one --calibrate."
)
CalibrateBy = Annotated[list[Path] | None, option("--calibrate", "RUN...", _CALIBRATE, CLUSTER)]
_AIM = "time: the fastest plan; devices: the fewest devices, then the fastest."
Aim = Annotated[str, option("--objective", "NAME", _AIM, BUDGET)]
Stages = Annotated[
    int | None, count("--stages --pp", "Number of pipeline stages.", PARALLELISM, most=limits.MOST_LAYERS)
]
_MICRO_BATCH = "Samples of a microbatch per rank, in all blocks."
MicroBatch = Annotated[int | None, count("--micro-batch", _MICRO_BATCH, PARALLELISM, most=limits.MOST_SAMPLES)]
_MICROBATCHES = "Number of microbatches per step (gradient accumulation steps)."
Microbatches = Annotated[int | None, count("--microbatches", _MICROBATCHES, PARALLELISM, most=limits.MOST_MICROBATCHES)]
_REMATS = "Choices of activation checkpointing for blocks, as in none,selective,full."
Remats = Annotated[str | None, option("--remat", "NAMES", _REMATS, PARALLELISM)]
_SCHEDULES = f"Pipeline schedules to search: {', '.join(SCHEDULES)}."
Schedules = Annotated[str | None, option("--schedule", "NAMES", _SCHEDULES, PARALLELISM)]
_MAX_STAGES = "Maximum number of pipeline stages to search."
MaxStages = Annotated[int | None, count("--max-stages", _MAX_STAGES, SEARCH, most=limits.MOST_DEVICES)]
ZeroStages = Annotated[
    str | None, option("--zero", "STAGES", "ZeRO stages that fsdp may use, as in 1,2,3.", PARALLELISM)
]
_SPACE = "full: all parallelism dimensions; paper: those of the Galvatron paper, for comparison."
WhichSpace = Annotated[str, option("--space", "NAME", _SPACE, SEARCH)]
_UNIFORM = "One strategy for all layers, one remat choice for all blocks."
Uniform = Annotated[bool, option("--uniform", None, _UNIFORM, PARALLELISM)]
_PIN = "Fix the strategy of some layers, as in 'layers 0-3: tp=4, remat=full'. Repeatable."
Pins = Annotated[list[str] | None, option("--pin", "TEXT", _PIN, PARALLELISM)]
_FREEZE = "Module or parameter that is not trained, by path, as in model.vision_tower or *.norm. Repeatable."
Freezes = Annotated[list[str] | None, option("--freeze", "PATH", _FREEZE, MODEL)]
_CUTS = "How layers are cut into stages: exact (searched), or for comparison bmw, memory-balanced, even."
Cuts = Annotated[str, option("--partition", "NAME", _CUTS, SEARCH)]
_TOP = "Number of plans that lost to list with -v, and to keep in the file for `measure`."
Top = Annotated[int, count("--top", _TOP, OUTPUT, most=1000, least=0)]
_FALLBACKS = "Number of plans with less memory to keep in the file, for `train` to use if memory runs out."
Fallbacks = Annotated[int, count("--fallbacks", _FALLBACKS, OUTPUT, most=100, least=0)]
_TOKENS = "Tokens of the whole training, as in 15T: adds days and device-hours."
Tokens = Annotated[int | None, count("--tokens", _TOKENS, BUDGET, most=MOST_COUNT, example="15T", metavar="TOKENS")]
Price = Annotated[float | None, price("Dollars per device-hour: adds the cost of --tokens.")]
_PROBLEM = "Write the cost tables to this file, for `steelyard solve`."
SaveProblem = Annotated[Path | None, option("--save-problem", "FILE", _PROBLEM, OUTPUT, callback=tried)]


def _registries() -> dict[str, dict[str, Any]]:
    """Return the types of the options of each registry, by the name of a command's parameter for them."""
    registries: dict[str, dict[str, Any]] = {"levers": {}, "degrees": {}}
    for name, lever in LEVERS.items():
        completion = complete_one_of(lever.values) if lever.values else None
        declared = option(f"--{name}", "NAME", lever.help, LEVER, autocompletion=completion)
        registries["levers"][name] = Annotated[str | None, declared]
    for name, dimension in DIMENSIONS.items():
        text = f"Degree of {dimension.title} in every layer that allows it."
        declared = count(f"--{name}", text, PARALLELISM, most=MOST_DEVICES)
        registries["degrees"][name] = Annotated[int | None, declared]
    return registries


def _place(parameter: inspect.Parameter) -> int:
    """Return the index of the group of an option in `GROUPS`."""
    infos = (each for each in get_args(parameter.annotation) if isinstance(each, typer.models.OptionInfo))
    return GROUPS.index(getattr(next(infos, None), "rich_help_panel", None))


def with_levers(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of its parameters ``job``, ``levers`` and ``degrees`` instead of these.

    ``job`` has an option per field, ``levers`` one per lever and ``degrees`` one per dimension; the command gets an
    object and two mappings by name. Options are in the order of `GROUPS`. A lever or a dimension is added in a file of
    its own; its option needs no line here.
    """
    registries = _registries()

    def declare(of: Callable[..., Any]) -> Iterator[inspect.Parameter]:
        kind = inspect.Parameter.KEYWORD_ONLY
        for each in inspect.signature(of).parameters.values():
            if each.name == "job":
                yield from declare(each.annotation)
            elif each.name in registries:
                for name, declared in registries[each.name].items():
                    yield inspect.Parameter(name, kind, default=None, annotation=declared)
            else:
                yield each.replace(kind=kind)

    def call(of: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        found: dict[str, Any] = {}
        for name, each in inspect.signature(of).parameters.items():
            if name == "job":
                found[name] = call(each.annotation, given)
            elif name in registries:
                found[name] = {key: given.get(key) for key in registries[name]}
            elif name in given:
                found[name] = given[name]
        return of(**found)

    parameters = sorted(declare(function), key=_place)

    @wraps(function)
    def command(**given: Any) -> None:
        call(function, given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command
