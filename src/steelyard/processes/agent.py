"""torchrun with the exit codes of failed processes as data, started by `steelyard.processes.start`.

Takes torchrun's own arguments. torchrun starts the processes, watches them, and ends all when one fails. Its long error
output is suppressed because the launcher shows the first error itself.

torchrun gives every process its own session, and Linux shares processor time between sessions, not processes
(``sched_autogroup_enabled``): on CPUs a process that waits for another one's message is scheduled later, and layers
with tensor parallelism take 10 to 40 % longer. Here all processes stay in the agent's session. The port of the first
process stays free until the process listens on it (`free_port`).
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    SignalException,
    Std,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import api as rendezvous
from torch.distributed.launcher import api as launcher

from steelyard.processes.elastic import Agent, ElasticAgent
from steelyard.processes.failure import END_S, ends_of, failures_folder, write_ends
from steelyard.processes.rank import PARENT_VARIABLE, end_process, watch_parent
from steelyard.processes.start import RESTARTS_VARIABLE
from steelyard.processes.stop import END_SIGNAL, STOP_SIGNALS

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Range of the ephemeral ports that Linux assigns."""
_SPAN = 8192
_MOST_TRIES = 64


def free_port(candidates: Iterable[int] | None = None) -> int:
    """Return a free port of this host that no other process is assigned before its user listens on it, seconds later.

    torchrun takes an ephemeral port, which the system may assign to a connection of another run in the meantime.
    ``candidates`` default to random ports below the ephemeral range. If there are none, or all are taken, any free
    port is returned.
    """
    if candidates is None:
        try:
            first = int(_GIVEN.read_text().split()[0])
            ports = range(max(first - _SPAN, first // 2 + 1, 1024), first)
            candidates = SystemRandom().sample(ports, min(_MOST_TRIES, len(ports)))
        except (OSError, ValueError, IndexError):
            candidates = ()
    for port in candidates:
        try:
            return _bound(port)
        except OSError:
            continue
    return _bound(0)


def _bound(port: int) -> int:
    """Return the port if it can be bound. Raises `OSError` if not."""
    with socket.socket() as free:
        free.bind(("", port))
        number: int = free.getsockname()[1]
        return number


_MOST_PROCESSES = 1024


class QuietLogs(DefaultLogsSpecs):
    """Log specification that redirects stderr to a file for every process of a host except the first.

    torchrun's option ``--redirects`` names at most ten processes.
    """

    def __init__(self, log_dir: str | None = None, redirects: Any = None, **options: Any) -> None:
        del redirects
        super().__init__(log_dir, dict.fromkeys(range(1, _MOST_PROCESSES), Std.ERR), **options)


def start_in_this_session(
    handler: SubprocessHandler, args: Sequence[str], env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a process as torchrun does, in its own process group (torchrun ends the group) but not its own session."""
    return subprocess.Popen(args, env=env, stdout=handler._stdout, stderr=handler._stderr, process_group=0)


_close = SubprocessHandler.close


def _end_at_once(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
    """End a process by `END_SIGNAL` instead of torchrun's SIGTERM, at which it would first try to save."""
    _close(handler, END_SIGNAL if death_sig in (None, signal.SIGTERM) else death_sig)


_close_all = SubprocessContext._close


def _end_in_time(context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
    """End all processes of a host within `END_S` seconds, where torchrun ignores its ``--shutdown-timeout``."""
    _close_all(context, death_sig, min(timeout, int(END_S)))


def main(start_process: Callable[..., Any] = start_in_this_session) -> None:
    """Run torchrun; exit with the code of the process that failed first, or 1 if a signal ended that process.

    ``start_process`` takes torchrun's handler, the arguments and the environment, and returns a `subprocess.Popen`.
    """
    for name in logging.Logger.manager.loggerDict:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # a scheduler signals all processes; launcher and ranks handle it
    watch_parent(lambda: os.kill(os.getpid(), END_SIGNAL))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # else processes meet the addresses of those before a restart
    )
    rendezvous.get_free_port = free_port
    SubprocessHandler._popen = start_process
    SubprocessHandler.close = _end_at_once
    SubprocessContext._close = _end_in_time
    torchrun.DefaultLogsSpecs = QuietLogs
    launcher.LocalElasticAgent = ElasticAgent if RESTARTS_VARIABLE in os.environ else Agent
    end_process(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        folder = failures_folder()
        if folder is not None:
            write_ends(ends_of(error.failures, folder), folder)
        _, first = error.get_first_failure()
        return max(first.exitcode, 1)
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    main()
