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
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            help="Text, JSON lines, a folder of text, or token ids (.npy, .bin); for image models a folder with a "
            "folder of images per class, or `synthetic`.",
        ),
    ],
    steps: Annotated[int, typer.Option("--steps", help="Training steps.", min=1)] = 100,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", help="Steps of rising learning rate.", min=0)] = 10,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Weight decay of AdamW.")] = 0.1,
    max_grad_norm: Annotated[float, typer.Option("--max-grad-norm", help="Gradients are clipped to this norm.")] = 1.0,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer.json for text; without it text is read as bytes.")
    ] = None,
    text_key: Annotated[str, typer.Option("--text-key", help="Key of JSON lines that holds the text.")] = "text",
    mask_token: Annotated[
        int | None, typer.Option("--mask-token", help="Token id that hides another, for masked-token training.", min=0)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of first weights and sample order.", min=0)] = 0,
    init: Annotated[
        Path | None, typer.Option("--init", help="A Hugging Face folder (safetensors) with the first weights.")
    ] = None,
    export_hf: Annotated[
        Path | None, typer.Option("--export-hf", help="Write the last weights here, as transformers reads them.")
    ] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option("--checkpoint-dir", help="Write checkpoints here; without it none are written.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", help="Steps between checkpoints; one more at the end.", min=1)
    ] = 100,
    keep_last: Annotated[int, typer.Option("--keep-last", help="Checkpoints that are kept.", min=1)] = 2,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            help="Go on from a checkpoint, or in --checkpoint-dir from the `latest`; `auto`: if there is one.",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", help="Start again from the newest checkpoint, when a process fails.", min=0)
    ] = 0,
    device: Annotated[
        str | None,
        typer.Option("--device", help="gpu or cpu: insist on it, where the plan is for the other.", metavar="KIND"),
    ] = None,
    enforce_memory: Annotated[
        bool, typer.Option("--enforce-memory", help="No process may take more than the plan's budget.")
    ] = False,
    metrics: Annotated[Path | None, typer.Option("--metrics", help="Write a JSON line per step here.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Write TensorBoard's event files to this folder.")
    ] = None,
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
        tokenizer=tokenizer,
        text_key=text_key,
        mask_token=mask_token,
        init=init,
        export_hf=export_hf,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        resume=resume,
        device=device,
        enforce_memory=enforce_memory,
        metrics=metrics,
        tensorboard=tensorboard,
        record=record,
    )
    finished = launch(path, data, options, restarts=restarts, stdout_to_stderr=as_json)
    if as_json:
        print_json(finished.model_dump(mode="json", exclude_none=True))
    else:
        Console().print(comparison_table(plan, finished))
