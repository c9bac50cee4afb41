"""Messages of the processes of a run to the launcher and each other, as small JSON files in a folder of the run.

Each rank writes why it failed; every attempt of torchrun has its own subfolder. The first process of every host writes
the progress of the run after each step.
"""

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.errors import UserError
from steelyard.output import write_file

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


FAILURES_VARIABLE = "STEELYARD_FAILURES"
"""Environment variable that names the folder; absent if torchrun was started by hand."""
AGENT_FILE = "agent.json"
"""File with the end of each failed process by rank, as torchrun saw it."""
END_S = 10.0
"""Seconds that torchrun gives the other processes to end after one has failed, before it kills them."""
_ATTEMPT = "attempt"
_MOST_WORDS_BYTES = 4096
TORCHRUN_RANK_VARIABLE = "STEELYARD_TORCHRUN_RANK"
"""Environment variable with the rank that torchrun assigned, set if the process has another rank since."""
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of restarts by torchrun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Error that ended one rank; ``time_s`` is wall-clock time, to find the first of several."""

    rank: int
    exit_code: int
    time_s: float
    error_type: str
    message: str
    traceback: str
    is_final: bool = False
    """Whether another attempt would fail the same way: a mistake of the user, or an error that is marked so."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, exit_code: int) -> "Failure":
        """Return the failure that an exception means."""
        return cls(
            rank=rank,
            exit_code=exit_code,
            time_s=time.time(),
            error_type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            is_final=bool(getattr(error, "is_final", isinstance(error, UserError))),
        )


class RankFailedError(RuntimeError):
    """A process of the run failed; the message shows the error of the one that failed first."""

    exit_code = 1

    def __init__(self, message: str, failure: Failure | None) -> None:
        super().__init__(message)
        self.failure = failure


def torchrun_rank() -> int:
    """Rank that torchrun assigned to this process, used to report its failure; a group may renumber ranks."""
    return int(os.environ.get(TORCHRUN_RANK_VARIABLE) or os.environ.get("RANK", "0"))


def restart_count() -> int:
    """Number of times torchrun has restarted the processes of this run."""
    return int(os.environ.get(RESTART_VARIABLE, "0"))


def failures_folder() -> Path | None:
    """Folder in which the processes of this run report failures; None if nobody collects them."""
    folder = os.environ.get(FAILURES_VARIABLE)
    return Path(folder) if folder else None


def begin_attempt() -> None:
    """Make the folder for the failures of this attempt, if failures are collected."""
    folder = failures_folder()
    if folder is not None:
        _attempt_folder(folder, restart_count()).mkdir(exist_ok=True)


def write_failure(failure: Failure, folder: Path) -> None:
    """Write the failure under this attempt, atomically."""
    attempt = _attempt_folder(folder, restart_count())
    attempt.mkdir(exist_ok=True)
    write_file(attempt / f"rank{failure.rank}.json", json.dumps(asdict(failure)), "failure")


def read_failures(folder: Path) -> list[Failure]:
    """Return the failures that ranks wrote in the last attempt, earliest first."""
    last = max((int(path.name.removeprefix(_ATTEMPT)) for path in folder.glob(f"{_ATTEMPT}*")), default=0)
    found = [Failure(**json.loads(path.read_text())) for path in _attempt_folder(folder, last).glob("rank*.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def _attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"{_ATTEMPT}{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End of a failed process as torchrun saw it."""

    exit_code: int
    """Exit code; negative for a signal."""
    stood_still: bool = False
    """Whether the process did not end when torchrun asked it to, and was killed."""
    last_words: str = ""
    """Last part of the process's stderr; empty for local rank 0, which writes to the launcher's stderr."""


def ends_of(failures: Mapping[int, "ProcessFailure"], folder: Path) -> dict[int, End]:
    """Return the end of each failed process by rank.

    torchrun kills processes that do not end within `END_S` seconds of its request.
    """
    first_s = min(failure.timestamp for failure in failures.values())
    return {
        rank: End(
            exit_code=failure.exitcode,
            stood_still=failure.exitcode == -signal.SIGKILL and failure.timestamp - first_s >= END_S - 1,
            last_words=_last_words(folder, failure.local_rank),
        )
        for rank, failure in failures.items()
    }


def _last_words(logs: Path, local_rank: int) -> str:
    """Return the last part of a process's stderr in its last attempt, if torchrun kept it in a file."""
    attempts = sorted(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime_ns)
    if not attempts:
        return ""
    with attempts[-1].open("rb") as stream:
        stream.seek(max(0, attempts[-1].stat().st_size - _MOST_WORDS_BYTES))
        return stream.read().decode(errors="replace").rstrip()


def write_ends(ends: dict[int, End], folder: Path) -> None:
    """Write the ends of failed processes by rank."""
    (folder / AGENT_FILE).write_text(json.dumps({rank: asdict(end) for rank, end in ends.items()}))


def read_ends(folder: Path) -> dict[int, End]:
    """Return the ends of failed processes by rank; empty if torchrun wrote none."""
    path = folder / AGENT_FILE
    return {int(rank): End(**end) for rank, end in json.loads(path.read_text()).items()} if path.exists() else {}


_FILE = "standing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Number of steps trained, and of those that the newest complete checkpoint holds."""

    num_steps: int = 0
    num_saved: int = 0


def read_standing() -> Standing:
    """Return the standing written last on this host; zero steps if there is none."""
    folder = failures_folder()
    path = None if folder is None else folder / _FILE
    return Standing() if path is None or not path.exists() else Standing(**json.loads(path.read_text()))


def write_standing(standing: Standing, environment: Mapping[str, str]) -> None:
    """Write the standing atomically, if ``environment`` says that this process is the first of its host."""
    folder = failures_folder()
    if folder is None or environment.get("LOCAL_RANK", "0") != "0":
        return
    part = folder / f"{_FILE}.part"  # not synced to the disk: this is after each step
    part.write_text(json.dumps(asdict(standing)))
    part.rename(folder / _FILE)
