"""Token files, read in place: ``.npy`` arrays and raw ``.bin`` files of token ids.

| name            | tokens                                                                                 |
|-----------------|----------------------------------------------------------------------------------------|
| ``.npy``        | a one-dimensional array of whole numbers                                               |
| ``.uint16.bin`` | unsigned 16-bit little-endian numbers; so with ``uint8`` and ``uint32``                |
| ``.bin``        | unsigned 16-bit numbers where the vocabulary has at most 65,536 tokens, else 32-bit    |

Reads go through `os.pread` and not through a memory map: the pages are cached alike, but where a file shrinks under a
running job a map ends the process with SIGBUS, and a read says what happened.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format

from steelyard.errors import InvalidDataError

TOKEN_SUFFIXES = (".npy", ".bin")
NUM_BYTE_TOKENS = 256
_MOST_UINT16_TOKENS = 1 << 16
_NAMED_TYPES: dict[str, np.dtype[np.integer]] = {
    ".uint8": np.dtype("<u1"),
    ".uint16": np.dtype("<u2"),
    ".uint32": np.dtype("<u4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """An open file of ``num_tokens`` token ids of type ``dtype`` that begin ``offset_bytes`` into it."""

    path: Path
    descriptor: int
    dtype: np.dtype[np.integer]
    offset_bytes: int
    num_tokens: int

    def read(self, first: int, count: int) -> np.ndarray:
        """``count`` token ids from token ``first`` on, as 64-bit numbers.

        Raises `InvalidDataError` if the file no longer holds them.
        """
        wanted = count * self.dtype.itemsize
        content = os.pread(self.descriptor, wanted, self.offset_bytes + first * self.dtype.itemsize)
        if len(content) < wanted:
            raise InvalidDataError(
                found=f"{self.path} has become shorter than the {self.num_tokens} tokens that it had at the start",
                expected="data that does not change while it is read",
                hint="restore the file and resume from the last checkpoint",
            )
        return np.frombuffer(content, dtype=self.dtype).astype(np.int64)


def is_token_file(path: Path) -> bool:
    """Whether ``path`` is read as token ids."""
    return path.suffix in TOKEN_SUFFIXES and path.is_file()


def open_token_file(path: Path, *, vocab_size: int) -> TokenFile:
    """The token file at ``path``; raises `InvalidDataError` if it is none."""
    try:
        return _open_npy(path) if path.suffix == ".npy" else _open_raw(path, raw_type(path, vocab_size))
    except (ValueError, OSError) as error:
        raise InvalidDataError(
            found=f"{path}: {error}",
            expected="a .npy array or a .bin file of token ids",
            hint="write the file again",
        ) from error


def open_bytes(path: Path) -> TokenFile:
    """A file whose bytes are its tokens."""
    return _open_raw(path, _NAMED_TYPES[".uint8"])


def raw_type(path: Path, vocab_size: int) -> np.dtype[np.integer]:
    """The type of the numbers in a ``.bin`` file: as its name says, else as the vocabulary needs."""
    named = _NAMED_TYPES.get(Path(path.stem).suffix)
    return named if named is not None else _NAMED_TYPES[smallest_type(vocab_size, least=".uint16")]


def smallest_type(vocab_size: int, *, least: str = ".uint8") -> str:
    """The name, in a file's name, of the smallest type that holds all tokens of a vocabulary."""
    if vocab_size > _MOST_UINT16_TOKENS:
        return ".uint32"
    return ".uint16" if vocab_size > NUM_BYTE_TOKENS else least


def _open_npy(path: Path) -> TokenFile:
    with path.open("rb") as file:
        version = npy_format.read_magic(file)
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if len(shape) != 1 or dtype.kind not in "iu":
            raise InvalidDataError(
                found=f"{len(shape)} dimensions of {dtype} in {path}",
                expected="one dimension of whole numbers",
                hint="save the token ids as one flat integer array",
            )
        offset_bytes = file.tell()
    descriptor = os.open(path, os.O_RDONLY)
    held = (os.fstat(descriptor).st_size - offset_bytes) // dtype.itemsize
    if held < shape[0]:
        os.close(descriptor)
        raise ValueError(f"truncated: {held} of {shape[0]} tokens")
    return TokenFile(path=path, descriptor=descriptor, dtype=dtype, offset_bytes=offset_bytes, num_tokens=shape[0])


def _open_raw(path: Path, dtype: np.dtype[np.integer]) -> TokenFile:
    descriptor = os.open(path, os.O_RDONLY)
    num_bytes = os.fstat(descriptor).st_size
    if num_bytes % dtype.itemsize:
        os.close(descriptor)
        raise ValueError(f"{num_bytes} bytes are no whole number of {dtype.name} tokens")
    return TokenFile(
        path=path, descriptor=descriptor, dtype=dtype, offset_bytes=0, num_tokens=num_bytes // dtype.itemsize
    )
