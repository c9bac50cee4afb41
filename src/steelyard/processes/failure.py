"""How a process of a run tells the launcher why it failed: one small JSON file per rank, in a folder of the run."""

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

FAILURES_VARIABLE = "STEELYARD_FAILURES"
"""Environment variable that names the folder; absent where torchrun was started by hand."""
AGENT_FILE = "agent.json"
"""Exit codes of the failed processes by rank, as torchrun saw them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that ended one rank; ``time_s`` is the wall clock, to find the first of several."""

    rank: int
    exit_code: int
    time_s: float
    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, *, rank: int, exit_code: int) -> "Failure":
        """The failure that an exception means."""
        return cls(
            rank=rank,
            exit_code=exit_code,
            time_s=time.time(),
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )


def failures_folder() -> Path | None:
    """Where this process reports a failure; None where nobody collects it."""
    folder = os.environ.get(FAILURES_VARIABLE)
    return Path(folder) if folder else None


def write_failure(failure: Failure, folder: Path) -> None:
    """Writes the failure as a whole or not at all."""
    part = folder / f"rank{failure.rank}.part"
    part.write_text(json.dumps(asdict(failure)))
    part.rename(folder / f"rank{failure.rank}.json")


def read_failures(folder: Path) -> list[Failure]:
    """The failures that ranks wrote, the earliest first."""
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def write_exit_codes(exit_codes: dict[int, int], folder: Path) -> None:
    """Writes the exit codes of failed processes by rank."""
    (folder / AGENT_FILE).write_text(json.dumps(exit_codes))


def read_exit_codes(folder: Path) -> dict[int, int]:
    """The exit codes of failed processes by rank; negative for a signal."""
    path = folder / AGENT_FILE
    return {int(rank): code for rank, code in json.loads(path.read_text()).items()} if path.exists() else {}
