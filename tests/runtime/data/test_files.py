"""Tests of token files: tokens read, and refusals."""

from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import InvalidDataError
from steelyard.runtime.data.files import open_token_file

TOKENS = [7, 500, 9, 10, 11]


def write(path: Path, dtype: str) -> Path:
    tokens = np.array(TOKENS, dtype=dtype)
    np.save(path, tokens) if path.suffix == ".npy" else tokens.tofile(path)
    return path


@pytest.mark.parametrize(
    ("name", "dtype", "vocab_size"),
    [
        ("t.npy", "int64", 600),
        ("t.npy", "uint16", 600),
        ("t.npy", "int32", 600),
        ("t.bin", "uint16", 600),
        ("t.bin", "uint16", 65_536),
        ("t.bin", "uint32", 65_537),
        ("t.uint32.bin", "uint32", 600),
        ("t.uint16.bin", "uint16", 100_000),
    ],
)
def test_token_ids_are_read_as_they_are(tmp_path: Path, name: str, dtype: str, vocab_size: int) -> None:
    file = open_token_file(write(tmp_path / name, dtype), vocab_size=vocab_size)
    assert file.num_tokens == 5
    assert file.read(1, 3).tolist() == [500, 9, 10]


@pytest.mark.parametrize("name", ["t.npy", "t.bin"])
def test_a_file_that_shrinks_is_an_error_that_says_so(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "uint16")
    file = open_token_file(path, vocab_size=600)
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - 4)
    assert file.read(0, 3).tolist() == TOKENS[:3]
    with pytest.raises(InvalidDataError, match="became shorter than its 5 tokens"):
        file.read(2, 3)


def test_an_array_of_another_kind_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 9)))
    with pytest.raises(InvalidDataError, match="2 dimensions of float64"):
        open_token_file(tmp_path / "a.npy", vocab_size=600)


def test_a_truncated_array_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", "uint16")
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - 4)
    with pytest.raises(InvalidDataError, match="greater than file size"):
        open_token_file(path, vocab_size=600)


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.npy").write_text("no array")
    with pytest.raises(InvalidDataError, match=r"b\.npy"):
        open_token_file(tmp_path / "b.npy", vocab_size=600)


def test_half_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(InvalidDataError, match="not a multiple of the data-type size"):
        open_token_file(tmp_path / "a.bin", vocab_size=600)
