"""``steelyard validate``: predicts runs that others measured and published, and says how far off it is."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from steelyard.cli.options import AsJson, print_json
from steelyard.validation.forecast import Outcome, forecast_all, write_predictions
from steelyard.validation.rows import PublishedRun, read_runs
from steelyard.validation.score import score_sources
from steelyard.validation.table import counted, validation_json, validation_view
from steelyard.validation.targets import is_dense, is_recommended_dense, summarise

_FILE_WIDTH = 120
"""Columns of the tables in a file or a pipe, where nothing says how wide it is: none of them is cut off."""


def validate(
    path: Annotated[Path, typer.Argument(help="A folder that holds runs.csv, the table of published runs.")],
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="Where to write one line per run, as CSV.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict published training runs and compare. No GPU needed."""
    outcomes = _forecast(read_runs(path))
    if predictions is not None:
        write_predictions(outcomes, predictions)
    timed, held = (score_sources(outcomes, keep) for keep in (is_recommended_dense, is_dense))
    targets = summarise(timed, held, outcomes)
    if as_json:
        print_json(validation_json(timed, held, targets, outcomes))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(validation_view(timed, held, targets, outcomes))
    console.print(counted(outcomes) + ("" if predictions is None else f"; written to {predictions}"))


def _forecast(runs: tuple[PublishedRun, ...]) -> tuple[Outcome, ...]:
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("predicting", total=len(runs))
        return forecast_all(runs, lambda: progress.advance(task))
