"""Options that several commands share, and what they print and write."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.completion import complete_cluster, complete_model
from steelyard.errors import UserError

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


def print_json(value: Any) -> None:
    """Prints a value as indented JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def most_tp(degree: int | None) -> dict[str, int]:
    """The largest degrees of kinds that ``--max-tp`` allows."""
    return {} if degree is None else {"tp": degree}


def check_page(path: Path) -> None:
    """Raises `UserError` unless ``--output`` names a page."""
    if path.suffix.lower() != ".html":
        raise UserError(
            field="--output",
            found=repr(str(path)),
            expected="a path that ends in .html",
            hint=f"write for example -o {path.with_suffix('.html').name}",
        )


def write_page(path: Path, text: str) -> None:
    """Writes what ``--output`` asked for; raises `UserError` where that cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            field="--output",
            found=f"{path}: {error.strerror}",
            expected="a path that can be written",
            hint="check the path",
        ) from error
