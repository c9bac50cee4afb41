"""Options that commands share and those of ``steelyard plan``: how they are spelled, completed and checked.

Also what every command does with its output: progress on standard error, which ``--json`` silences, and JSON.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from pydantic import BaseModel
from rich.console import Console

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


def complete_model(incomplete: str) -> list[str]:
    """The packaged models that begin so, by name or by id on the hub."""
    return [name for name in (*model_names(), *hub_names()) if name.startswith(incomplete)]


def complete_network(incomplete: str) -> list[str]:
    """The links of the catalogue that begin so, with the number of ports that was typed before."""
    ports, times, name = incomplete.rpartition("x") if incomplete[:1].isdigit() else ("", "", incomplete)
    return [ports + times + link.name for link in links() if link.name.startswith(name)]


def complete_one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes to those of ``names`` that begin so."""

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
"""Between two lines of progress where no terminal shows it at once."""


@contextmanager
def progress(first: str, *, silent: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done now on standard error: on a terminal at once, elsewhere a line every
    `LINE_EVERY_S`. Shows nothing if ``silent``."""
    console = Console(stderr=True)
    if silent:
        yield lambda _: None
    elif console.is_terminal:
        with console.status(first) as status:
            yield status.update
    else:
        now, is_done = [first], threading.Event()

        def print_lines() -> None:
            while not is_done.wait(LINE_EVERY_S):
                print(f"... {now[0]}", file=sys.stderr)

        printing = threading.Thread(target=print_lines, daemon=True)
        printing.start()
        try:
            yield lambda text: now.__setitem__(0, text)
        finally:
            is_done.set()
            printing.join()


Chosen = TypeVar("Chosen")
_MOST_DIGITS = 20


def parse_size(option: str, text: str, most: int) -> int | Literal["max"]:
    """A number of samples or tokens, or ``max``; raises `UserError` for anything else."""
    if text == "max":
        return "max"
    if not is_number(text, most):
        raise UserError(
            field=option,
            found=repr(text),
            expected=f"a whole number of 1 or more, at most {most}, or max",
            hint=f"write for example {option} 64",
        )
    return int(text)


def parse_image_size(text: str) -> tuple[int, int]:
    """Height and width in ``448`` or ``448x672``; raises `UserError` for anything else."""
    sides = text.split("x")
    if len(sides) > 2 or any(not is_number(side, limits.MOST_PIXELS) for side in sides):
        raise UserError(
            field="--image-size",
            found=repr(text),
            expected=f"the pixels of a side, or HEIGHTxWIDTH, at most {limits.MOST_PIXELS}",
            hint="write for example --image-size 448",
        )
    return int(sides[0]), int(sides[-1])


def is_number(text: str, most: int) -> bool:
    """Whether a text is a whole number of 1 to ``most``."""
    return text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS and 0 < int(text) <= most


def check_choices(option: str, text: str, known: Mapping[str, Chosen]) -> tuple[Chosen, ...]:
    """The values of the names in ``none,full``, each once; raises `UserError` naming the known ones for another."""
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
    """``text`` if it is one of ``choices``, a literal type or a tuple; raises `UserError` naming them otherwise."""
    known = get_args(choices) or choices
    if text not in known:
        expected = "one of " + ", ".join(known)
        raise UserError(field=option, found=repr(text), expected=expected, hint=hint or nearest(text, known))
    return text


def parse_precision(text: str, choices: Any = Precision) -> Any:
    """The precision of ``--precision``; raises `UserError` for another, with what to do for one that is known."""
    nvfp4 = "plan with --precision nvfp4, for an engine that has it (--engine megatron)"
    return check_choice("--precision", text, choices, hint=nvfp4 if text.lower() == "fp4" else "")


Model = Annotated[
    str,
    typer.Argument(
        help="A packaged model (see `steelyard models`; its hub id will do), the path of a config.json, or "
        "FILE.py:FUNCTION, which builds a module of your own and is run.",
        autocompletion=complete_model,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="NODESxDEVICESxDEVICE such as 1x8xa100-80gb, or a YAML file; plan and explain take pools joined by +.",
        autocompletion=complete_cluster,
    ),
]
OtherCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", help="Price it for another cluster than the plan names.", autocompletion=complete_cluster
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        help="The link between nodes, one port per node unless it says how many: ethernet-25, 8xinfiniband-ndr.",
        autocompletion=complete_network,
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        help="Tokens of a sample; default: what an image or your own module's sample has.",
        min=1,
        max=limits.MOST_TOKENS,
    ),
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", help="Samples of a step over all devices.", min=1, max=limits.MOST_SAMPLES)
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="bf16 or fp16 (compute in it, keep and reduce in fp32; fp16 with loss scaling), fp32, or with an engine "
        "that has it fp8, fp8-block, mxfp8 or nvfp4 (linear layers).",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="What runs the plan; default: native, steelyard's own runtime. Options follow its name: megatron+deepep.",
        autocompletion=complete_one_of(ENGINES),
        metavar="NAME",
    ),
]
Simplify = Annotated[
    float,
    typer.Option(
        "--simplify",
        help="Take the plan of the fewest groups of layers that is at most this much slower than the fastest, and "
        "of no more stages than models of its size have unless they gain 7 %; 0 for the fastest.",
        min=0,
        max=0.5,
    ),
]
AllEngines = Annotated[bool, typer.Option("--engines", help="Also plan for every other engine: what each would take.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="What one device may hold, as in 20GiB; default: all it has.")
]
MemoryMargin = Annotated[
    float | None,
    typer.Option(
        "--memory-margin",
        help="Part of the memory to leave free where a plan fits so; default: 0.05 of a GPU's own, none of --memory.",
        min=0,
        max=0.9,
    ),
]
Imbalance = Annotated[
    float,
    typer.Option(
        help="Tokens of the rank whose experts most of them take, over the mean: assumed, until training measures."
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Measured costs from `steelyard profile`; of pools POOL=FILE,…; default: traced and catalogue.",
    ),
]
MaxTp = Annotated[
    int | None, typer.Option("--max-tp", help="Largest tensor-parallel degree.", min=1, max=limits.MOST_DEVICES)
]

TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", help="Seconds after which the best so far is taken.", min=0, max=limits.MOST_SECONDS),
]
MOST_POINTS = 1000
"""Budgets of a frontier."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def built_module(model: str) -> Any:
    """The user's own module where ``model`` is FILE.py:FUNCTION, split and proved; else None.

    The file is run, since the user names it; a line on standard error says so.
    """
    if BUILDER.fullmatch(model) is None:
        return None
    require_training("a module of your own is run to be split")
    from steelyard.modules.own_proof import build, own_model

    print(f"running {model.rpartition(':')[0]}, which builds the module", file=sys.stderr)
    return own_model(build(model))


def tried(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The callback of an option that names a file to write: raises `UserError` before the work if it cannot be."""
    if path is not None and not context.resilient_parsing:
        check_file(path, parameter.opts[0])
    return path


def is_file_name(path: Path) -> bool:
    """Whether a path that may be a file or a folder is a file: it ends in letters after a dot, and is no folder.

    ``titan-0.3`` and ``llama3.1-8b`` are names of folders.
    """
    return path.suffix[1:].isalpha() and not path.is_dir()


def tried_file_or_folder(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same of an option that names a file by its suffix, or else a folder."""
    if path is not None and is_file_name(path):
        return tried(context, parameter, path)
    if path is not None and not context.resilient_parsing:
        check_folder(path, parameter.opts[0])
    return path


def print_json(value: Any) -> None:
    """Prints a value as indented JSON on standard output, in whatever characters that can show.

    What is one of our files, or part of one, has the keys of that file, absent ones left out.
    """

    def content(part: BaseModel) -> Any:
        return part.model_dump(mode="json", exclude_none=True)

    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode, default=content))


def check_page(path: Path) -> None:
    """Raises `UserError` unless ``--output`` names a page."""
    if path.suffix.lower() != ".html":
        raise UserError(
            field="--output",
            found=repr(str(path)),
            expected="a path that ends in .html",
            hint=f"write for example -o {path.with_suffix('.html').name}",
        )


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
    int | None, typer.Option("--stages", help="Fix the number of pipeline stages.", min=1, max=limits.MOST_LAYERS)
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", help="Fix the number of microbatches.", min=1, max=limits.MOST_MICROBATCHES),
]
Remats = Annotated[
    str | None, typer.Option("--remat", help="Choices of activation checkpointing, as in none,selective,full.")
]
Schedules = Annotated[
    str | None, typer.Option("--schedule", help=f"Pipeline schedules to search, as in {','.join(SCHEDULES)}.")
]
MaxStages = Annotated[
    int | None, typer.Option("--max-stages", help="Most stages of a pipeline.", min=1, max=limits.MOST_DEVICES)
]
ZeroStages = Annotated[str | None, typer.Option("--zero", help="ZeRO stages that fsdp may use, as in 1,2,3.")]
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
    typer.Option("--price", help="Dollars for a device-hour: what the --tokens cost.", min=0, max=limits.MOST_PRICE),
]
SaveProblem = Annotated[
    Path | None, typer.Option("--save-problem", callback=tried, help="Write the cost tables for `steelyard solve`.")
]
