"""Reports from the processes of a run to the launcher and to each other, as small JSON files in a folder of the run.

Each rank writes why it failed; a restarted run has a subfolder for each attempt. The first process of every host writes
its progress after each step.
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
"""File with the ends of the failed processes by rank, as seen by torchrun."""
END_S = 10.0
"""Seconds that torchrun gives the other processes to end after one has failed, before it kills them."""
_ATTEMPT = "attempt"
_MOST_WORDS_BYTES = 4096
TORCHRUN_RANK_VARIABLE = "STEELYARD_TORCHRUN_RANK"
"""Environment variable with the rank that torchrun assigned, if the process has been renumbered since."""
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of times that torchrun has restarted the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that ended one rank; ``time_s`` is the wall clock, to find the first of several."""

    rank: int
    exit_code: int
    time_s: float
    error_type: str
    message: str
    traceback: str
    is_final: bool = False
    """Whether another attempt would fail the same way: a user error, or an error with ``is_final`` set."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, exit_code: int) -> "Failure":
        """Return the failure for an exception."""
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
    """Return the rank that torchrun assigned, used to report failures; a process group may renumber the ranks."""
    return int(os.environ.get(TORCHRUN_RANK_VARIABLE) or os.environ.get("RANK", "0"))


def restart_count() -> int:
    """Number of times that torchrun has restarted the processes of this run."""
    return int(os.environ.get(RESTART_VARIABLE, "0"))


def failures_folder() -> Path | None:
    """Folder in which the processes of this run report failures; None if nobody collects them."""
    folder = os.environ.get(FAILURES_VARIABLE)
    return Path(folder) if folder else None


def begin_attempt() -> None:
    """Make the folder for the failures of this attempt, if somebody collects them."""
    folder = failures_folder()
    if folder is not None:
        _attempt_folder(folder, restart_count()).mkdir(exist_ok=True)


def write_failure(failure: Failure, folder: Path) -> None:
    """Write the failure of this attempt, atomically."""
    attempt = _attempt_folder(folder, restart_count())
    attempt.mkdir(exist_ok=True)
    write_file(attempt / f"rank{failure.rank}.json", json.dumps(asdict(failure)), "failure")


def read_failures(folder: Path, attempt: int | None = None) -> list[Failure]:
    """Return the failures that ranks wrote in an attempt (default: the last), earliest first."""
    if attempt is None:
        numbers = [int(path.name.removeprefix(_ATTEMPT)) for path in folder.glob(f"{_ATTEMPT}*")]
        attempt = max(numbers, default=0)
    found = [Failure(**json.loads(path.read_text())) for path in _attempt_folder(folder, attempt).glob("rank*.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def _attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"{_ATTEMPT}{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End of a failed process as seen by torchrun."""

    exit_code: int
    """Exit code; negative for a signal."""
    stood_still: bool = False
    """Whether the process did not end when torchrun asked it to, and was killed."""
    last_words: str = ""
    """End of its stderr; empty for rank 0 of a host, which writes to the launcher's stderr."""


def ends_of(failures: Mapping[int, "ProcessFailure"], folder: Path) -> dict[int, End]:
    """Return the ends of the failed processes by rank. torchrun kills those still alive after `END_S` seconds."""
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
    """Return the end of a process's stderr in its last attempt, if torchrun kept it in a file."""
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
    """Return the ends of failed processes by rank; empty if torchrun has written none."""
    path = folder / AGENT_FILE
    return {int(rank): End(**end) for rank, end in json.loads(path.read_text()).items()} if path.exists() else {}


_FILE = "standing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Number of steps trained, and number of steps in the newest complete checkpoint."""

    num_steps: int = 0
    num_saved: int = 0


def read_standing() -> Standing:
    """Return the progress last written on this host; no steps if there is none."""
    folder = failures_folder()
    path = None if folder is None else folder / _FILE
    return Standing() if path is None or not path.exists() else Standing(**json.loads(path.read_text()))


def write_standing(standing: Standing, environment: Mapping[str, str]) -> None:
    """Write the progress atomically, in the process that is the first of its host according to ``environment``."""
    folder = failures_folder()
    if folder is None or environment.get("LOCAL_RANK", "0") != "0":
        return
    part = folder / f"{_FILE}.part"  # not synced to the disk: this is after each step
    part.write_text(json.dumps(asdict(standing)))
    part.rename(folder / _FILE)
