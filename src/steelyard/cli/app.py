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
        *("plan", "price", "advise", "frontier", "explore", "solve", "explain", "diff", "report"),
        *("timeline", "profile", "check", "parity", "train", "measure", "export", "demo", "models"),
    )
} | {"devices": "models", "links": "models", "schema": "schema", "mcp": "mcp"}
"""Module of each command, in the order of the help."""
UsageError: Any = typer.BadParameter.__base__
"""The mistakes in words of the command line that click finds; typer has its own copy of click."""
_ENDING = [
    signal.Signals[name] for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1") if name in signal.Signals.__members__
]


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the application with these commands; only their modules are imported."""
    made = typer.Typer(
        name="steelyard",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        epilog="Exit codes: 0 done; 1 nothing fits, or a process of the run failed; 2 a mistake in the input.",
    )
    made.callback()(options)
    for name in names:
        module = import_module(f"steelyard.cli.{COMMANDS[name]}")
        made.command(name, context_settings=getattr(module, "WORDS", None))(getattr(module, name))
    return made


def __getattr__(name: str) -> Any:
    """Return ``app`` with all commands, made on first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_app()


def show_version(asked: bool) -> None:
    """Print the version and exit if asked for."""
    if asked:
        print(f"steelyard {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Find the fastest way to train a Transformer on your GPUs, check that it fits, and run it."""


def main() -> None:
    """Run a command; print a user's mistake without a traceback and exit with its code.

    A reader that stops early (``| head -1``) is no failure.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("steelyard.tracer.cache").setLevel(logging.INFO)
    escape_unprintable()
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, _end)
    named = [name for name in sys.argv[1:2] if name in COMMANDS]
    exit_code: int | str | None = 0
    try:
        exit_code = make_app(named if named or sys.argv[1:] == ["--version"] else COMMANDS)(
            prog_name="steelyard", standalone_mode=False
        )
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            sys.stdout = sys.__stdout__ or sys.stdout  # click replaced it by a stream that hides the error
        else:
            exit_code = end.code
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # after which the help is printed
            print(f"error: {usage_error(error)}", file=sys.stderr)
        exit_code = error.exit_code
    except typer.Abort:
        exit_code = 1
    except (UserError, RankFailedError, EndedError) as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = error.exit_code
    except StoppedError as stopped:
        print(stopped, file=sys.stderr)
        exit_code = stopped.exit_code
    say("")
    sys.exit(exit_code)


def usage_error(error: Any) -> UserError:
    """Return a mistake in the words of the command line, as click reports it, in the form of all other mistakes."""
    context, parameter = error.ctx, getattr(error, "param", None)
    path = context.command_path if context else "steelyard"
    field = getattr(error, "option_name", None) or path
    if parameter is not None:
        field = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name
    if isinstance(error, typer.BadParameter) and not error.message:
        expected = str(getattr(parameter, "help", None) or "a value")
        return UserError(field=field, found="nothing", expected=expected, hint=f"see {path} --help")
    for wrong in getattr(error.__context__, "errors", list)()[:1]:  # a value that pydantic could not convert
        expected = wrong["msg"].removeprefix("Input should be ").partition(",")[0]
        return UserError(field=field, found=repr(wrong["input"]), expected=expected, hint=f"see {path} --help")
    found, hint = getattr(error, "message", "").rstrip("."), f"see {path} --help"
    if close := getattr(error, "possibilities", None):
        hint = f"did you mean {' or '.join(close)}?"
    return UserError(field=field, found=found[:1].lower() + found[1:], expected=f"valid words for {path}", hint=hint)


def _end(number: int, _frame: object) -> NoReturn:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise EndedError(number)
