"""Options that several commands share, and what they print and write."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.completion import complete_cluster, complete_model
from steelyard.errors import UserError
from steelyard.limits import MOST_DEVICES, MOST_SAMPLES, MOST_SECONDS, MOST_TOKENS

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
SeqLen = Annotated[int, typer.Option("--seq-len", help="Tokens of a sample.", min=1, max=MOST_TOKENS)]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", help="Samples of a step over all devices.", min=1, max=MOST_SAMPLES)
]
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
MaxTp = Annotated[int | None, typer.Option("--max-tp", help="Largest tensor-parallel degree.", min=1, max=MOST_DEVICES)]


MOST_POINTS = 1000
TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", help="Seconds after which the best so far is taken.", min=0, max=MOST_SECONDS),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def print_json(value: Any) -> None:
    """Prints a value as indented JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def most_tp(degree: int | None) -> dict[str, int]:
    """The largest degrees of kinds that ``--max-tp`` allows."""
    return {} if degree is None else {"tp": degree}


def write_page(path: Path, text: str) -> None:
    """Writes what ``--output`` asked for; raises `UserError` where that cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(
            field="--output",
            found=f"{path}: {error}",
            expected="a path that can be written",
            hint="check the path",
        ) from error
