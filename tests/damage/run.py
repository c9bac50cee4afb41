"""Execution of cases in this process through the real command line, and classification of their results.

A case ends well with exit code 0 (done), 1 (nothing fits) or 2 (a user error, named in a short message).
Anything else is a finding: another exception, a warning, more than `MOST_S` seconds of computing or `MOST_BYTES` of
memory. A case that starts another process, or needs torch where it is not installed, ends there: all of its input has
been read.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Literal

import typer.main
from click import Command
from click.testing import CliRunner, Result

from steelyard.cli.app import app
from steelyard.errors import UserError
from steelyard.output import escape_unprintable
from steelyard.units import GIB
from tests.damage.cases import JOB, ONE, Case

MOST_S = 5.0
MOST_BYTES = GIB
MOST_MESSAGE = 2000
"""Maximum number of characters of a message, apart from quoted input."""

Outcome = Literal["done", "nothing fits", "mistake", "read"]


class ReadAll(BaseException):
    """Raised when input is complete as far as the planner reads it."""


class TooLong(BaseException):
    """The case computed longer than any may."""


class FindingError(Exception):
    """A case that did not end as a case should; the message is what happened."""


class _NoTorch(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in ("torch", "transformers"):
            raise ReadAll


def _no_process(*_: object, **__: object) -> None:
    raise ReadAll


class _Escaping(CliRunner):
    """Prints as the command line does."""

    @contextlib.contextmanager
    def isolation(self, *given: Any, **named: Any) -> Iterator[Any]:  # type: ignore[override]
        with super().isolation(*given, **named) as streams:
            escape_unprintable()
            yield streams


class Runner:
    """Runs cases in a folder, which becomes that of the process: what damaged arguments write lands there."""

    def __init__(self, folder: Path, whole: Mapping[str, bytes], *, has_torch: bool = False) -> None:
        self._folder = folder
        os.chdir(folder)
        self._whole = whole
        self._damaged: set[str] = set(whole)
        self._command: Command = typer.main.get_command(app)
        if not has_torch:
            sys.meta_path.insert(0, _NoTorch())
        subprocess.Popen.__init__ = _no_process  # type: ignore[method-assign, assignment]
        for command in (f"plan {JOB} {ONE}", "solve @problem.json --frontier --points 4 --all --memory 1GiB"):
            self._invoke(Case(seed=0, arguments=command.split(" "), files={}))  # compiles kernels, at no case's expense

    def _invoke(self, case: Case) -> Result:
        """Result of the command with the files of a case."""
        for name in self._damaged:
            (self._folder / name).write_bytes(self._whole[name])
        for name, content in case.files.items():
            (self._folder / name).write_bytes(content)
        self._damaged = set(case.files)
        arguments = [
            str(self._folder / argument[1:]) if argument.startswith("@") else argument for argument in case.arguments
        ]
        return _Escaping().invoke(self._command, arguments)

    def run(self, case: Case) -> Outcome:
        """Result of a case; raises `FindingError`."""
        try:
            with _limits(), warnings.catch_warnings():
                warnings.simplefilter("error")
                result = self._invoke(case)
        except ReadAll:
            return "read"
        except TooLong:
            raise FindingError(f"more than {MOST_S:g} s of computing\n{traceback.format_exc(limit=-8)}") from None
        error = result.exception
        if isinstance(error, UserError):
            _check_message(str(error))
            return "nothing fits" if error.exit_code == 1 else "mistake"
        if error is None or isinstance(error, SystemExit):
            outcomes: dict[int, Outcome] = {0: "done", 1: "nothing fits", 2: "mistake"}
            return outcomes[result.exit_code]
        raise FindingError("".join(traceback.format_exception(error, limit=-8)))


def _check_message(text: str) -> None:
    """A message that can be printed and read."""
    if len(text) > MOST_MESSAGE:
        raise FindingError(f"a message of {len(text)} characters: {text[:300]}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FindingError(f"a message that cannot be printed: {text!r}") from None


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End computations that take too long, and refuse memory beyond the current amount plus `MOST_BYTES`."""

    def give_up(_signal: int, _frame: object) -> None:
        raise TooLong

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES, before[1]))
    handler = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def describe(case: Case, error: BaseException) -> str:
    """A finding for people: the seed that makes it again, the command and what happened."""
    return f"seed {case.seed}: steelyard {' '.join(_short(case.arguments))}\n{error}"


def _short(arguments: Sequence[str]) -> list[str]:
    return [repr(argument[:80])[1:-1] for argument in arguments]
