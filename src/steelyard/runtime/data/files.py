"""Token files, read in place: ``.npy`` arrays and raw ``.bin`` files of token ids.

| name            | tokens                                                                                 |
|-----------------|----------------------------------------------------------------------------------------|
| ``.npy``        | one-dimensional array of integers                                                      |
| ``.uint16.bin`` | unsigned 16-bit little-endian integers; likewise ``uint8`` and ``uint32``              |
| ``.bin``        | unsigned integers of 16 bits if the vocabulary has at most 65,536 tokens, else 32 bits |

A memory map is used only to find the type and number of tokens. The tokens themselves are read, because if a file
shrinks during a run, a memory map kills the process with SIGBUS, but a read raises an error.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steelyard.errors import InvalidDataError

TOKEN_SUFFIXES = (".npy", ".bin")
NUM_BYTE_TOKENS = 256
_MOST_UINT16_TOKENS = 1 << 16
_NAMED_TYPES = {".uint8": "<u1", ".uint16": "<u2", ".uint32": "<u4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of ``num_tokens`` token ids of type ``dtype``, starting at byte ``offset_bytes``."""

    path: Path
    dtype: np.dtype[np.integer]
    offset_bytes: int
    num_tokens: int

    def read(self, first: int, count: int) -> np.ndarray:
        """Return ``count`` token ids from token ``first`` on, as 64-bit integers.

        Raises `InvalidDataError` if the file no longer holds them.
        """
        offset = self.offset_bytes + first * self.dtype.itemsize
        found = np.fromfile(self.path, dtype=self.dtype, count=count, offset=offset)
        if len(found) < count:
            raise InvalidDataError(
                found=f"{self.path}, which became shorter than its {self.num_tokens} tokens at the start",
                expected="data that does not change during the run",
                hint="restore the file and resume from the last checkpoint",
            )
        return found.astype(np.int64)


def is_token_file(path: Path) -> bool:
    """Return whether ``path`` is read as token ids."""
    return path.suffix in TOKEN_SUFFIXES and path.is_file()


def open_token_file(path: Path, *, vocab_size: int) -> TokenFile:
    """Open the token file at ``path``. Raises `InvalidDataError` if it is not one."""
    named = Path(path.stem).suffix
    raw_type = named if named in _NAMED_TYPES else smallest_type(vocab_size, least=".uint16")
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, _NAMED_TYPES[raw_type], mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise InvalidDataError(
            found=f"{path}: {error}",
            expected="a .npy array or a .bin file of token ids",
            hint="write the file again",
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidDataError(
            found=f"{tokens.ndim} dimensions of {tokens.dtype} in {path}",
            expected="one dimension of whole numbers",
            hint="save the token ids as one flat integer array",
        )
    return TokenFile(path=path, dtype=tokens.dtype, offset_bytes=tokens.offset, num_tokens=len(tokens))


def open_bytes(path: Path) -> TokenFile:
    """Open a file whose bytes are its tokens."""
    return TokenFile(path=path, dtype=np.dtype(np.uint8), offset_bytes=0, num_tokens=path.stat().st_size)


def smallest_type(vocab_size: int, *, least: str = ".uint8") -> str:
    """Return the file-name suffix of the smallest type that holds all tokens of a vocabulary."""
    if vocab_size > _MOST_UINT16_TOKENS:
        return ".uint32"
    return ".uint16" if vocab_size > NUM_BYTE_TOKENS else least
