"""The command line: one Typer application, one module per command, one place where errors become messages."""

import logging
import sys
from typing import Annotated

import typer

from steelyard import __version__
from steelyard.cli import (
    check,
    demo,
    diff,
    explain,
    export,
    frontier,
    models,
    parity,
    plan,
    profile,
    report,
    schema,
    solve,
    timeline,
    train,
)
from steelyard.errors import UserError
from steelyard.processes.start import RankFailedError

app = typer.Typer(
    name="steelyard",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Exit codes: 0 done; 1 nothing fits, or a process of the run failed; 2 a mistake in what was given.",
)


def show_version(asked: bool) -> None:
    """Prints the version and ends, where it is asked for."""
    if asked:
        print(f"steelyard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Find the fastest way to train a Transformer on the GPUs at hand, see that it fits, and run it."""


app.command("plan")(plan.plan)
app.command("frontier")(frontier.frontier)
app.command("solve")(solve.solve)
app.command("explain")(explain.explain)
app.command("diff")(diff.diff)
app.command("report")(report.report)
app.command("timeline")(timeline.timeline)
app.command("profile")(profile.profile)
app.command("check")(check.check)
app.command("parity")(parity.parity)
app.command("train")(train.train)
app.command("export")(export.export)
app.command("demo")(demo.demo)
app.command("models")(models.models)
app.command("devices")(models.devices)
app.command("links")(models.links)
app.command("schema")(schema.schema)


def main() -> None:
    """Runs a command; a user's mistake is printed without a traceback and ends with its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except (UserError, RankFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
