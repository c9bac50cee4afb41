"""Training data: text as byte-level tokens or files of token ids, read sample by sample in an order of its own.

A sample is ``seq_len`` + 1 consecutive tokens; sample ``i`` starts at token ``i · seq_len``. Which samples a step reads
depends on the seed, the step and the size of the global batch alone, so every plan and world size sees the same data;
each epoch is a new permutation. A rank reads only the samples that it needs.

| path                | tokens                                                                           |
|---------------------|----------------------------------------------------------------------------------|
| a folder            | the bytes of its text files in the order of their paths, a zero byte after each  |
| a text file         | its bytes                                                                        |
| ``.npy``            | a one-dimensional array of whole numbers, memory-mapped                          |
| ``.bin``            | unsigned 16-bit whole numbers, memory-mapped                                     |
"""

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steelyard.errors import InvalidDataError

NUM_BYTE_TOKENS = 256
_TEXT_SUFFIXES = (
    *(".md", ".rst", ".tex", ".txt"),
    *(".cfg", ".csv", ".css", ".html", ".json", ".jsonl", ".toml", ".tsv", ".xml", ".yaml", ".yml"),
    *(".c", ".cc", ".cpp", ".go", ".h", ".hpp", ".java", ".js", ".py", ".pyi", ".rs", ".sh", ".ts"),
)
_TOKEN_SUFFIXES = (".npy", ".bin")


class TokenData:
    """Samples of ``seq_len`` + 1 tokens from a stream of tokens, in an order that the seed decides.

    Raises `InvalidDataError` if the stream is shorter than one sample.
    """

    def __init__(self, tokens: np.ndarray, *, source: str, seq_len: int, vocab_size: int, seed: int) -> None:
        self.num_samples = (len(tokens) - 1) // seq_len
        if self.num_samples < 1:
            raise InvalidDataError(
                field="data",
                found=f"{len(tokens)} tokens in {source}",
                expected=f"at least {seq_len + 1}, one sample of the plan's sequence length {seq_len}",
                hint="give more data, or plan for a shorter --seq-len",
            )
        self._tokens = tokens
        self._source = source
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._order = lru_cache(maxsize=2)(self._permutation)
        self._seed = seed

    def reader(self, step: int, global_batch: int) -> Callable[[list[int]], Tensor]:
        """What `ParallelModel.train_step` reads with: indices into the step's global batch to tokens [len, S + 1]."""

        def read(indices: list[int]) -> Tensor:
            return torch.stack([self._sample(step * global_batch + index) for index in indices])

        return read

    def sample_position(self, sample: int) -> int:
        """First token of the ``sample``-th sample of the run, counted from its first step on."""
        epoch, place = divmod(sample, self.num_samples)
        return int(self._order(epoch)[place]) * self._seq_len

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_samples)

    def _sample(self, sample: int) -> Tensor:
        first = self.sample_position(sample)
        tokens = self._tokens[first : first + self._seq_len + 1].astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise InvalidDataError(
                field="data",
                found=f"token {tokens.max() if tokens.max() >= self._vocab_size else tokens.min()} "
                f"between tokens {first} and {first + self._seq_len} of {self._source}",
                expected=f"token ids from 0 to {self._vocab_size - 1}, the model's vocabulary",
                hint="tokenize the data with the vocabulary of the model",
            )
        return torch.from_numpy(tokens)


def open_data(path: str | Path, *, seq_len: int, vocab_size: int, seed: int, max_bytes: int) -> TokenData:
    """The data at ``path``; of text, at most the first ``max_bytes`` bytes.

    Raises `InvalidDataError` if the path is missing, holds no text, is shorter than one sample, or is text for a model
    with fewer than 256 tokens in its vocabulary.
    """
    path = Path(path)
    check_data_path(path)
    if path.suffix in _TOKEN_SUFFIXES and path.is_file():
        tokens = _map_tokens(path)
    else:
        _check_byte_vocabulary(vocab_size)
        tokens = _read_text(path, max_bytes)
    return TokenData(tokens, source=str(path), seq_len=seq_len, vocab_size=vocab_size, seed=seed)


def check_data_path(path: str | Path) -> None:
    """Raises `InvalidDataError` if there is nothing at ``path``."""
    if not Path(path).exists():
        raise InvalidDataError(
            field="data",
            found=f"nothing at {path}",
            expected="a text file, a folder of text files, or a .npy or .bin file of token ids",
            hint="check the path",
        )


def _check_byte_vocabulary(vocab_size: int) -> None:
    if vocab_size < NUM_BYTE_TOKENS:
        raise InvalidDataError(
            field="model.config.vocab_size",
            found=f"{vocab_size} for text, which is read as bytes",
            expected=f"{NUM_BYTE_TOKENS} or more",
            hint="use a model with a larger vocabulary, or give token ids as .npy or .bin",
        )


def _map_tokens(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, dtype=np.uint16, mode="r")
    except (ValueError, OSError) as error:
        raise InvalidDataError(
            field="data",
            found=f"{path}: {error}",
            expected="a .npy array or a .bin file of unsigned 16-bit token ids",
            hint="write the file again",
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidDataError(
            field="data",
            found=f"{tokens.ndim} dimensions of {tokens.dtype} in {path}",
            expected="one dimension of whole numbers",
            hint="save the token ids as one flat integer array",
        )
    return tokens


def _read_text(path: Path, max_bytes: int) -> np.ndarray:
    parts: list[bytes] = []
    room = max_bytes
    for text in _texts(path):
        parts.append(text[:room])
        room -= len(parts[-1])
        if room <= 0:
            break
    if not any(parts):
        raise InvalidDataError(
            field="data",
            found=f"no text in {path}",
            expected="UTF-8 text" + (" in files such as *.txt, *.md or *.py" if path.is_dir() else ""),
            hint="give a path that holds text",
        )
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _texts(path: Path) -> Iterator[bytes]:
    if path.is_file():
        yield _text_bytes(path)
        return
    for file in _text_files(path):
        text = _text_bytes(file)
        if text:
            yield text + b"\0"


def _text_files(folder: Path) -> Iterator[Path]:
    """The text files below a folder, folder by folder in the order of names; hidden ones and links left out."""
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            file = Path(where) / name
            if file.suffix.lower() in _TEXT_SUFFIXES and not name.startswith(".") and not file.is_symlink():
                yield file


def _text_bytes(file: Path) -> bytes:
    """The content of a text file; nothing where it is unreadable, binary or not UTF-8."""
    try:
        content = file.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content
