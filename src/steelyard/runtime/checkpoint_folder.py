"""The folder of checkpoints of a run: which are complete, the newest one, and those that may go. Imports no torch.

| path                           | what                                                                           |
|--------------------------------|--------------------------------------------------------------------------------|
| ``step-00000100/``             | a complete checkpoint                                                          |
| ``step-00000100/run.json``     | `CheckpointInfo`: the run's progress, and every other file with its size       |
| ``.step-00000100.part/``       | one that is being written, or was when the run was killed                      |
| ``.step-00000100.old/``        | one that is being deleted                                                      |

A checkpoint gets its name last, by a rename, when every file of it is on the disk: a kill at any instant leaves the
complete ones as they were.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from steelyard.errors import InvalidCheckpointError
from steelyard.files import read_text
from steelyard.plan.plan import Plan

INFO_FILE = "run.json"
LATEST = "latest"
AUTO = "auto"
"""As latest, where there is a checkpoint; else the run starts anew."""
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(part|old)")


class CheckpointInfo(BaseModel):
    """What a checkpoint says of its run beside the tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    step: int
    """Steps that were trained."""
    num_samples: int
    """Samples that were read: the position in the data."""
    seed: int
    """Of first weights and sample order."""
    data_samples: int
    """Samples of one epoch, by which data is recognised."""
    model_name: str
    config_hash: str
    plan_hash: str
    """Under the same plan a run resumes bit by bit."""
    num_processes: int
    files: dict[str, int] = {}
    """Size in bytes of every file beside this one."""


def plan_hash(plan: Plan) -> str:
    """Identifies what a plan does; its predictions do not count."""
    content = plan.model_copy(update={"prediction": None}).model_dump_json(
        include={"model", "seq_len", "global_batch", "num_microbatches", "precision", "schedule", "stages"}
    )
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies once it is complete."""
    return folder / f"step-{step:08d}"


def part_path(folder: Path, step: int) -> Path:
    """Where it is written."""
    return folder / f".step-{step:08d}.part"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first; none where there is no folder."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named)]


def newest_intact(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a folder with all its files whole, and what is wrong with each newer one."""
    faults: list[str] = []
    for path in reversed(complete_checkpoints(folder)):
        try:
            read_info(path)
        except InvalidCheckpointError as error:
            faults.append(error.found)
        else:
            return path, faults
    return None, faults


def find_checkpoint(resume: str, folder: Path | None) -> tuple[Path, list[str]]:
    """The checkpoint that ``--resume`` names, and what is wrong with newer ones that ``latest`` passes over.

    ``resume`` is a checkpoint, a folder of checkpoints, or ``latest`` for the newest one of ``folder``. Raises
    `InvalidCheckpointError` where there is none that is whole.
    """
    if resume in (LATEST, AUTO) and folder is None:
        raise InvalidCheckpointError(
            field="--resume",
            found=f"{resume}, but no --checkpoint-dir",
            expected="the folder whose latest checkpoint to take",
            hint="give --checkpoint-dir DIR, or --resume DIR",
        )
    path = folder if resume == LATEST and folder is not None else Path(resume)
    if (path / INFO_FILE).exists() or _NAME.fullmatch(path.name):
        read_info(path)
        return path, []
    found, faults = newest_intact(path)
    if found is None:
        what = "; ".join(faults) or (f"no checkpoint in {path}" if path.is_dir() else f"no folder {path}")
        raise InvalidCheckpointError(
            field="--resume",
            found=what,
            expected="a checkpoint that steelyard wrote (step-…/), or a folder that holds some",
            hint="check the path, or train from the start without --resume",
        )
    return found, faults


def read_info(path: Path) -> CheckpointInfo:
    """What the checkpoint at ``path`` says of its run.

    Raises `InvalidCheckpointError` if it is no checkpoint of steelyard's, or a file of it is missing or truncated.
    """
    try:
        info = CheckpointInfo.model_validate_json(read_text(path / INFO_FILE))
    except (OSError, ValidationError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        reason = (
            f"no {INFO_FILE} in {path}" if missing else f"{path / INFO_FILE}, which is damaged or of another version"
        )
        raise _damaged(reason) from error
    for name, size in info.files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual is None:
            raise _damaged(f"{path} without its file {name}")
        if actual != size:
            raise _damaged(f"{file} with {actual} bytes instead of {size}")
    return info


def check_model(info: CheckpointInfo, path: Path, plan: Plan) -> None:
    """Raises `InvalidCheckpointError` if a checkpoint is not of the model of the plan."""
    chain = plan.chain()
    if info.config_hash != chain.config_hash:
        raise InvalidCheckpointError(
            field="--resume",
            found=f"{path} of {info.model_name} (config {info.config_hash})",
            expected=f"a checkpoint of {chain.name} (config {chain.config_hash}), the model of the plan",
            hint="resume it with a plan for its model",
        )


def _damaged(found: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(
        field="--resume",
        found=found,
        expected="a whole checkpoint that steelyard wrote",
        hint="resume from an earlier one (--resume latest passes over damaged ones)",
    )


def prepare_folder(folder: Path, *, resumed: Path | None) -> None:
    """Makes the folder and removes what a killed run left half written; one process calls it.

    ``resumed`` is the checkpoint that the run goes on from. Raises `InvalidCheckpointError` if the folder cannot be
    written, or holds checkpoints that the run does not go on from: they would be deleted in time.
    """
    _check_unclaimed(folder, resumed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        probe = folder / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidCheckpointError(
            field="--checkpoint-dir",
            found=f"{folder}: {error.strerror}",
            expected="a folder that can be written",
            hint="check the path and its permissions",
        ) from error


def _check_unclaimed(folder: Path, resumed: Path | None) -> None:
    existing = complete_checkpoints(folder)
    if resumed is not None and resumed.resolve().parent == folder.resolve():
        existing = [path for path in existing if path.name > resumed.name and _is_intact(path)]
    if existing:
        raise InvalidCheckpointError(
            field="--checkpoint-dir",
            found=f"{existing[-1].name} in {folder}, from which this run does not go on",
            expected="an empty folder, or one whose latest checkpoint the run goes on from",
            hint="go on with that run (--resume latest), or give another folder",
        )


def _is_intact(path: Path) -> bool:
    try:
        read_info(path)
    except InvalidCheckpointError:
        return False
    return True


def commit(folder: Path, info: CheckpointInfo, *, keep_last: int) -> Path:
    """Completes the checkpoint that was written under its part name, and deletes all but the last ``keep_last``.

    Every file must be on the disk. Raises `OSError` where the disk is full; then the others are as they were.
    """
    part = part_path(folder, info.step)
    files = {file.name: file.stat().st_size for file in sorted(part.iterdir()) if file.name != INFO_FILE}
    with (part / INFO_FILE).open("w", encoding="utf-8") as file:
        file.write(info.model_copy(update={"files": files}).model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(part)
    complete = checkpoint_path(folder, info.step)
    if complete.exists():
        _remove(complete)
    part.rename(complete)
    _sync_folder(folder)
    for old in complete_checkpoints(folder)[:-keep_last]:
        _remove(old)
    return complete


def _remove(path: Path) -> None:
    """Deletes a checkpoint that first loses its name, so that it never looks complete with half its files."""
    old = path.with_name(f".{path.name}.old")
    path.rename(old)
    shutil.rmtree(old)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
