"""Command line in a fork of a warm process, whose torchrun is a fork of it: ``-m tests.processes.forked_command``.

Every process of the command has the command's folder, the only mark that forks have: /proc shows the environment with
which the warm process began.
"""

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

from steelyard.cli.app import main
from steelyard.processes import start
from tests.processes import forking_agent


class ForkedAgent(forking_agent.Fork):
    """Substitute for `subprocess.Popen` in `steelyard.processes.start`."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool, stdout: int | None
    ) -> None:
        assert start_new_session
        assert stdout is None
        super().__init__((command[0], "-u", *command[1:]), dict(env), None, None, in_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))  # pipes, perhaps
    tempfile.tempdir = None  # which the warm process may have found from its own environment
    start._AGENT = forking_agent.__name__
    start.subprocess = SimpleNamespace(Popen=ForkedAgent, TimeoutExpired=subprocess.TimeoutExpired)
    main()
