"""How far a run has come, for torchrun's agent and for processes that are started again: one small file on every host.

The first process of a host writes it after every step, into the folder where failures are reported.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from steelyard.processes.failure import failures_folder

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
    part = folder / f"{_FILE}.part"
    part.write_text(json.dumps(asdict(standing)))
    part.rename(folder / _FILE)
