"""Rows as samples: prompts with completions, conversations, or packed texts; only answers contribute to the loss.

| columns                  | tokens                                            | targets                               |
|--------------------------|---------------------------------------------------|---------------------------------------|
| prompt, completion: text | both texts, tokenized separately, and end token   | completion and end token              |
| messages                 | output of the tokenizer's chat template           | turns of the assistant                |
| prompt, completion:      | output of the template for both lists             | turns of the assistant in completion  |
| lists of messages        |                                                   |                                       |
| text (`--packing` alone) | the text and end token                            | all                                   |

Other names of a prompt and its completion are in `_PAIRS`. An encoder-decoder model reads the one and predicts the
other, both as its tokenizer writes sources and targets (``text_target``), with special tokens.

The assistant's turns are those that the template marks (``{% generation %}``). If it has no marks, a turn consists of
the tokens by which the conversation up to its end extends the prompt for it (``add_generation_prompt``). A template
without marks that changes earlier turns is rejected.

Without packing (`steelyard.runtime.data.packing`) a row is one sample, truncated to the plan's sequence length or
padded at its end; no token sees the padding, and it has no targets. Rows without targets within that length are
skipped. The loss is the mean over the targets of a global batch.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steelyard.errors import InvalidDataError, UserError
from steelyard.runtime.data.packing import SPLIT, WRAPPED
from steelyard.runtime.data.rows import Rows, Source, check_columns, stored_files

if TYPE_CHECKING:
    from datasets import Dataset

MESSAGES = "messages"
_PAIRS = (("prompt", "completion"), ("source", "target"), ("document", "summary"))
"""Names of the columns of a prompt and its completion."""
TOKEN_IDS, IS_TARGET, LABELS = "input_ids", "is_target", "labels"
"""Columns of a tokenized row: tokens, and which of them are targets, or the targets of an encoder-decoder model."""
NUM_TOKENS, NUM_TARGETS = "num_tokens", "num_targets"
_ASSISTANT = "assistant"
_MARKS = re.compile(r"\{%-?\s*generation\b")
_VERSION = 2
"""Version of the cached tokens; bump when a row yields different tokens."""

_Turns = tuple[list[int], list[bool]]
"""Tokens, and for each whether it is a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """Options for reading rows as samples: tokenizer, length of a sample, and strategy of packing, if any.

    The column ``text_key`` is read if one is given, and ``is_seq2seq`` are rows for an encoder-decoder model.
    """

    tokenizer: Path | None
    seq_len: int
    packing: str | None = None
    text_key: str | None = None
    is_seq2seq: bool = False


def open_completions(rows: Rows, options: RowOptions) -> "Dataset":
    """Return all rows with targets as tokens, cached by `datasets`; no row has more than a sample's.

    Raises `UserError` without a tokenizer, and `InvalidDataError` if rows have no known format or none has a target.
    """
    tokenizer, identity = _open_tokenizer(options.tokenizer)
    seq_len = options.seq_len
    mixed = rows.mixed([_tokenized(source, tokenizer, identity, options) for source in rows.sources])
    if options.packing == WRAPPED:
        mixed = mixed.map(_wrapped, batched=True, fn_kwargs={"seq_len": seq_len}, remove_columns=mixed.column_names)
    taught = np.flatnonzero(np.asarray(mixed.with_format("numpy")[NUM_TARGETS][:]))
    if not len(taught):
        raise InvalidDataError(
            found=f"no target in the first {seq_len} tokens of any row of {rows} ({len(mixed)} rows)",
            expected="answers within the plan's sequence length",
            hint="plan for a longer --seq-len, or shorten prompts",
        )
    return mixed.select(taught)


def _open_tokenizer(folder: Path | None) -> tuple[Any, str]:
    """Return a transformers tokenizer and a hash that identifies it."""
    from transformers import AutoTokenizer  # takes seconds, which parsing options does not need

    if folder is None:
        raise UserError(
            field="--tokenizer",
            found="none",
            expected="the folder of the model's tokenizer, with its end token and chat template",
            hint="add --tokenizer FOLDER, or --init with a folder that contains one",
        )
    folder = folder.parent if folder.is_file() else folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # many types
        raise InvalidDataError(
            field="tokenizer",
            found=f"{folder}: {str(error).splitlines()[0]}",
            expected="the folder of a tokenizer (tokenizer.json, tokenizer_config.json)",
            hint="save it there with save_pretrained",
        ) from error
    if tokenizer.eos_token_id is None:
        raise InvalidDataError(
            field="tokenizer",
            found=f"no end token in {folder}",
            expected="eos_token, from which the model learns to stop",
            hint="set it in tokenizer_config.json",
        )
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token, tokenizer.chat_template]
    parts += [getattr(tokenizer, "tgt_lang", None)]  # of texts that are targets
    return tokenizer, hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tokenized(source: Source, tokenizer: Any, identity: str, options: RowOptions) -> "Dataset":
    rows, seq_len, packing = source.load(), options.seq_len, options.packing
    key = [_VERSION, identity, seq_len, packing, options.is_seq2seq, options.text_key, source.split, stored_files(rows)]
    wanted = _columns(source, rows, options)
    is_text = MESSAGES not in wanted and isinstance(rows[0][wanted[0]], str)
    if not is_text and not options.is_seq2seq and tokenizer.chat_template is None:
        raise InvalidDataError(
            found=f"messages in {source.name}, but a tokenizer without a chat template",
            expected="a chat template, which formats messages as text",
            hint="put the model's chat_template.jinja into the folder of --tokenizer, or provide prompts and "
            "completions as text",
        )
    if options.is_seq2seq:
        turns: Callable[..., tuple[list[int], list[Any]]] = partial(_translated, seq_len=seq_len)
    else:
        turns = _written if is_text else _conversed
    of_targets = LABELS if options.is_seq2seq else IS_TARGET

    def tokenize(batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in (TOKEN_IDS, of_targets, NUM_TOKENS, NUM_TARGETS)}
        for number, *row in zip(numbers, *(batch[name] for name in wanted), strict=True):
            try:
                tokens, targets = turns(tokenizer, row)
            except _RowError as error:
                raise _no_row(source, number, str(error)) from error
            length = len(tokens) if packing == WRAPPED else seq_len
            for begin in range(0, len(tokens) if packing == SPLIT else 1, length):
                part, of_part = tokens[begin : begin + length], targets[begin : begin + length]
                # nothing predicts the first token of a causal model
                count = len(of_part) if options.is_seq2seq else sum(of_part[1:])
                for name, value in zip(found, (part, of_part, len(part), count), strict=True):
                    found[name].append(value)
        return found

    return rows.map(
        tokenize,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        new_fingerprint=hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32],
    )


def _columns(source: Source, rows: "Dataset", options: RowOptions) -> list[str]:
    """Return the columns to read. Raises `InvalidDataError` if rows have none of the known names."""
    if options.text_key is not None:
        check_columns(source, rows, [options.text_key], "the column of the text: --text-key")
        return [options.text_key]
    if MESSAGES in rows.column_names and not options.is_seq2seq:
        return [MESSAGES]
    pair = next((each for each in _PAIRS if set(each) <= set(rows.column_names)), _PAIRS[0])
    others = [" and ".join(each) for each in _PAIRS[1:]] + [MESSAGES] * (not options.is_seq2seq)
    check_columns(source, rows, pair, f"or {', '.join(others)}, because --sft trains on answers")
    return list(pair)


def _wrapped(batch: Mapping[str, Sequence[Any]], seq_len: int) -> dict[str, list[Any]]:
    """Return the tokens of some rows joined and cut into samples."""
    tokens, is_target = (list(chain.from_iterable(batch[name])) for name in (TOKEN_IDS, IS_TARGET))
    begins = range(0, len(tokens), seq_len)
    parts, of_parts = ([each[begin : begin + seq_len] for begin in begins] for each in (tokens, is_target))
    counts = [len(each) for each in parts], [sum(each[1:]) for each in of_parts]
    return dict(zip((TOKEN_IDS, IS_TARGET, NUM_TOKENS, NUM_TARGETS), (parts, of_parts, *counts), strict=True))


class _RowError(ValueError):
    """A row without a valid prompt and answer."""


def _check_texts(row: Sequence[Any]) -> None:
    if not all(isinstance(each, str) for each in row):
        raise _RowError(f"{' and '.join(f'a {type(each).__name__}' for each in row)}, not text")


def _translated(tokenizer: Any, row: Sequence[Any], *, seq_len: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a source and of its target."""
    _check_texts(row)
    cut = {"truncation": True, "max_length": seq_len}
    return tokenizer(row[0], **cut).input_ids, tokenizer(text_target=row[1], **cut).input_ids


def _written(tokenizer: Any, row: Sequence[Any]) -> _Turns:
    """Return the tokens of a prompt, if there is one, and of a completion, which are targets."""
    _check_texts(row)
    *prompts, answer = row
    prompt = [token for each in prompts for token in tokenizer(each, verbose=False).input_ids]
    completion = tokenizer(answer, add_special_tokens=not prompts, verbose=False).input_ids
    if completion[-1:] != [tokenizer.eos_token_id] or prompts:
        completion.append(tokenizer.eos_token_id)
    return prompt + completion, [False] * len(prompt) + [True] * len(completion)


def _conversed(tokenizer: Any, row: Sequence[Any]) -> _Turns:
    given, *answer = row
    if not all(isinstance(each, list) and all(isinstance(turn, dict) for turn in each) for each in row):
        raise _RowError("a value that is not a list of messages")
    messages, first = (given + answer[0], len(given)) if answer else (given, 0)

    def render(count: int, *, prompts: bool = False) -> list[int]:
        if not count:
            return []
        return tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=prompts, tokenize=True, return_dict=True
        )["input_ids"]

    try:
        if _MARKS.search(tokenizer.chat_template):
            whole = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            begin = len(render(first, prompts=True))
            marks = [bool(mark) and place >= begin for place, mark in enumerate(whole["assistant_masks"])]
            return whole["input_ids"], marks
        tokens = render(len(messages))
        is_target = [False] * len(tokens)
        for place in range(first, len(messages)):
            if messages[place]["role"] == _ASSISTANT:
                before, after = render(place, prompts=True), render(place + 1)
                if tokens[: len(after)] != after or after[: len(before)] != before:
                    raise _RowError(
                        "turns that the chat template formats differently in longer conversations, without "
                        "marking assistant turns ({% generation %})"
                    )
                is_target[len(before) : len(after)] = [True] * (len(after) - len(before))
    except _RowError:
        raise
    except Exception as error:  # a template can raise anything
        raise _RowError(f"a row that the chat template rejects: {str(error).splitlines()[0]}") from error
    return tokens, is_target


def _no_row(source: Source, number: int, found: str) -> InvalidDataError:
    return InvalidDataError(
        found=f"{found}, in row {number + 1} of {source.name}@{source.split}",
        expected=f"a prompt and a completion as text or as messages, or {MESSAGES}",
        hint="correct or remove the row",
    )
