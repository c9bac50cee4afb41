"""Launcher of the processes of a run on this host, one per rank.

Imports no torch, so the command line that calls it starts at once.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import UserError
from steelyard.processes.failure import (
    END_S,
    FAILURES_VARIABLE,
    End,
    Failure,
    RankFailedError,
    read_ends,
    read_failures,
)
from steelyard.processes.rank import PARENT_VARIABLE
from steelyard.processes.stop import END_SIGNAL, STOP_SIGNALS, StoppedError, StopRequest, handling

_AGENT = "steelyard.processes.agent"
LOST_PEER = re.compile(r"connection (closed|reset|refused)|broken pipe|lost connection|remote process|timed out", re.I)
"""Errors that a process raises because another one is lost."""
RESTARTS_VARIABLE = "STEELYARD_ELASTIC"
"""Environment variable with the number of restarts after which a device is given up; absent if not elastic."""
TAKEN_IN_VARIABLE = "STEELYARD_TAKEN_IN"
"""Environment variable of processes that were restarted because others came back, not because one failed."""
LOST_VARIABLE = "STEELYARD_LOST"
"""Environment variable of restarted processes with the reason."""
RETURN_SIGNAL = signal.SIGUSR2
"""Signal to an elastic run that the devices of this host that were given up are back."""
_MOST_RESTARTS = 1_000_000
"""Restart limit for torchrun if the agent itself counts restarts (`steelyard.processes.elastic`)."""
_LAST_CALL_S = 2 * END_S
"""Seconds that hosts that could continue wait for others, whose processes may take `END_S` seconds to end."""
_STDERR = 2
_NUM_SHOWN_LINES = 25
_SIGNAL_HINTS = {
    "SIGKILL": " (often: the machine ran out of memory)",
    "SIGBUS": " (often: a file that is mapped into memory has shrunk, or shared memory is full)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Options of a run that continues with the remaining hosts and devices."""

    hosts: tuple[int, int] = (1, 1)
    """Minimum and maximum number of hosts."""
    rendezvous: str | None = None
    """HOST:PORT of the rendezvous, on one of the hosts; None for this host alone."""

    def arguments(self) -> list[str]:
        """Return the options as arguments of torchrun."""
        if self.rendezvous is None:
            return ["--standalone"]
        return [
            f"--nnodes={self.hosts[0]}:{self.hosts[1]}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.rendezvous}",
            "--rdzv-id=steelyard",
            f"--rdzv-conf=last_call_timeout={_LAST_CALL_S:.0f},keep_alive_interval=2",
        ]


class RankUserError(UserError):
    """Mistake of the user that only a process of the run could see; the message is that of the process."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(field="", found="", expected="")

    def __str__(self) -> str:
        return self.message


def run_processes(
    module: str,
    arguments: Sequence[str],
    *,
    num_processes: int,
    restarts: int = 0,
    elastic: Elastic | None = None,
    stdout_to_stderr: bool = False,
    stop_s: float | None = None,
) -> None:
    """Run ``module`` in ``num_processes`` processes under torchrun until all have ended.

    When one fails, torchrun ends the others and restarts all, up to ``restarts`` times. An ``elastic`` run then
    continues with the remaining hosts and devices, and takes lost devices back when this process gets `RETURN_SIGNAL`.
    ``stdout_to_stderr`` redirects the output of the processes, which leaves stdout to the caller. A stop signal ends
    all processes at once or, with ``stop_s``, asks them to save within that many seconds and to end with
    `StoppedError`. Raises `RankUserError` or `RankFailedError` with the error of the process that failed first in the
    last attempt.
    """
    with tempfile.TemporaryDirectory(prefix="steelyard-") as folder:
        command = [sys.executable, "-m", _AGENT, *(elastic or Elastic()).arguments()]
        command += [f"--nproc-per-node={num_processes}"]
        command += ["--local-ranks-filter=0", f"--shutdown-timeout={END_S:.0f}", "--monitor-interval=0.1"]
        command += [f"--max-restarts={_MOST_RESTARTS if elastic else restarts}", "--log-dir", folder]
        command += [f"--signals-to-handle={END_SIGNAL.name},SIGQUIT"]
        command += ["-m", module, *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, FAILURES_VARIABLE: folder}
        environment[PARENT_VARIABLE] = str(os.getpid())
        if elastic is not None:
            environment[RESTARTS_VARIABLE] = str(restarts)
        stdout = _STDERR if stdout_to_stderr else None
        with subprocess.Popen(command, env=environment, start_new_session=True, stdout=stdout) as agent:
            try:
                stop = StopRequest(Path(folder), stop_s or 0.0)
                handlers: dict[int, Any] = dict.fromkeys(STOP_SIGNALS if stop_s is not None else (), stop)
                if elastic is not None:
                    handlers[RETURN_SIGNAL] = lambda *_: agent.send_signal(RETURN_SIGNAL)
                with handling(handlers):
                    exit_code = None
                    while exit_code is None:  # poll: a signal that another thread took does not wake it
                        with suppress(subprocess.TimeoutExpired):
                            exit_code = agent.wait(timeout=1)
                        stop.check()
            except BaseException:
                _end(agent)
                raise
        if exit_code:
            failure = first_failure(read_failures(Path(folder)), read_ends(Path(folder)))
            if failure is not None and failure.exit_code == UserError.exit_code:
                raise RankUserError(failure.message)
            if failure is not None and failure.error_type == StoppedError.__name__:
                raise StoppedError(failure.message, exit_code=failure.exit_code)
            if failure is not None:
                raise RankFailedError(describe(failure), failure)
            raise RankFailedError(
                f"torchrun ended with exit code {exit_code} and no process reported a reason; see its output", None
            )


def _end(agent: subprocess.Popen[bytes]) -> None:
    """End torchrun and thereby all its processes, after at most `END_S` + 5 seconds."""
    agent.send_signal(END_SIGNAL)
    try:
        agent.wait(timeout=END_S + 5)
    except subprocess.TimeoutExpired:
        agent.kill()


def first_failure(failures: Iterable[Failure], ends: Mapping[int, End]) -> Failure | None:
    """Return the failure that came first.

    It is the earliest that a process reported, unless that process only lost a peer and a peer ended without a report
    (killed by a signal, for example when memory ran out), or hung until it was killed.
    """
    reported = sorted(failures, key=lambda failure: failure.time_s)
    named = {failure.rank for failure in reported}
    silent = sorted((_blame(end), rank) for rank, end in ends.items() if rank not in named)
    if reported and not (silent and LOST_PEER.search(reported[0].message)):
        return reported[0]
    return _silent(silent[0][1], ends[silent[0][1]], reported) if silent else None


def _blame(end: End) -> int:
    """Return a sort key for a process that reported nothing; the lowest is the likeliest cause.

    A process that a signal ended comes before one that hung, whose peers NCCL aborts, and those that torchrun ended.
    """
    by_signal = {int(signal.SIGABRT): 2, int(signal.SIGTERM): 3, int(END_SIGNAL): 3}
    return 1 if end.stood_still else by_signal.get(-end.exit_code, 0)


def _silent(rank: int, end: End, reported: Sequence[Failure]) -> Failure:
    if end.stood_still:
        message = f"hung: it did not end within {END_S:.0f} s after a request (stopped, or waiting for a disk)"
        if reported:
            first_line = reported[0].message.partition("\n")[0]
            message += f"; rank {reported[0].rank} waited for it: {first_line}"
    elif end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        message = f"was ended by {name}{_SIGNAL_HINTS.get(name, '')}"
    else:
        message = f"ended with exit code {end.exit_code} and no message"
    if end.last_words and not end.stood_still:
        message += "; its last output:\n" + _last_lines(end.last_words)
    return Failure(rank=rank, exit_code=1, time_s=0.0, error_type="", message=message, traceback="")


def describe(failure: Failure) -> str:
    """Return the failure as text: rank, type, message, and the end of the traceback if that says more."""
    if not failure.error_type:
        return f"rank {failure.rank} {failure.message}"
    if failure.is_final:
        return f"rank {failure.rank} stopped: {failure.message}"
    return f"rank {failure.rank} failed: {failure.error_type}: {failure.message}\n{_last_lines(failure.traceback)}"


def _last_lines(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(lines if len(lines) <= _NUM_SHOWN_LINES else ["…", *lines[-_NUM_SHOWN_LINES:]])
