"""Reads a checkpoint of `torch.distributed.checkpoint` that anyone may have written: no code of it runs.

The description of its tensors (``.metadata``) is a pickle, which may name any function to be called. Here it may name
what such descriptions are made of and nothing else; the tensors themselves `torch` reads with ``weights_only``. Objects
that are no tensors, which `torch` unpickles whatever they are, cannot be described: steelyard writes none.
"""

import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from steelyard.errors import InvalidCheckpointError
from steelyard.runtime.checkpoint_folder import damaged

METADATA_FILE = ".metadata"
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
    **{("torch", str(each).partition(".")[2]): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}
"""What a description may name, by module and name. The path where it was written is of no use and stays a name."""


class CheckpointReader(FileSystemReader):
    """A reader for `torch.distributed.checkpoint.load` that makes nothing but tensors of a foreign checkpoint.

    Every tensor has a size and lies in a file of the folder. Raises `InvalidCheckpointError` if the description is
    missing, damaged or names what is not allowed; errors in the files of tensors are those of torch.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        file = path / METADATA_FILE
        try:
            with file.open("rb") as opened:
                self._metadata = _checked(_Unpickler(opened).load())
        except Exception as error:  # a pickle that is cut or made up fails in as many ways as it has bytes
            raise unreadable(file, str(error).strip() or type(error).__name__) from error

    def read_metadata(self) -> Metadata:
        """The description. torch looks for others, one of each rank, only where this takes keyword arguments."""
        return self._metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs") from None


def _checked(found: Any) -> Metadata:
    if not isinstance(found, Metadata):
        raise TypeError(f"it describes a {type(found).__name__}, no checkpoint")
    found.storage_meta = StorageMeta()
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.size, torch.Size):
            raise TypeError(f"it describes {name} as no tensor")
    for place in found.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it names a file outside its folder, {place.relative_path}")
    return found


def unreadable(path: str | os.PathLike[str], reason: str) -> InvalidCheckpointError:
    """The error for a checkpoint, or a file of one, that cannot be read."""
    return damaged(f"{path}: {reason.splitlines()[0]}")
