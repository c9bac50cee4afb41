"""The command line: one Typer application, one module per command, one place where errors become messages."""

import logging
import signal
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from steelyard import __version__
from steelyard.errors import UserError
from steelyard.output import escape_unprintable, say
from steelyard.processes.failure import RankFailedError
from steelyard.processes.stop import EndedError, StoppedError

COMMANDS = {
    name: name
    for name in (
        *(
            "plan",
            "price",
            "advise",
            "frontier",
            "explore",
            "solve",
            "explain",
            "diff",
            "report",
            "timeline",
            "profile",
        ),
        *("check", "parity", "train", "measure", "export", "demo", "models"),
    )
} | {"devices": "models", "links": "models", "schema": "schema"}
"""The module of each command, in the order in which they are listed."""
_ENDING = [
    signal.Signals[name] for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1") if name in signal.Signals.__members__
]


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with these commands, whose modules alone are imported."""
    made = typer.Typer(
        name="steelyard",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        epilog="Exit codes: 0 done; 1 nothing fits, or a process of the run failed; 2 a mistake in what was given.",
    )
    made.callback()(options)
    for name in names:
        module = import_module(f"steelyard.cli.{COMMANDS[name]}")
        made.command(name, context_settings=getattr(module, "WORDS", None))(getattr(module, name))
    return made


def __getattr__(name: str) -> Any:
    """``app`` with all commands, made when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_app()


def show_version(asked: bool) -> None:
    """Prints the version and ends, where it is asked for."""
    if asked:
        print(f"steelyard {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Find the fastest way to train a Transformer on the GPUs at hand, see that it fits, and run it."""


def main() -> None:
    """Runs a command; a user's mistake is printed without a traceback and ends with its exit code.

    Whoever reads the output may stop (``| head -1``): that is no failure.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    escape_unprintable()
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    named = [name for name in sys.argv[1:2] if name in COMMANDS]
    exit_code: int | str | None = 0
    try:
        make_app(named if named or sys.argv[1:] == ["--version"] else COMMANDS)()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            sys.stdout = sys.__stdout__ or sys.stdout  # of which click has made one that hides the error
        else:
            exit_code = end.code
    except (UserError, RankFailedError, EndedError) as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = error.exit_code
    except StoppedError as stopped:
        print(stopped, file=sys.stderr)
        exit_code = stopped.exit_code
    say("")
    sys.exit(exit_code)


def _end(number: int, _frame: object) -> NoReturn:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise EndedError(number)
