"""Conversion of text to a token file, written once and cached for every process and every later run.

A text file that is read as bytes is used in place. All other text is written to a raw token file whose name is a hash
of its inputs: the tokenizer and the names, sizes and times of the text files.

| data                       | documents                                                                  |
|----------------------------|----------------------------------------------------------------------------|
| a text file                | its content                                                                |
| JSON lines, other `Rows`   | the text in one column (default: ``text``) of each row                     |
| a folder                   | documents of its text files, folder by folder in the order of their names  |

In a folder, hidden files, links, binary files and files that are not UTF-8 are skipped; a file given by its path must
be text. The tokens of a document are its bytes, or the output of a Hugging Face tokenizer. An end token follows each
document: byte 0 for bytes, otherwise the ``eos_token`` of the ``tokenizer_config.json`` in the tokenizer's folder.
Without an ``eos_token``, documents follow each other directly.
"""

import codecs
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from steelyard.errors import InvalidDataError, UserError
from steelyard.files import read_json
from steelyard.model.family import Task
from steelyard.plan.file import default_folder
from steelyard.plan.plan import Plan
from steelyard.runtime.data.completions import RowOptions, open_completions
from steelyard.runtime.data.files import NUM_BYTE_TOKENS, is_token_file, smallest_type
from steelyard.runtime.data.packing import BFD, SPLIT
from steelyard.runtime.data.rows import Rows, Source

_DOCUMENTS_AT_ONCE = 256


class ByteTokenizer:
    """Tokenizer whose token ids are bytes, below ``vocab_size``; ``identity`` differs if the token ids would."""

    vocab_size = NUM_BYTE_TOKENS
    identity = "bytes"
    mask_token: int | None = NUM_BYTE_TOKENS
    """Mask token: for bytes, the first id that is not a byte; None if the vocabulary has no mask token."""

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the bytes of each document and a zero byte."""
        for document in documents:
            yield np.frombuffer(document.encode() + b"\0", dtype=np.uint8)


class HubTokenizer(ByteTokenizer):
    """A Hugging Face ``tokenizer.json``; raises `InvalidDataError` if it cannot be read."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer  # not needed to parse the options of a run

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidDataError(
                field="tokenizer",
                found=f"{file}: {error}",
                expected="a tokenizer.json, or a folder that contains one",
                hint="use that of the pretrained model",
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        entries = _special_tokens(file.with_name("tokenizer_config.json"))
        self._end = self._token(entries.get("eos_token"))
        self.mask_token = self._token(entries.get("mask_token", "[MASK]"))
        self.identity = hashlib.sha256(f"{self._end}\n{content}".encode()).hexdigest()

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of each document, without the tokenizer's special tokens, and the end token."""
        end = [] if self._end is None else [self._end]
        remaining = iter(documents)
        while group := list(islice(remaining, _DOCUMENTS_AT_ONCE)):
            for encoded in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array([*encoded.ids, *end], dtype=np.uint32)

    def _token(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)


def open_tokenizer(path: Path | None) -> ByteTokenizer:
    """Open the tokenizer at ``path``, a ``tokenizer.json`` or its folder; without a path, tokens are bytes."""
    return ByteTokenizer() if path is None else HubTokenizer(path)


def _special_tokens(config: Path) -> dict[str, str]:
    """Return the texts of the end and mask tokens that a tokenizer's config names."""
    if not config.is_file():
        return {}
    try:
        entries = read_json(config)
    except (OSError, ValueError) as error:
        raise InvalidDataError(
            field="tokenizer", found=f"{config}: {error}", expected="a JSON object", hint="restore or remove the file"
        ) from error
    named = {key: entries.get(key) for key in ("eos_token", "mask_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if text is not None}


JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_TEXT_SUFFIXES = (
    *(".md", ".rst", ".tex", ".txt"),
    *(".cfg", ".csv", ".css", ".html", ".json", ".toml", ".tsv", ".xml", ".yaml", ".yml"),
    *(".c", ".cc", ".cpp", ".go", ".h", ".hpp", ".java", ".js", ".py", ".pyi", ".rs", ".sh", ".ts"),
    *JSON_LINES_SUFFIXES,
)
_PROBED_BYTES = 1 << 16


def documents(path: Path | Rows, *, text_key: str) -> Iterator[str]:
    """Yield the documents at ``path`` in order. Raises `InvalidDataError` for a row without text."""
    if isinstance(path, Rows):
        yield from path.documents(text_key)
        return
    for file in text_files(path):
        if file.suffix in JSON_LINES_SUFFIXES:
            yield from Rows((Source(str(file), "train", None),)).documents(text_key)
        elif path.is_dir():
            with suppress(OSError, UnicodeDecodeError):  # skipped: unreadable, binary or not UTF-8
                content = file.read_bytes().decode()
                yield from [content] if content and "\0" not in content else []
        else:
            check_is_text(file)
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise _no_text(file, str(error)) from error


def text_files(path: Path) -> list[Path]:
    """Return the file at ``path``, or the text files below the folder, in reading order."""
    if path.is_file():
        return [path]
    found: list[Path] = []
    for where, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            file = Path(where) / name
            if file.suffix.lower() in _TEXT_SUFFIXES and not name.startswith(".") and not file.is_symlink():
                found.append(file)
    return found


def check_is_text(file: Path) -> None:
    """Raise `InvalidDataError` if the beginning of a file is not UTF-8 text."""
    with file.open("rb") as opened:
        beginning = opened.read(_PROBED_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError as error:
        raise _no_text(file, str(error)) from error
    if b"\0" in beginning:
        raise _no_text(file, "a zero byte")


def _no_text(file: Path, reason: str) -> InvalidDataError:
    return InvalidDataError(
        found=f"no text in {file} ({reason})",
        expected="UTF-8 text, JSON lines, or token ids in a .npy or .bin file",
        hint="convert the file, or correct its suffix",
    )


_logger = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
"""Name of synthetic data."""
_VERSION = 1
"""Version of the token cache; bump when the same text yields different tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options for tokenizing text: tokenizer (bytes without one), column of rows, and maximum number of bytes."""

    tokenizer: Path | None = None
    text_key: str = "text"
    max_bytes: int | None = None
    mask_token: int | None = None
    """Mask token for masked-token prediction; takes precedence over the tokenizer's."""
    completions_alone: bool = False
    """Whether rows are prompts with completions, or conversations, and only answers contribute to the loss."""
    packing: str | None = None
    """Strategy by which rows are packed into samples (`steelyard.runtime.data.packing`); None for no packing."""

    def of_rows(self, task: Task, seq_len: int) -> RowOptions | None:
        """Return the options for reading rows one by one; None if they are one stream of text."""
        if not self.completions_alone and self.packing is None:
            return None
        return RowOptions(
            tokenizer=self.tokenizer,
            seq_len=seq_len,
            packing=self.packing,
            text_key=None if self.completions_alone else self.text_key,
            is_seq2seq=task is Task.SEQ2SEQ_LM,
        )


def prepare_data(data: Path | Rows | None, options: TextOptions, plan: Plan) -> None:
    """Check the data and tokenize text before a run starts, so that no process has to wait for it."""
    task = plan.chain().family.task
    if isinstance(data, Rows):
        check_rows(plan, options)
        of_rows = options.of_rows(task, plan.seq_len)
        if of_rows is not None:
            open_completions(data, of_rows)
        else:
            prepare_text(data, options)
        return
    if data is None or str(data) == SYNTHETIC:
        return
    check_data_path(data)
    if task.reads_text and not task.reads_features and not is_token_file(data):
        prepare_text(data, options)


def check_rows(plan: Plan, options: TextOptions) -> None:
    """Raise `UserError` unless the plan's model can be trained on rows, packed as the options say."""
    task = plan.chain().family.task
    if not task.reads_text or task.reads_features:
        raise UserError(
            field="--dataset",
            found=f"rows for {task}",
            expected="a model that reads text",
            hint="pass data of the model's format as --data: steelyard train --help",
        )
    if options.completions_alone and task not in (Task.CAUSAL_LM, Task.SEQ2SEQ_LM):
        raise UserError(
            field="--sft",
            found=f"a plan for {task}",
            expected=f"a plan for {Task.CAUSAL_LM} or {Task.SEQ2SEQ_LM}, whose models generate answers",
            hint="leave --sft out",
        )
    if options.packing is not None and task is not Task.CAUSAL_LM:
        raise UserError(
            field="--packing",
            found=f"a plan for {task}",
            expected=f"a plan for {Task.CAUSAL_LM}, because rows of other models are not packed",
            hint="leave --packing out",
        )
    if options.packing in (BFD, SPLIT) or (options.completions_alone and task is not Task.CAUSAL_LM):
        from steelyard.modules.sample_proof import check_per_sample  # imports transformers, which takes seconds

        check_per_sample(plan)


def prepare_text(data: Path | Rows, options: TextOptions, *, folder: Path | None = None) -> Path:
    """Return the token file of a text, and write it if it is not in the cache.

    ``folder`` is the cache folder. Raises `InvalidDataError` if there is no text or the tokens cannot be written.
    """
    tokenizer = open_tokenizer(options.tokenizer)
    if (
        isinstance(data, Path)
        and data.is_file()
        and data.suffix not in JSON_LINES_SUFFIXES
        and options.tokenizer is None
        and options.max_bytes is None
    ):
        check_is_text(data)
        return data
    name = _key(data, options, tokenizer) + smallest_type(tokenizer.vocab_size)
    target = (folder or default_folder("tokens")) / f"{name}.bin"
    if not target.is_file():
        _write(target, data, options, tokenizer)
    return target


def check_data_path(path: str | Path) -> None:
    """Raise `InvalidDataError` if ``path`` does not exist."""
    if not os.path.exists(path):  # returns False for a path that is too long
        raise InvalidDataError(
            found=f"nothing at {path}",
            expected="text, JSON lines, a folder of text, token ids (.npy, .bin), or a folder of images or arrays",
            hint="check the path",
        )


def mask_token(data: str | Path | Rows, options: TextOptions) -> int | None:
    """Return the mask token: the given one, otherwise the tokenizer's (None for a token file)."""
    if options.mask_token is not None or (not isinstance(data, Rows) and is_token_file(Path(data))):
        return options.mask_token
    return open_tokenizer(options.tokenizer).mask_token


def check_vocabulary(options: TextOptions, vocab_size: int) -> None:
    """Raise `InvalidDataError` if the tokenizer has more tokens than the model."""
    needed = open_tokenizer(options.tokenizer).vocab_size
    if vocab_size < needed:
        what = "text, tokenized as bytes" if options.tokenizer is None else str(options.tokenizer)
        raise InvalidDataError(
            field="model.config.vocab_size",
            found=f"{vocab_size} for {what}",
            expected=f"{needed} or more",
            hint="use a model with a larger vocabulary, another tokenizer, or token ids as .npy or .bin",
        )


def _key(data: Path | Rows, options: TextOptions, tokenizer: ByteTokenizer) -> str:
    if isinstance(data, Rows):
        where, stats = "", data.identity()
    else:
        files = text_files(data)
        where = str(data.resolve())
        stats = [[str(file.relative_to(data)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    entries = [_VERSION, where, tokenizer.identity, options.text_key, options.max_bytes, stats]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:24]


def _write(target: Path, path: Path | Rows, options: TextOptions, tokenizer: ByteTokenizer) -> None:
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
            expected=f"free space in {target.parent}",
            hint="free disk space, or set XDG_CACHE_HOME to another folder",
        ) from error
    finally:
        with suppress(OSError):
            scratch.unlink()
    if not num_tokens:
        raise InvalidDataError(
            found=f"no text in {path}",
            expected="UTF-8 text"
            + " in files such as *.txt, *.md, *.py or *.jsonl" * (isinstance(path, Path) and path.is_dir()),
            hint="pass a path with text",
        )
    _logger.info("%s: %d tokens, cached in %s", path, num_tokens, target)


def _limited(texts: Iterator[str], max_bytes: int | None) -> Iterator[str]:
    """Yield the first ``max_bytes`` bytes of the documents; the last document is cut between characters."""
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
