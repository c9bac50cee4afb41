"""Runner of modules in forks of a process with preloaded imports, instead of fresh processes.

One such parent serves all tests of this process; it starts at the first request for a fork, and ends with this process.
A fork is an ordinary process: it has the environment, folder and output of the requesting process, or its own session,
and ends with an exit code or by a signal. Only its parent is not the requesting process.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Self

from steelyard.processes.rank import PARENT_VARIABLE

ROOT = Path(__file__).parents[2]
HANG_LIMIT_S = 1200
"""Far above what a loaded host takes: a hang, not a measure."""
_IMPORTS = "tests.processes.warm_imports"
_STDOUT, _STDERR = 1, 2
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([_IMPORTS])
_lock = threading.Lock()
"""Lock held while multiprocessing forks or polls a fork, because it also polls those of other threads."""


class WarmProcess:
    """Substitute for `subprocess.Popen` of ``python -m MODULE …`` in `steelyard.processes.start`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        assert command[1] == "-m", "a module is what a fork runs"
        environment = dict(os.environ if env is None else env)
        output = (
            _Descriptor(_STDOUT if stdout is None else stdout),
            _Descriptor(_STDERR if stderr is None else stderr),
        )
        self._process = _forks.Process(
            target=_become, args=(list(command[2:]), environment, output, start_new_session, os.getcwd())
        )
        with _lock, contextlib.chdir(ROOT):  # where the process that is forked finds the tests
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        exit_code = self.poll()
        if exit_code is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_warm(module: str, *arguments: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Return exit code and output of ``python -m MODULE …``; on a timeout end it and raise `TimeoutExpired`."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = WarmProcess(command, stdout=stdout.fileno(), stderr=stderr.fileno())
        try:
            exit_code = process.wait(timeout_s)
        finally:
            process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(command, exit_code, stdout.read(), stderr.read())


class _Descriptor:
    """An open file that goes to the fork."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (DupFd(self._number),)


def _detached(sent: Any) -> int:
    number: int = sent.detach()
    return number


def _become(
    words: list[str], environment: dict[str, str], output: tuple[int, int], start_new_session: bool, folder: str
) -> None:
    from tests.processes import warm_imports

    assert os.getppid() == warm_imports.IMPORTED_IN, "what was to be imported before the fork was not"
    if start_new_session:
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for target, number in zip((_STDOUT, _STDERR), output, strict=True):
        os.dup2(number, target)
        os.close(number)
    _end_with_who_asked()
    os.environ.clear()
    os.environ.update(environment)
    if PARENT_VARIABLE in environment:
        os.environ[PARENT_VARIABLE] = str(os.getppid())
    os.chdir(folder)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _end_with_who_asked() -> None:
    who = multiprocessing.parent_process()
    assert who is not None

    def watch() -> None:
        who.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-who-asked", daemon=True).start()
