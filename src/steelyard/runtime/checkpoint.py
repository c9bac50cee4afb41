"""Asynchronous checkpoints of a run, written with `torch.distributed.checkpoint` and readable under any plan.

A save copies the state to CPU memory while training waits. A thread of every rank then writes its part while training
continues. The copy and the writing take as much memory as the rank's share of parameters and optimizer states. Only one
save runs at a time: the next one waits for it. The first rank completes a checkpoint when all ranks have written (see
`steelyard.runtime.checkpoint_folder`), so all ranks must see the same folder.

A checkpoint may come from anyone, so none of its code runs. The description of its tensors (``.metadata``) is a pickle,
which can name any function to call. The reader allows only the names that such descriptions need; `torch` reads the
tensors themselves with ``weights_only``. The description may not contain objects other than tensors, because `torch`
unpickles them without checks; steelyard writes none.

`save_checkpoint` and `load_checkpoint` serve a `ParallelModel` in the user's own training loop.
"""

import errno
import io
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim import Optimizer
from torch.serialization import _get_layout

from steelyard.arguments import checked
from steelyard.errors import InvalidCheckpointError, first_line
from steelyard.plan.plan import Plan
from steelyard.runtime.checkpoint_folder import (
    CheckpointInfo,
    check_model,
    commit,
    content_fault,
    damaged,
    part_path,
    plan_hash,
    prepare_folder,
    read_info,
)
from steelyard.runtime.loss_scale import PREFIX
from steelyard.runtime.parallel_model import ParallelModel
from steelyard.runtime.state import RunState, random_states, set_random_states
from steelyard.units import format_bytes

METADATA_FILE = ".metadata"


def _memory_format(of: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Return the memory format of a name, in place of ``getattr``, as which Python 3.11.2 pickles enums."""
    if of is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it refers to an attribute {name} of {of}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


_NAMED_BY_TORCH = (
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    _get_layout,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in _NAMED_BY_TORCH},
    ("torch", "Size"): torch.Size,
    ("builtins", "getattr"): _memory_format,
    **{("torch", str(each).partition(".")[2]): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}
"""Objects that a description may name, by module and name. The path it was written to is unused and is not opened."""


class CheckpointReader(FileSystemReader):
    """A reader for `torch.distributed.checkpoint.load` that creates only tensors from an untrusted checkpoint.

    Every tensor has a size and lies in a file of the folder. Raises `InvalidCheckpointError` if the description is
    missing, damaged or names an object that is not allowed. Errors in the tensor files are raised by torch.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        file = path / METADATA_FILE
        try:
            with file.open("rb") as opened:
                self._metadata = _checked(_Unpickler(opened).load())
        except Exception as error:  # a truncated or forged pickle can raise anything
            raise damaged(f"{file}: {_words(error)}") from error

    def read_metadata(self) -> Metadata:
        """Return the description. torch looks for one per rank only if this method takes keyword arguments."""
        return self._metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs") from None


def _checked(found: Any) -> Metadata:
    if not isinstance(found, Metadata):
        raise TypeError(f"it describes a {type(found).__name__}, not a checkpoint")
    found.storage_meta = StorageMeta()
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.size, torch.Size):
            raise TypeError(f"it does not describe {name} as a tensor")
    for place in found.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it refers to a file outside its folder, {place.relative_path}")
    return found


def _words(error: BaseException) -> str:
    return first_line(error) or type(error).__name__


Result = TypeVar("Result")

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Checkpointer:
    """Writer of a run's checkpoints that keeps the newest few; a collective object, created on every rank.

    Raises `InvalidCheckpointError` on every rank if the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        resumed: Path | None,
        known: Mapping[Path, str],
        timeout_s: float,
        sets_aside: bool = False,
    ) -> None:
        self._folder, self._keep_last = folder, keep_last
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        """Process group separate from those of training, because training collectives run at the same time."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.last_step = 0
        """Step of the last checkpoint that this object completed, as known on this rank; 0 before the first."""
        on_first_rank(lambda: prepare_folder(folder, resumed=resumed, known=known, sets_aside=sets_aside), self._group)

    def save(self, state: RunState, info: CheckpointInfo, device: torch.device, *, folder: Path | None = None) -> None:
        """Start writing a checkpoint, to ``folder`` if given; the state may change once this returns.

        Waits for the previous save. Raises `InvalidCheckpointError` if that one failed.
        """
        self.wait()
        folder = folder or self._folder
        part = part_path(folder, info.step)
        state.fill_optimizers()  # optimizer states are empty if all steps so far were skipped
        tensors = state.tensors() | random_states(device)
        writer = dcp.FileSystemWriter(part)
        writer.fs = files = SummedFiles()
        try:
            written = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
        except (CheckpointException, OSError) as error:
            raise _not_written(error, part) from error
        state.round()
        self._pending = self._thread.submit(self._complete, written, folder, info, files.checksums)

    def check(self) -> None:
        """Raise `InvalidCheckpointError` if a save has failed; return immediately if it is still running."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the running save is complete. Raises `InvalidCheckpointError` if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _complete(self, written: Future[object], folder: Path, info: CheckpointInfo, checksums: dict[str, int]) -> None:
        try:
            written.result()
            found: list[dict[str, int]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(checksums, found, dst=0, group=self._group)
            if found is not None:
                merged = {name: checksum for each in found for name, checksum in each.items()}
                commit(folder, info, merged, keep_last=self._keep_last)
            dist.barrier(self._group)  # a rank that exits earlier could end the first rank before the rename
            self.last_step = info.step
        except (CheckpointException, OSError) as error:
            raise _not_written(error, part_path(folder, info.step)) from error


class SummedFiles(FileSystem):
    """Files with a CRC-32 computed from the written bytes, which later reveals damage on the disk."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Open a file for sequential writing; overrides torch's method."""
        assert mode == "wb", "made for writing"
        with _SummedFile(io.FileIO(path, mode)) as file:
            yield file
        self.checksums[Path(path).name] = file.checksum

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file and its checksum; overrides torch's method."""
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _SummedFile(io.BufferedWriter):
    checksum = 0

    def write(self, content: Any) -> int:
        self.checksum = zlib.crc32(content, self.checksum)
        return super().write(content)


def whole_checkpoint(
    find: Callable[[Mapping[Path, str]], tuple[Path, list[str]] | None],
) -> tuple[tuple[Path, list[str]] | None, dict[Path, str]]:
    """Return the first checkpoint offered by ``find`` whose file contents are intact, with its notices, and the faults.

    ``find`` runs on the first rank and receives the faults found so far inside files, by checkpoint; these faults are
    the second result. A collective call: every rank reads a share of the files of each checkpoint that ``find`` offers.
    """
    known: dict[Path, str] = {}
    while (found := on_first_rank(lambda: find(known))) is not None:
        faults: list[str | None] = [None] * dist.get_world_size()
        mine = content_fault(found[0], index=dist.get_rank(), num_shares=len(faults))
        dist.all_gather_object(faults, mine)
        fault = next((each for each in faults if each is not None), None)
        if fault is None:
            break
        known[found[0]] = fault
    return found, known


def read_checkpoint(path: Path, state: RunState, plan: Plan, device: torch.device) -> CheckpointInfo:
    """Read a checkpoint, written under any plan, into the tensors of ``state``; a collective call.

    Under the same plan and number of processes the random generators are restored too, so the run resumes bit by bit.
    Raises `InvalidCheckpointError` if the checkpoint is damaged, or belongs to another model or optimizer.
    """
    info = read_info(path)
    check_model(info, path, plan)
    reader = CheckpointReader(path)
    _read_state(reader, state)
    if info.plan_hash == plan_hash(plan) and info.num_processes == dist.get_world_size():
        found = random_states(device)
        _read(reader, found)
        set_random_states(found, device)
    return info


def _read_state(reader: CheckpointReader, state: RunState) -> None:
    state.fill_optimizers()
    stored = reader.read_metadata().state_dict_metadata
    if left := state.unread(stored):
        raise InvalidCheckpointError(
            field="--resume",
            found=f"{', '.join(left[:3])}{', …' * (len(left) > 3)} in {reader.path}",
            expected="only tensors that the model and the optimizer of this run have",
            hint="resume a checkpoint of the same model and optimizer",
        )
    for copy in range(state.names.num_copies):
        tensors = state.tensors(copy=copy)
        # a run in another precision stored no loss scale
        _read(reader, {name: each for name, each in tensors.items() if name in stored or not name.startswith(PREFIX)})
        state.take(tensors, copy=copy)


def _read(reader: CheckpointReader, tensors: dict[str, Tensor]) -> None:
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        size = tuple(stored[name].size) if name in stored else None
        if size != tuple(tensor.shape):
            found = (
                f"{name} of shape {list(size)} in {reader.path}" if size is not None else f"no {name} in {reader.path}"
            )
            raise InvalidCheckpointError(
                field="--resume",
                found=found,
                expected=f"{name} of shape {list(tensor.shape)}",
                hint="resume a checkpoint of the same model and optimizer",
            )
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        cause = _first_cause(error)
        is_foreign = isinstance(cause, UnpicklingError)  # torch's text tells how to run the code
        reason = "its files contain objects other than tensors" if is_foreign else _words(cause)
        raise damaged(f"{reader.path}: {reason}") from error
    except (OSError, EOFError) as error:
        raise damaged(f"{reader.path}: {_words(error)}") from error


def _not_written(error: BaseException, part: Path) -> InvalidCheckpointError:
    cause = _first_cause(error)
    step = part.name.removeprefix(".").removesuffix(".part")
    reason, expected = _words(cause), "a folder that stays writable"
    if getattr(cause, "errno", None) in _FULL_DISK or "inline_container" in str(cause):
        free = format_bytes(shutil.disk_usage(part.parent).free)
        reason = f"the disk is full ({free} free), or a file limit is reached"
        expected = "space for --keep-last checkpoints plus one"
    return InvalidCheckpointError(
        field="--checkpoint-dir",
        found=f"{step} could not be written to {part.parent}: {reason}",
        expected=expected,
        hint="free disk space and resume with --resume latest (earlier checkpoints are complete)",
    )


def _first_cause(error: BaseException) -> BaseException:
    """Return one rank's error out of those that `torch.distributed.checkpoint` collects."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def on_first_rank(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Run ``work`` on the first rank; return its result, or raise its `InvalidCheckpointError`, on every rank."""
    found: list[tuple[Result | None, dict[str, str] | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            found[0] = (work(), None)
        except InvalidCheckpointError as error:
            found[0] = (None, error.parts())
    dist.broadcast_object_list(found, src=0, group=group)
    result, mistake = found[0]
    if mistake is not None:
        raise InvalidCheckpointError(**mistake)
    return cast("Result", result)


_NUM_STEPS = "steelyard.num_steps"


@checked
def save_checkpoint(trainer: ParallelModel, optimizers: Iterable[Optimizer], folder: str | Path) -> None:
    """Write parameters, optimizer states and the number of steps to a folder; a collective call.

    The folder holds a `torch.distributed.checkpoint` with the names of `steelyard.runtime.state`. The checkpoint that
    was in it stays until the new one is written. Raises `InvalidCheckpointError` if the folder cannot be written.
    """
    steps = {_NUM_STEPS: torch.tensor(trainer.num_steps)}
    state, part = RunState(trainer, optimizers), Path(folder) / ".checkpoint.part"
    state.fill_optimizers()
    on_first_rank(lambda: shutil.rmtree(part, ignore_errors=True))  # of a save that was interrupted
    try:
        dcp.save(state.tensors() | steps, checkpoint_id=part)
    except (CheckpointException, OSError) as error:
        raise _not_written(error, part) from error
    state.round()
    on_first_rank(lambda: _replace_files(part, Path(folder)))


def _replace_files(part: Path, folder: Path) -> None:
    """Move the files of a complete checkpoint to ``folder``, so that it never describes the files of two."""
    (folder / METADATA_FILE).unlink(missing_ok=True)
    for old in folder.glob(f"*{DEFAULT_SUFFIX}"):
        old.unlink()
    for file in sorted(part.iterdir(), key=lambda file: file.name == METADATA_FILE):
        file.replace(folder / file.name)
    part.rmdir()


@checked
def load_checkpoint(trainer: ParallelModel, optimizers: Iterable[Optimizer], folder: str | Path) -> None:
    """Load a checkpoint of `save_checkpoint`, written under any plan of the model, in place; a collective call."""
    steps, reader = {_NUM_STEPS: torch.tensor(0)}, CheckpointReader(Path(folder))
    _read_state(reader, RunState(trainer, optimizers))
    _read(reader, steps)
    trainer.num_steps = int(steps[_NUM_STEPS])
