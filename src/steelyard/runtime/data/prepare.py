"""Text as a token file: made once, kept in the cache, and found there by every process and every later run.

A text file that is read as bytes is used where it lies. Everything else is written to a raw token file whose name is a
hash of what enters it: the tokenizer and the names, sizes and times of the text files.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import InvalidDataError
from steelyard.model.family import Task
from steelyard.plan.file import default_folder
from steelyard.runtime.data.files import NUM_BYTE_TOKENS, is_token_file, smallest_type
from steelyard.runtime.data.text import JSON_LINES_SUFFIXES, check_is_text, documents, text_files
from steelyard.runtime.data.tokenizer import ByteTokenizer, TextTokenizer, open_tokenizer

_logger = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
"""The name of data that is made up."""
_VERSION = 1
"""Raised whenever the same text becomes other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How text becomes tokens: a tokenizer (bytes without one), the key of JSON lines, and how many bytes at most."""

    tokenizer: Path | None = None
    text_key: str = "text"
    max_bytes: int | None = None
    mask_token: int | None = None
    """The token that hides another in masked-token prediction, where the tokenizer names none."""


def prepare_data(path: Path, options: TextOptions, *, task: Task = Task.CAUSAL_LM) -> None:
    """Finds mistakes in the data before a run starts, and makes text into tokens while nobody waits for it."""
    if str(path) == SYNTHETIC:
        return
    check_data_path(path)
    if task.reads_text and not task.reads_features and not is_token_file(path):
        prepare_text(path, options)


def prepare_text(path: Path, options: TextOptions, *, folder: Path | None = None) -> Path:
    """The token file of the text at ``path``, written now if it is new.

    ``folder`` is that of the cache. Raises `InvalidDataError` where there is no text or no room to write.
    """
    tokenizer = open_tokenizer(options.tokenizer)
    if _is_read_in_place(path, options, tokenizer):
        check_is_text(path)
        return path
    name = _key(path, options, tokenizer) + smallest_type(tokenizer.vocab_size)
    target = (folder or default_folder("tokens")) / f"{name}.bin"
    if not target.is_file():
        _write(target, path, options, tokenizer)
    return target


def check_data_path(path: str | Path) -> None:
    """Raises `InvalidDataError` if there is nothing at ``path``."""
    if not os.path.exists(path):  # which calls a path too long no mistake of its own
        raise InvalidDataError(
            found=f"nothing at {path}",
            expected="text, JSON lines, a folder of text, token ids (.npy, .bin), or a folder of images or arrays",
            hint="check the path",
        )


def mask_token(path: Path, options: TextOptions) -> int | None:
    """The token that hides another: as given, else the tokenizer's, else for bytes the first that is no byte."""
    if options.mask_token is not None or is_token_file(path):
        return options.mask_token
    return NUM_BYTE_TOKENS if options.tokenizer is None else open_tokenizer(options.tokenizer).mask_token


def check_vocabulary(options: TextOptions, vocab_size: int) -> None:
    """Raises `InvalidDataError` if the tokenizer has more tokens than the model."""
    needed = NUM_BYTE_TOKENS if options.tokenizer is None else open_tokenizer(options.tokenizer).vocab_size
    if vocab_size < needed:
        what = "text, which is read as bytes" if options.tokenizer is None else str(options.tokenizer)
        raise InvalidDataError(
            field="model.config.vocab_size",
            found=f"{vocab_size} for {what}",
            expected=f"{needed} or more",
            hint="use a model with a larger vocabulary, another tokenizer, or token ids as .npy or .bin",
        )


def _is_read_in_place(path: Path, options: TextOptions, tokenizer: TextTokenizer) -> bool:
    return (
        path.is_file()
        and path.suffix not in JSON_LINES_SUFFIXES
        and isinstance(tokenizer, ByteTokenizer)
        and options.max_bytes is None
    )


def _key(path: Path, options: TextOptions, tokenizer: TextTokenizer) -> str:
    files = text_files(path)
    stats = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    entries = [_VERSION, str(path.resolve()), tokenizer.identity, options.text_key, options.max_bytes, stats]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:24]


def _write(target: Path, path: Path, options: TextOptions, tokenizer: TextTokenizer) -> None:
    """Writes the token file as a whole or not at all."""
    texts = _limited(documents(path, text_key=options.text_key), options.max_bytes)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    dtype = smallest_type(tokenizer.vocab_size).removeprefix(".")
    num_tokens = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            for tokens in tokenizer.encode(texts):
                file.write(tokens.astype(dtype).tobytes())
                num_tokens += len(tokens)
        if num_tokens:
            scratch.replace(target)
    except OSError as error:
        raise InvalidDataError(
            found=f"the tokens of {path} cannot be written: {error}",
            expected=f"room in {target.parent}",
            hint="make room there, or set XDG_CACHE_HOME to another folder",
        ) from error
    finally:
        with suppress(OSError):
            scratch.unlink()
    if not num_tokens:
        raise InvalidDataError(
            found=f"no text in {path}",
            expected="UTF-8 text" + (" in files such as *.txt, *.md, *.py or *.jsonl" if path.is_dir() else ""),
            hint="give a path that holds text",
        )
    _logger.info("%s: %d tokens, kept in %s", path, num_tokens, target)


def _limited(texts: Iterator[str], max_bytes: int | None) -> Iterator[str]:
    """The beginning of the documents: ``max_bytes`` bytes in all, the last one cut between characters."""
    if max_bytes is None:
        yield from texts
        return
    room = max_bytes
    for text in texts:
        content = text.encode()
        yield text if len(content) <= room else content[:room].decode(errors="ignore")
        room -= len(content)
        if room <= 0:
            return
