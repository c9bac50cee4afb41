"""The command line: one Typer application, one module per command, one place where errors become messages."""

import logging
import signal
import sys
from typing import NoReturn

import typer

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
from steelyard.output import escape_unprintable, say
from steelyard.processes.start import RankFailedError

_ENDING = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__]

app = typer.Typer(
    name="steelyard",
    help="Find the fastest way to train a Transformer on the GPUs at hand, see that it fits, and run it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Exit codes: 0 done; 1 nothing fits, or a process of the run failed; 2 a mistake in what was given.",
)
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


class EndedError(BaseException):
    """A signal asks the command to end; it does so as after an error, and leaves nothing behind."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def main() -> None:
    """Runs a command; a user's mistake is printed without a traceback and ends with its exit code.

    Whoever reads the output may stop (``| head -1``): that is no failure.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    escape_unprintable()
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    exit_code = _run()
    say("")
    sys.exit(exit_code)


def _run() -> int | str | None:
    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            sys.stdout = sys.__stdout__ or sys.stdout  # of which click has made one that hides the error
            return 0
        return end.code
    except (UserError, RankFailedError, EndedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _end(number: int, _frame: object) -> NoReturn:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise EndedError(number)
