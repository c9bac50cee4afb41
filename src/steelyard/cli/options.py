"""Options that several commands share, and what they print and write."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from steelyard.cli.completion import complete_cluster, complete_model, complete_network
from steelyard.errors import UserError
from steelyard.installed import require_training
from steelyard.limits import MOST_DEVICES, MOST_SAMPLES, MOST_SECONDS, MOST_TOKENS
from steelyard.model.own import BUILDER
from steelyard.output import check_file, check_folder

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
        max=MOST_TOKENS,
    ),
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", help="Samples of a step over all devices.", min=1, max=MOST_SAMPLES)
]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="bf16 (computes in bf16, keeps and reduces in fp32) or fp32.")
]
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
MaxTp = Annotated[int | None, typer.Option("--max-tp", help="Largest tensor-parallel degree.", min=1, max=MOST_DEVICES)]

TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", help="Seconds after which the best so far is taken.", min=0, max=MOST_SECONDS),
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
    from steelyard.modules.own_builder import build, own_model

    print(f"running {model.rpartition(':')[0]}, which builds the module", file=sys.stderr)
    return own_model(build(model))


def tried(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The callback of an option that names a file to write: raises `UserError` before the work if it cannot be."""
    if path is not None and not context.resilient_parsing:
        check_file(path, parameter.opts[0])
    return path


def tried_file_or_folder(context: typer.Context, parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same of an option that names a file by its suffix, or else a folder."""
    if path is not None and path.suffix and not path.is_dir():
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


def most_tp(degree: int | None) -> dict[str, int] | None:
    """Return the largest degrees that ``--max-tp`` allows."""
    return None if degree is None else {"tp": degree}


def check_page(path: Path) -> None:
    """Raises `UserError` unless ``--output`` names a page."""
    if path.suffix.lower() != ".html":
        raise UserError(
            field="--output",
            found=repr(str(path)),
            expected="a path that ends in .html",
            hint=f"write for example -o {path.with_suffix('.html').name}",
        )
