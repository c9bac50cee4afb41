"""What the processes of a run tell the launcher and each other, in small JSON files of a folder of the run.

Each rank writes why it failed; a run that torchrun starts again has a folder inside for each attempt. The first process
of every host writes after each step how far the run has come.
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
"""Environment variable that names the folder; absent where torchrun was started by hand."""
AGENT_FILE = "agent.json"
"""How the failed processes ended by rank, as torchrun saw it."""
END_S = 10.0
"""Seconds that torchrun gives the other processes to end when one has failed, before it kills them."""
_ATTEMPT = "attempt"
_MOST_WORDS_BYTES = 4096
TORCHRUN_RANK_VARIABLE = "STEELYARD_TORCHRUN_RANK"
"""Environment variable with the rank that torchrun gave, where another was given since."""
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started the processes again."""


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
    """Another attempt would fail alike: a mistake of the user, or an error that says so of itself."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, exit_code: int) -> "Failure":
        """The failure that an exception means."""
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
    """The rank that torchrun gave this process, by which its failure is reported; a group may number them anew."""
    return int(os.environ.get(TORCHRUN_RANK_VARIABLE) or os.environ.get("RANK", "0"))


def restart_count() -> int:
    """How often torchrun has started the processes of this run again."""
    return int(os.environ.get(RESTART_VARIABLE, "0"))


def failures_folder() -> Path | None:
    """Where the processes of this run report failures; None where nobody collects them."""
    folder = os.environ.get(FAILURES_VARIABLE)
    return Path(folder) if folder else None


def begin_attempt() -> None:
    """Makes the folder for the failures of this attempt, where somebody collects them."""
    folder = failures_folder()
    if folder is not None:
        _attempt_folder(folder, restart_count()).mkdir(exist_ok=True)


def write_failure(failure: Failure, folder: Path) -> None:
    """Writes the failure, of this attempt, as a whole or not at all."""
    attempt = _attempt_folder(folder, restart_count())
    attempt.mkdir(exist_ok=True)
    write_file(attempt / f"rank{failure.rank}.json", json.dumps(asdict(failure)), "failure")


def read_failures(folder: Path, attempt: int | None = None) -> list[Failure]:
    """The failures that ranks wrote in an attempt, by default the last one; the earliest first."""
    if attempt is None:
        numbers = [int(path.name.removeprefix(_ATTEMPT)) for path in folder.glob(f"{_ATTEMPT}*")]
        attempt = max(numbers, default=0)
    found = [Failure(**json.loads(path.read_text())) for path in _attempt_folder(folder, attempt).glob("rank*.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def _attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"{_ATTEMPT}{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How torchrun saw a failed process end."""

    exit_code: int
    """Negative for a signal."""
    stood_still: bool = False
    """It did not end when torchrun asked it to, and was killed."""
    last_words: str = ""
    """The end of what it wrote to stderr; nothing of rank 0 of a host, which writes to the launcher's own."""


def ends_of(failures: Mapping[int, "ProcessFailure"], folder: Path) -> dict[int, End]:
    """How the failed processes ended. torchrun kills those that do not end within `END_S` seconds of its asking."""
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
    """The end of what a process wrote to stderr in its last attempt, where torchrun kept it in a file."""
    attempts = sorted(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime_ns)
    if not attempts:
        return ""
    with attempts[-1].open("rb") as stream:
        stream.seek(max(0, attempts[-1].stat().st_size - _MOST_WORDS_BYTES))
        return stream.read().decode(errors="replace").rstrip()


def write_ends(ends: dict[int, End], folder: Path) -> None:
    """Writes how failed processes ended, by rank."""
    (folder / AGENT_FILE).write_text(json.dumps({rank: asdict(end) for rank, end in ends.items()}))


def read_ends(folder: Path) -> dict[int, End]:
    """How failed processes ended, by rank; nothing where torchrun did not come to say it."""
    path = folder / AGENT_FILE
    return {int(rank): End(**end) for rank, end in json.loads(path.read_text()).items()} if path.exists() else {}


_FILE = "standing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Steps of the run that were trained, and those of them that the newest complete checkpoint holds."""

    num_steps: int = 0
    num_saved: int = 0


def read_standing() -> Standing:
    """What was written last on this host; no steps where nothing was."""
    folder = failures_folder()
    path = None if folder is None else folder / _FILE
    return Standing() if path is None or not path.exists() else Standing(**json.loads(path.read_text()))


def write_standing(standing: Standing, environment: Mapping[str, str]) -> None:
    """Writes it, as a whole or not at all, in the process that ``environment`` says is the first of its host."""
    folder = failures_folder()
    if folder is None or environment.get("LOCAL_RANK", "0") != "0":
        return
    part = folder / f"{_FILE}.part"  # not synced to the disk: this is after each step
    part.write_text(json.dumps(asdict(standing)))
    part.rename(folder / _FILE)
