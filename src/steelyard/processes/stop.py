"""Stop a run at a signal: its processes save at the end of the running step, then all end with one message.

The launcher writes a file that the ranks look for after each step, because it does not know their IDs. A scheduler's
signal to every process of a job reaches the ranks as well (torchrun's agent ignores it). A second signal to the
launcher, or its timeout, ends all processes at once.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steelyard.processes.failure import failures_folder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is the usual warning before a time limit: ``sbatch --signal=USR1@300``."""
END_SIGNAL = signal.SIGHUP
"""Signal that ends torchrun's agent and its processes at once: they keep its default action."""
_FILE = "stop"


class StoppedError(RuntimeError):
    """Raised when a run was asked to stop and has saved its state."""

    is_final = True

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EndedError(BaseException):
    """Raised when a signal asks the command to end; it cleans up as after an error."""

    def __init__(self, number: int, why: str = "") -> None:
        super().__init__(f"ended by {signal.Signals(number).name}{why}")
        self.exit_code = 128 + number


class StopRequest:
    """Signal handler of the launcher: asks the processes to stop, and raises `EndedError` at the second signal."""

    def __init__(self, folder: Path, within_s: float) -> None:
        self._folder, self._within_s = folder, within_s
        self._number = 0
        self._started_s = 0.0

    def __call__(self, number: int, _frame: object) -> None:
        """Handle a signal."""
        if self._number:
            for each in STOP_SIGNALS:
                signal.signal(each, signal.SIG_IGN)
            raise EndedError(number, ", the second signal; the current step is lost")
        self._number, self._started_s = number, time.monotonic()
        part = self._folder / f"{_FILE}.part"
        part.write_text(str(number))
        part.rename(self._folder / _FILE)
        name = signal.Signals(number).name
        sys.stderr.write(
            f"{name}: saving a checkpoint after this step, within {self._within_s:g} s (--timeout-s); a "
            "second signal ends it at once\n"
        )

    def check(self) -> None:
        """Raise `EndedError` if the processes have exceeded their time limit."""
        if self._number and time.monotonic() - self._started_s > self._within_s:
            raise EndedError(self._number, f"; no checkpoint was complete within {self._within_s:g} s (--timeout-s)")


class StopWatch:
    """Signal handler of a rank: records whether the rank itself or its launcher was asked to stop."""

    def __init__(self) -> None:
        folder = failures_folder()
        self._file = None if folder is None else folder / _FILE
        self.number: int = signal.SIGTERM
        """Number of the signal; SIGTERM if another host got it."""
        self._is_asked = False

    def __call__(self, number: int, _frame: object) -> None:
        """Handle a signal."""
        self.number, self._is_asked = number, True

    def is_asked(self) -> bool:
        """Return whether there was a signal."""
        if not self._is_asked and self._file is not None and self._file.exists():
            self.number, self._is_asked = int(self._file.read_text()), True
        return self._is_asked


@contextmanager
def handling(handlers: Mapping[Any, Callable[[int, Any], Any]]) -> Iterator[None]:
    """Handle signals in the context, except those that are ignored (nohup); only the main thread can."""
    is_main = threading.current_thread() is threading.main_thread()
    wanted = {number: each for number, each in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, each) for number, each in wanted.items()} if is_main else {}
    try:
        yield
    finally:
        for number, each in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored by a handler while the processes end
                signal.signal(number, each)
