"""Documents to token ids: their bytes, or what a Hugging Face tokenizer makes of them.

Between documents stands an end token: byte 0 for bytes, else the ``eos_token`` that the ``tokenizer_config.json``
beside the ``tokenizer.json`` names; without one, documents follow each other directly.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from steelyard.errors import InvalidDataError
from steelyard.files import read_json
from steelyard.runtime.data.files import NUM_BYTE_TOKENS

_DOCUMENTS_AT_ONCE = 256


class TextTokenizer(ABC):
    """Turns documents into token ids below ``vocab_size``; ``identity`` differs where the ids would."""

    vocab_size: int
    identity: str
    mask_token: int | None = None
    """The token that stands for a hidden one; None where the vocabulary has none."""

    @abstractmethod
    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """The token ids of each document with the end token after it."""


class ByteTokenizer(TextTokenizer):
    """The bytes of a document, and a zero byte."""

    vocab_size = NUM_BYTE_TOKENS
    identity = "bytes"

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """The bytes of each document and a zero byte."""
        for document in documents:
            yield np.frombuffer(document.encode() + b"\0", dtype=np.uint8)


class HubTokenizer(TextTokenizer):
    """A Hugging Face ``tokenizer.json``; raises `InvalidDataError` if it cannot be read."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer  # which the options of a run, and so the command line, do without

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidDataError(
                field="tokenizer",
                found=f"{file}: {error}",
                expected="a tokenizer.json, or a folder that holds one",
                hint="take it from the folder of the pretrained model",
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        entries = _special_tokens(file.with_name("tokenizer_config.json"))
        self._end = self._token(entries.get("eos_token"))
        self.mask_token = self._token(entries.get("mask_token", "[MASK]"))
        self.identity = hashlib.sha256(f"{self._end}\n{content}".encode()).hexdigest()

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """What the tokenizer makes of each document, without its own special tokens, and the end token."""
        end = [] if self._end is None else [self._end]
        remaining = iter(documents)
        while group := list(islice(remaining, _DOCUMENTS_AT_ONCE)):
            for encoded in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array([*encoded.ids, *end], dtype=np.uint32)

    def _token(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)


def open_tokenizer(path: Path | None) -> TextTokenizer:
    """The tokenizer at ``path``, a ``tokenizer.json`` or the folder of one; bytes without a path."""
    return ByteTokenizer() if path is None else HubTokenizer(path)


def _special_tokens(config: Path) -> dict[str, str]:
    """The special tokens that a tokenizer's config names, each by its text."""
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
