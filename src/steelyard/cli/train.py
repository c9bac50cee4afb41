"""``steelyard train``: runs a plan on this host, one process per rank, and compares with its prediction."""

from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from steelyard.cli.options import AsJson, print_json
from steelyard.installed import require_training
from steelyard.plan.file import read_plan
from steelyard.report.run_table import comparison_table
from steelyard.runtime.options import DATA_HELP, TrainOptions, flag


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def train(
    path: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    data: Annotated[Path, typer.Option("--data", help=_sentence(DATA_HELP))],
    restarts: Annotated[
        int, typer.Option("--restarts", help="Start again from the newest checkpoint, when a process fails.", min=0)
    ] = 0,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Train the plan's model on this host through torchrun.

    For several hosts start torchrun on each: `torchrun --nnodes N --nproc-per-node D --rdzv-backend c10d
    --rdzv-endpoint HOST:PORT -m steelyard.train PLAN --data PATH`.
    """
    plan = read_plan(path)
    require_training("`steelyard train` trains with them")
    from steelyard.runtime.launch import launch

    finished = launch(path, data, TrainOptions(**options), restarts=restarts, stdout_to_stderr=as_json)
    if as_json:
        print_json(finished.model_dump(mode="json", exclude_none=True))
    else:
        Console().print(comparison_table(plan, finished))


def _parameters() -> list[Parameter]:
    """Those of the command and, in place of ``**options``, every field of `TrainOptions`: what torchrun's processes
    take is what the command takes."""
    *own, _ = signature(train).parameters.values()
    options = [
        Parameter(
            option.name,
            Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=Annotated[
                option.type,
                typer.Option(
                    flag(option),
                    help=_sentence(option.metadata["help"]),
                    min=option.metadata["least"],
                ),
            ],
        )
        for option in fields(TrainOptions)
    ]
    return [*own, *options]


train.__signature__ = signature(train).replace(parameters=_parameters())  # type: ignore[attr-defined]
