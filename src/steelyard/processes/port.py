"""The port on which the first process of a run listens, and which stays free until it does."""

import socket
from collections.abc import Iterable
from pathlib import Path
from random import SystemRandom

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that Linux gives to whoever asks for any."""
_SPAN = 8192
_MOST_TRIES = 64


def free_port(candidates: Iterable[int] | None = None) -> int:
    """A free port of this host that no other process is given before the one it is for listens on it, seconds later.

    torchrun takes one that the system gives to whoever asks for any, as do all connections of other runs meanwhile.
    ``candidates`` are by default some below those; where there are none, or all are taken, any free port is returned.
    """
    for port in _below_given() if candidates is None else candidates:
        try:
            return _bound(port)
        except OSError:
            continue
    return _bound(0)


def _below_given() -> list[int]:
    try:
        first = int(_GIVEN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    ports = range(max(first - _SPAN, first // 2 + 1, 1024), first)
    return SystemRandom().sample(ports, min(_MOST_TRIES, len(ports)))


def _bound(port: int) -> int:
    """The port, if it can be bound; raises `OSError` else."""
    with socket.socket() as free:
        free.bind(("", port))
        number: int = free.getsockname()[1]
        return number
