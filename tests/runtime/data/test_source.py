"""Tests of ``--data PATH``: text and token files, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from steelyard.errors import InvalidDataError
from steelyard.runtime.data.prepare import TextOptions, prepare_text
from steelyard.runtime.data.source import open_data
from steelyard.runtime.data.tokens import MadeUpTokens, TokenData


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def open_small(
    path: Path, text: TextOptions | None = None, *, seq_len: int = 4, vocab_size: int = 256, seed: int = 0
) -> TokenData:
    return open_data(path, text or TextOptions(), seq_len=seq_len, vocab_size=vocab_size, seed=seed)


def all_tokens(data: TokenData, num_samples: int) -> list[list[int]]:
    return sorted(data.read(list(range(num_samples))).tolist())


@pytest.fixture(name="words")
def _words(tmp_path: Path) -> Callable[..., Path]:
    """Write a tokenizer of whole words: its ids are the places in the list."""

    def write(*words: str, end: str | None = None) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        if end is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
        return folder

    return write


def test_text_is_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghi")
    assert all_tokens(open_small(tmp_path / "a.txt"), 2) == [[97, 98, 99, 100, 101], [101, 102, 103, 104, 105]]


def test_a_folder_is_read_in_the_order_of_names_without_hidden_binary_and_undecodable_files(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("bb")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("zz")
    (tmp_path / "a.txt").write_text("aa")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "d.txt").write_bytes(b"x\0y")
    (tmp_path / ".hidden.txt").write_text("hh")
    (tmp_path / "e.bin").write_bytes(b"xx")
    (tmp_path / "f.txt").symlink_to(tmp_path / "b.py")
    assert all_tokens(open_small(tmp_path, seq_len=8), 1) == [list(b"aa\0bb\0zz\0")]


def test_each_line_of_json_lines_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "ab", "id": 1}\n\n{"body": "c"}\n')
    data = open_small(tmp_path / "a.jsonl", TextOptions(text_key="body"))
    assert all_tokens(data, 1) == [list(b"ab\0c\0")]


def test_a_tokenizer_turns_documents_into_ids_with_its_end_token_between_them(
    tmp_path: Path, words: Callable[..., Path]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "to be"}\n{"text": "or"}\n')
    options = TextOptions(tokenizer=words("?", "to", "be", "or", "</s>", end="</s>"))
    assert all_tokens(open_small(tmp_path / "a.jsonl", options), 1) == [[1, 2, 4, 3, 4]]


def test_a_tokenizer_without_an_end_token_puts_documents_side_by_side(
    tmp_path: Path, words: Callable[..., Path]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "to be"}\n{"text": "or not to"}\n')
    options = TextOptions(tokenizer=words("?", "to", "be", "or") / "tokenizer.json")
    assert all_tokens(open_small(tmp_path / "a.jsonl", options), 1) == [[1, 2, 3, 0, 1]]


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path: Path, words: Callable[..., Path]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or")
    options = TextOptions(tokenizer=words("?", "to", "be", "or"))
    first = prepare_text(text, options)
    written_ns = first.stat().st_mtime_ns
    assert prepare_text(text, options) == first
    assert first.stat().st_mtime_ns == written_ns
    text.write_text("to be or not")
    assert prepare_text(text, options) != first
    assert prepare_text(text, TextOptions(tokenizer=words("?", "to"))) != first


def test_no_more_text_is_read_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    (tmp_path / "b.txt").write_text("ijklmnop")
    data = open_small(tmp_path, TextOptions(max_bytes=11), seq_len=12)
    assert all_tokens(data, 1) == [list(b"abcdefgh\0ijk\0")]


def test_a_sample_is_the_same_whichever_other_samples_a_rank_reads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(chr(33 + place % 90) for place in range(401)))
    data = open_small(tmp_path / "a.txt")
    everything = data.read(list(range(48, 64)))
    assert data.read([53, 50]).tolist() == [everything[5].tolist(), everything[2].tolist()]


def test_steps_read_one_after_another(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(401))
    data = open_small(tmp_path / "a.npy", vocab_size=401)
    assert data.read([8, 9])[0].tolist() == data.read([8])[0].tolist()


@pytest.mark.parametrize(("content", "found"), [(None, "nothing at"), ("", "0 tokens in"), ("abcd", "4 tokens in")])
def test_missing_empty_and_short_data_are_refused(tmp_path: Path, content: str | None, found: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidDataError, match=found):
        open_small(path)


def test_a_folder_without_text_is_refused_and_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(InvalidDataError, match="no text in"):
        prepare_text(tmp_path, TextOptions(), folder=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("content", [b"\xff\xfea", b"x\0y"])
def test_a_named_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(InvalidDataError, match=r"no text in .*a\.txt"):
        open_small(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "found"),
    [("{", "JSON parse error"), ('{"body": "x"}', "None under 'text' in row 2"), ("[1]", "JSON parse error")],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, found: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' + line + "\n")
    with pytest.raises(InvalidDataError, match=found):
        open_small(tmp_path / "a.jsonl")


def test_text_needs_a_vocabulary_of_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    with pytest.raises(InvalidDataError, match="vocab_size: found 255"):
        open_small(tmp_path / "a.txt", vocab_size=255)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path, words: Callable[..., Path]) -> None:
    (tmp_path / "a.txt").write_text("to be or not")
    with pytest.raises(InvalidDataError, match="expected: 4 or more"):
        open_small(tmp_path / "a.txt", TextOptions(tokenizer=words("?", "to", "be", "or")), vocab_size=3)


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "a.txt").write_text("to be or not")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidDataError, match="tokenizer: found"):
        open_small(tmp_path / "a.txt", TextOptions(tokenizer=path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("abcdefgh")
    (tmp_path / "cache").write_text("a file where a folder is needed")
    with pytest.raises(InvalidDataError, match="cannot be written"):
        prepare_text(tmp_path / "texts", TextOptions(), folder=tmp_path / "cache")


@pytest.mark.parametrize(("token", "dtype"), [(256, "int64"), (-1, "int64")])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4, token], dtype=dtype))
    with pytest.raises(InvalidDataError, match=f"token id {token} at positions 0 to 4"):
        open_small(tmp_path / "a.npy").read([0])


def test_made_up_tokens_are_the_same_however_they_are_read_and_others_for_another_seed() -> None:
    data, again = open_small(Path("synthetic")), open_small(Path("synthetic"), seq_len=8)
    first = data.read([0])
    assert first.tolist() == open_small(Path("synthetic")).read([0]).tolist()
    assert first.tolist() != open_small(Path("synthetic"), seed=1).read([0]).tolist()
    tokens = MadeUpTokens(vocab_size=11, seed=3)
    assert tokens.read(5, 4).tolist() == tokens.read(0, 9)[5:].tolist()
    assert again.num_samples == data.num_samples // 2


def test_made_up_tokens_are_evenly_drawn_from_the_vocabulary() -> None:
    counts = np.bincount(MadeUpTokens(vocab_size=10, seed=0).read(0, 10_000), minlength=10)
    assert len(counts) == 10
    assert counts.min() > 850
    assert counts.max() < 1150
