"""Samples for fine-tuning: prompts with completions, or conversations; only answers contribute to the loss.

| columns                  | tokens                                            | targets                               |
|--------------------------|---------------------------------------------------|---------------------------------------|
| prompt, completion: text | both texts, tokenized separately, and end token   | completion and end token              |
| messages                 | output of the tokenizer's chat template           | turns of the assistant                |
| prompt, completion:      | output of the template for both lists             | turns of the assistant in completion  |
| lists of messages        |                                                   |                                       |

The assistant's turns are those that the template marks (``{% generation %}``). If it has no marks, a turn consists of
the tokens by which the conversation up to its end extends the prompt for it (``add_generation_prompt``). A template
without marks that changes earlier turns is rejected.

A row is one sample, truncated to the plan's sequence length or padded at its end; no token sees the padding, and it has
no targets. Rows without targets within that length are skipped. The loss is the mean over the targets of a global
batch. Not implemented: packing several rows into a sample.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steelyard.errors import InvalidDataError, UserError
from steelyard.runtime.data.rows import Rows, Source, check_columns, stored_files

if TYPE_CHECKING:
    from datasets import Dataset

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
TOKEN_IDS, IS_TARGET, NUM_TARGETS = "input_ids", "is_target", "num_targets"
_ASSISTANT = "assistant"
_MARKS = re.compile(r"\{%-?\s*generation\b")
_VERSION = 1
"""Version of the cached tokens; bump when a row yields different tokens."""

_Turns = tuple[list[int], list[bool]]
"""Tokens, and for each whether it is a target."""


def open_completions(rows: Rows, tokenizer_folder: Path | None, *, seq_len: int) -> "Dataset":
    """Return all rows with targets as tokens, cached by `datasets`.

    Raises `UserError` without a tokenizer, and `InvalidDataError` if rows have neither format or none has a target.
    """
    tokenizer, identity = _open_tokenizer(tokenizer_folder)
    made = [_tokenized(source, tokenizer, identity, seq_len) for source in rows.sources]
    mixed = rows.mixed(made)
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
    return tokenizer, hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tokenized(source: Source, tokenizer: Any, identity: str, seq_len: int) -> "Dataset":
    rows = source.load()
    key = [_VERSION, identity, seq_len, source.split, stored_files(rows)]
    wanted = [MESSAGES] if MESSAGES in rows.column_names else [PROMPT, COMPLETION]
    check_columns(source, rows, wanted, f"or {MESSAGES}, because --sft trains on answers")
    is_text = PROMPT in wanted and isinstance(rows[0][PROMPT], str)
    if not is_text and tokenizer.chat_template is None:
        raise InvalidDataError(
            found=f"messages in {source.name}, but a tokenizer without a chat template",
            expected="a chat template, which formats messages as text",
            hint="put the model's chat_template.jinja into the folder of --tokenizer, or provide prompts and "
            "completions as text",
        )
    turns: Callable[[Any, Any], _Turns] = _written if is_text else _conversed

    def tokenize(batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {TOKEN_IDS: [], IS_TARGET: [], NUM_TARGETS: []}
        for number, *row in zip(numbers, *(batch[name] for name in wanted), strict=True):
            try:
                tokens, is_target = turns(tokenizer, row)
            except _RowError as error:
                raise _no_row(source, number, str(error)) from error
            found[TOKEN_IDS].append(tokens[:seq_len])
            found[IS_TARGET].append(is_target[:seq_len])
            found[NUM_TARGETS].append(sum(is_target[1:seq_len]))  # nothing predicts the first token
        return found

    return rows.map(
        tokenize,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        new_fingerprint=hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32],
    )


class _RowError(ValueError):
    """A row without a valid prompt and answer."""


def _written(tokenizer: Any, row: Sequence[Any]) -> _Turns:
    if not all(isinstance(each, str) for each in row):
        raise _RowError(f"a {type(row[0]).__name__} and a {type(row[1]).__name__}, not two texts")
    prompt = tokenizer(row[0], verbose=False).input_ids
    completion = tokenizer(row[1], add_special_tokens=False, verbose=False).input_ids
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
        expected=f"{PROMPT} and {COMPLETION} as text or as messages, or {MESSAGES}",
        hint="correct or remove the row",
    )
