"""Checkpoint folder of a run: finding complete checkpoints, committing new ones, deleting old ones. No torch import.

| path                           | content                                                                        |
|--------------------------------|--------------------------------------------------------------------------------|
| ``step-00000100/``             | a complete checkpoint                                                          |
| ``step-00000100/run.json``     | `CheckpointInfo`: progress of the run, size and checksum of every other file   |
| ``.step-00000100.part/``       | a checkpoint being written, or left by a killed run                            |
| ``.step-00000100.old/``        | a checkpoint being deleted                                                     |
| ``step-00000100.damaged/``     | a damaged checkpoint, moved aside                                              |
| ``.lock``                      | lock file, held by the run that writes to this folder                          |

A checkpoint is renamed to its final name only when all its files are on disk, so a kill at any moment leaves complete
checkpoints intact.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.errors import InvalidCheckpointError, UserError
from steelyard.files import read_text
from steelyard.plan.plan import Plan
from steelyard.runtime.data.rows import Rows
from steelyard.runtime.options import AUTO, TrainOptions

INFO_FILE = "run.json"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(part|old)")
_LOCK_FILE = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks."""
_CHUNK_BYTES = 1 << 20
Position = Annotated[int, Field(ge=0, lt=1 << 63)]


class CheckpointInfo(BaseModel):
    """Metadata of a run, stored in a checkpoint with the tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    step: Position
    """Number of trained steps."""
    num_samples: Position
    """Number of samples read: the position in the data."""
    seed: int
    """Seed of initial weights and sample order."""
    data_samples: int
    """Number of samples in one epoch, used to recognise the data."""
    options: dict[str, str] = {}
    """`TrainOptions.of_run`; empty in older files."""
    model_name: str
    config_hash: str
    plan_hash: str
    """Hash of the plan; a run resumes bit by bit only under the same plan."""
    num_processes: int
    files: dict[str, int] = {}
    """Size in bytes of every file except this one."""
    checksums: dict[str, int] = {}
    """CRC-32 of these files as written; empty in checkpoints from before checksums existed."""


def plan_hash(plan: Plan) -> str:
    """Return a hash of a plan's content without its predictions."""
    content = plan.model_copy(update={"prediction": None}).model_dump_json(
        include={"model", "seq_len", "global_batch", "num_microbatches", "precision", "schedule", "stages", "levers"}
    )
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint after ``step`` steps."""
    return folder / f"step-{step:08d}"


def part_path(folder: Path, step: int) -> Path:
    """Return the path where the checkpoint after ``step`` steps is written until it is complete."""
    return folder / f".step-{step:08d}.part"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first; none if the folder does not exist."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named)]


def newest_intact(folder: Path, known: Mapping[Path, str] | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files all have the right size, and the fault of each newer one.

    ``known`` holds faults already found inside files, by checkpoint.
    """
    faults: list[str] = []
    for path in reversed(complete_checkpoints(folder)):
        fault = _fault(path, known)
        if fault is None:
            return path, faults
        faults.append(fault)
    return None, faults


def find_checkpoint(
    resume: str, folder: Path | None, known: Mapping[Path, str] | None = None
) -> tuple[Path, list[str]]:
    """Return the checkpoint that ``--resume`` names, and the faults of newer, damaged checkpoints that were skipped.

    ``resume`` is a checkpoint, a folder of checkpoints, or ``latest`` for the newest one of ``folder``. ``known`` holds
    faults already found inside files, by checkpoint. Raises `InvalidCheckpointError` if there is no intact checkpoint.
    """
    if resume == LATEST and folder is None:
        raise InvalidCheckpointError(
            field="--resume",
            found=f"{resume}, but no --checkpoint-dir",
            expected="the folder with the checkpoint to resume from",
            hint="give --checkpoint-dir DIR, or --resume DIR",
        )
    path = folder if resume == LATEST and folder is not None else Path(resume)
    if (path / INFO_FILE).exists() or _NAME.fullmatch(path.name):
        _check(path, known)
        return path, []
    found, faults = newest_intact(path, known)
    if found is None:
        what = "; ".join(faults) or (f"no checkpoint in {path}" if path.is_dir() else f"no folder {path}")
        raise InvalidCheckpointError(
            field="--resume",
            found=what,
            expected="a checkpoint written by steelyard (step-…/), or a folder of checkpoints",
            hint="check the path, or train from the start without --resume",
        )
    return found, faults


def checkpoint_to_resume(
    options: TrainOptions, known: Mapping[Path, str] | None = None, *, is_restart: bool = False
) -> tuple[Path, list[str]] | None:
    """Return the checkpoint to resume from and notices about it, or None to start from step 0.

    A run restarted by torchrun (``is_restart``) resumes from its own newest checkpoint.
    """
    resume: str | None = options.resume
    if options.no_resume and not is_restart:
        return None
    if options.checkpoint_dir is not None and (is_restart or resume == AUTO):
        newest, faults = newest_intact(options.checkpoint_dir, known)
        resume = LATEST if newest is not None or faults else None if resume == AUTO or options.no_resume else resume
    if resume is None or (resume == AUTO and options.checkpoint_dir is None):
        return None
    path, faults = find_checkpoint(resume, options.checkpoint_dir, known)
    return path, [f"skipped a damaged checkpoint: {fault}" for fault in faults]


def read_info(path: Path) -> CheckpointInfo:
    """Read the metadata of the checkpoint at ``path``.

    Raises `InvalidCheckpointError` if it is not a steelyard checkpoint, or if a file is missing or has the wrong size.
    """
    try:
        info = CheckpointInfo.model_validate_json(read_text(path / INFO_FILE))
    except (OSError, ValidationError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        reason = (
            f"no {INFO_FILE} in {path}" if missing else f"{path / INFO_FILE}, which is damaged or of another version"
        )
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        raise damaged(
            reason + (f" ({first['loc'][0]}: {str(first['input'])[:40]})" if first and len(first["loc"]) == 1 else "")
        ) from error
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != info.step:
        raise damaged(f"{path / INFO_FILE} of step {info.step}, which differs from the name of its folder")
    for name, size in info.files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual is None:
            raise damaged(f"{path} without its file {name}")
        if actual != size:
            raise damaged(f"{file} with {actual} bytes instead of {size}")
    return info


def _check(path: Path, known: Mapping[Path, str] | None) -> None:
    if known and path in known:
        raise damaged(known[path])
    read_info(path)


def content_fault(path: Path, *, index: int, num_shares: int) -> str | None:
    """Return the fault of the first damaged file in the ``index``-th share of a checkpoint's files, or None.

    The shares have about equal bytes. The files are read completely, so use as many processes as possible, one per
    share.
    """
    info = read_info(path)
    loads = [0] * num_shares
    for name in sorted(info.checksums, key=lambda name: -info.files.get(name, 0)):
        share = loads.index(min(loads))
        loads[share] += info.files.get(name, 0)
        if share != index:
            continue
        try:
            is_whole = file_checksum(path / name) == info.checksums[name]
        except OSError as error:
            return f"{path / name}: {error.strerror}"
        if not is_whole:
            return f"{path / name}, whose content has changed since it was written"
    return None


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            checksum = zlib.crc32(chunk[:count], checksum)
    return checksum


def check_model(info: CheckpointInfo, path: Path, plan: Plan) -> None:
    """Raise `InvalidCheckpointError` if a checkpoint is not of the plan's model."""
    chain = plan.chain()
    if info.config_hash != chain.config_hash:
        raise InvalidCheckpointError(
            field="--resume",
            found=f"{path} of {info.model_name} (config {info.config_hash})",
            expected=f"a checkpoint of {chain.name} (config {chain.config_hash}), the model of the plan",
            hint="resume it with a plan for its model, or start a new run in another --checkpoint-dir",
        )


def changes(
    info: CheckpointInfo, path: Path, options: TrainOptions, data: str | Path | Rows, data_samples: int | None = None
) -> dict[str, str]:
    """Return the options that differ from those of the run that wrote the checkpoint at ``path``: a sentence per name.

    Data is compared by name and, if known, by number of samples. Raises `UserError` for changes that are not allowed
    and, if ``data_samples`` is given, if all steps are already done.
    """
    if info.seed != options.seed:
        raise InvalidCheckpointError(
            field="--seed",
            found=f"{options.seed}",
            expected=f"{info.seed}, which ordered the samples of the checkpoint's run",
            hint=f"resume with --seed {info.seed}",
        )
    old, new = info.options, options.of_run(data)
    if data_samples not in (None, info.data_samples):
        old = {**old, "data": f"{old.get('data', 'data')} of {info.data_samples} samples"}
        new["data"] += f" of {data_samples} samples"
    found = {name: f"{name} is {new[name]}, was {value}" for name, value in old.items() if value != new[name]}
    asked = sorted({*options.allowed_changes, *found})
    if len(asked) > len(options.allowed_changes):
        raise UserError(
            field="--resume",
            found=f"{path} of a run with other options: {'; '.join(found.values())}",
            expected="the options of that run, or permission to change them",
            hint=f"to continue with the new options add --allow-change {','.join(asked)}; to start a new run add "
            "--no-resume",
        )
    if data_samples is not None and info.step >= options.steps:  # else the checkpoint may still be found damaged
        raise UserError(
            field="--steps",
            found=f"{options.steps}, and a checkpoint after step {info.step} ({path})",
            expected="more steps than the checkpoint has",
            hint="raise --steps and add --allow-change steps; to start a new run add --no-resume",
        )
    return found


def damaged(found: str) -> InvalidCheckpointError:
    """Return the error for a damaged checkpoint."""
    return InvalidCheckpointError(
        field="--resume",
        found=found,
        expected="an intact checkpoint written by steelyard",
        hint="resume from an earlier one (--resume latest skips damaged ones)",
    )


def lock_folder(folder: Path) -> TextIO:
    """Create and lock the folder against other runs until the result is closed or this process ends.

    Raises `InvalidCheckpointError` if another run holds the lock, or if the folder is not writable. A file system
    without locks is left unlocked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return file
        file.seek(0)
        holder = file.read()
        file.close()
        if not isinstance(error, BlockingIOError):
            raise _not_writable(folder, error) from error
        raise InvalidCheckpointError(
            field="--checkpoint-dir",
            found=f"{folder}, to which another run is writing ({holder})",
            expected="a folder used only by this run",
            hint="give another folder, or wait until that run has ended",
        ) from None
    return file


def prepare_folder(
    folder: Path, *, resumed: Path | None, known: Mapping[Path, str] | None = None, sets_aside: bool = False
) -> None:
    """Remove partial checkpoints of a killed run and move damaged ones aside; called by one process.

    ``resumed`` is the checkpoint that the run resumes from. Newer checkpoints that are damaged (wrong file sizes, or a
    fault in ``known``) are moved aside because they would count among the last ones kept. With ``sets_aside``, a new
    run moves existing checkpoints into a subfolder. Raises `InvalidCheckpointError` if the folder is not writable, or
    holds checkpoints that the run does not resume from, because the run would delete them later.
    """
    newer = foreign = complete_checkpoints(folder)
    if resumed is not None and resumed.resolve().parent == folder.resolve():
        names = [path.name for path in newer]
        newer = newer[names.index(resumed.name) + 1 :] if resumed.name in names else newer
        foreign = [path for path in newer if _fault(path, known) is None]
    if foreign and sets_aside:
        aside = folder / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for path in foreign:
            path.rename(aside / path.name)
        newer = []
    elif foreign:
        raise InvalidCheckpointError(
            field="--checkpoint-dir",
            found=f"{foreign[-1].name} in {folder}, from which this run does not resume",
            expected="an empty folder, or one whose latest checkpoint the run resumes from",
            hint="resume that run (--resume latest), choose another folder, or start a new run with --no-resume",
        )
    try:
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        for path in newer:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        probe = folder / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> InvalidCheckpointError:
    return InvalidCheckpointError(
        field="--checkpoint-dir",
        found=f"{folder}: {error.strerror}",
        expected="a writable folder",
        hint="check the path and its permissions",
    )


def _fault(path: Path, known: Mapping[Path, str] | None) -> str | None:
    try:
        _check(path, known)
    except InvalidCheckpointError as error:
        return error.found
    return None


def commit(folder: Path, info: CheckpointInfo, checksums: Mapping[str, int], *, keep_last: int) -> Path:
    """Complete the checkpoint written under its part name, and delete all checkpoints except the last ``keep_last``.

    Every file must be on disk; ``checksums`` holds the CRC-32 of the bytes written to each. Raises `OSError` if the
    disk is full; the other checkpoints are then unchanged.
    """
    part = part_path(folder, info.step)
    files = {file.name: file.stat().st_size for file in sorted(part.iterdir()) if file.name != INFO_FILE}
    with (part / INFO_FILE).open("w", encoding="utf-8") as file:
        known = {name: checksums[name] for name in files if name in checksums}  # skips files added by the file system
        content: dict[str, Any] = {"files": files, "checksums": known}
        file.write(info.model_copy(update=content).model_dump_json(indent=2) + "\n")
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
    """Rename and then delete a checkpoint, so that a partly deleted one never looks complete."""
    old = path.with_name(f".{path.name}.old")
    path.rename(old)
    shutil.rmtree(old)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
