"""Agent like `steelyard.processes.agent`'s torchrun, but with forks as processes, so that imports happen once.

Imports take seconds in every process. ``python -m tests.processes.forking_agent`` takes torchrun's arguments. A fork is
an ordinary process: it has its own process group, environment, output and exit code, and can be killed.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from steelyard.processes import agent, start
from tests.processes.warm import ROOT, WarmProcess


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Make `run_processes` fork torchrun from the warm process, and torchrun its processes from itself."""
    patch.chdir(ROOT)
    patch.setattr(start, "_AGENT", __name__)
    patch.setattr(start, "subprocess", SimpleNamespace(Popen=WarmProcess, TimeoutExpired=subprocess.TimeoutExpired))


class Fork:
    """Substitute for torchrun's `subprocess.Popen`: a fork that runs ``python -u SCRIPT …`` or ``-u -m MODULE …``."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        stdout: Any,
        stderr: Any,
        *,
        in_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # as `tests.runtime.processes.fork`
        self.pid = os.fork()
        if not self.pid:
            _become(arguments, environment, stdout, stderr, in_session)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > limit_s:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


def _become(
    arguments: tuple[str, ...], environment: dict[str, str], stdout: Any, stderr: Any, in_session: bool
) -> NoReturn:
    exit_code: Any = 1
    try:
        os.setsid() if in_session else os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        for file, descriptor in ((stdout, 1), (stderr, 2)):
            if file is not None:
                os.dup2(file.fileno(), descriptor)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(environment)
        _run(list(arguments[2:]))
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Run torchrun, which forks; Python warns of torchrun's threads, whose locks no fork takes."""
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    agent.main(lambda handler, arguments, environment: Fork(arguments, environment, handler._stdout, handler._stderr))


if __name__ == "__main__":
    main()
