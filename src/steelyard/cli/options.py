"""Options that several commands share, and what they print and write."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.completion import complete_cluster, complete_model
from steelyard.output import check_file, check_folder

Model = Annotated[
    str,
    typer.Argument(
        help="A packaged model (see `steelyard models`) or the path of a config.json.", autocompletion=complete_model
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="NODESxDEVICESxDEVICE such as 1x8xa100-80gb, or a YAML file.",
        autocompletion=complete_cluster,
    ),
]
SeqLen = Annotated[int, typer.Option("--seq-len", help="Tokens of a sample.", min=1)]
GlobalBatch = Annotated[int, typer.Option("--global-batch", help="Samples of a step over all devices.", min=1)]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="bf16 (computes in bf16, keeps and reduces in fp32) or fp32.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", help="What one device may hold, as in 20GiB; default: all it has.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", help="Measured costs from `steelyard profile`; default: traced and catalogue."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
    """Prints a value as indented JSON on standard output, in whatever characters that can show."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode))


def most_tp(degree: int | None) -> dict[str, int]:
    """The largest degrees of kinds that ``--max-tp`` allows."""
    return {} if degree is None else {"tp": degree}
