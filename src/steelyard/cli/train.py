"""``steelyard train``: runs a plan on this host, one process per rank, and compares with its prediction."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from steelyard.cli.options import AsJson, print_json
from steelyard.plan.file import read_plan
from steelyard.report.run_table import comparison_table


def train(
    path: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    data: Annotated[Path, typer.Option("--data", help="A text file, a folder of text, or a file of tokens.")],
    steps: Annotated[int, typer.Option("--steps", help="Training steps.", min=1)] = 100,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", help="Steps of rising learning rate.", min=0)] = 10,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Weight decay of AdamW.")] = 0.1,
    max_grad_norm: Annotated[float, typer.Option("--max-grad-norm", help="Gradients are clipped to this norm.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of first weights and sample order.", min=0)] = 0,
    metrics: Annotated[Path | None, typer.Option("--metrics", help="Write a JSON line per step here.")] = None,
    record: Annotated[Path | None, typer.Option("--record", help="Write the run record here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the plan's model on this host through torchrun.

    For several hosts start torchrun on each: `torchrun --nnodes N --nproc-per-node D --rdzv-backend c10d
    --rdzv-endpoint HOST:PORT -m steelyard.train PLAN --data PATH`.
    """
    from steelyard.runtime.launch import launch
    from steelyard.runtime.options import TrainOptions

    plan = read_plan(path)
    options = TrainOptions(
        steps=steps,
        lr=lr,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        seed=seed,
        metrics=metrics,
        record=record,
    )
    finished = launch(path, data, options)
    if as_json:
        print_json(finished.model_dump(mode="json", exclude_none=True))
    else:
        Console().print(comparison_table(plan, finished))
