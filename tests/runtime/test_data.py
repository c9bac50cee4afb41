"""Text and token files as samples: what is read, in which order, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import InvalidDataError
from steelyard.runtime.data import TokenData, open_data


def open_small(
    path: Path, *, seq_len: int = 4, vocab_size: int = 256, seed: int = 0, max_bytes: int = 1 << 20
) -> TokenData:
    return open_data(path, seq_len=seq_len, vocab_size=vocab_size, seed=seed, max_bytes=max_bytes)


def counted(num_tokens: int, *, seq_len: int = 4, seed: int = 0) -> TokenData:
    tokens = np.arange(num_tokens, dtype=np.int64)
    return TokenData(tokens, source="count", seq_len=seq_len, vocab_size=num_tokens, seed=seed)


def all_tokens(data: TokenData, num_samples: int) -> list[list[int]]:
    return sorted(data.reader(0, num_samples)(list(range(num_samples))).tolist())


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


def test_no_more_text_is_read_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    (tmp_path / "b.txt").write_text("ijklmnop")
    assert open_small(tmp_path, seq_len=1, max_bytes=11).num_samples == 10


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_token_files_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    tokens = np.array([7, 500, 9, 10, 11], dtype=np.uint16)
    np.save(tmp_path / name, tokens) if name.endswith("npy") else tokens.tofile(tmp_path / name)
    assert all_tokens(open_small(tmp_path / name, vocab_size=501), 1) == [[7, 500, 9, 10, 11]]


def test_an_epoch_reads_every_sample_once_and_the_next_in_another_order() -> None:
    data = counted(401)
    epochs = [[data.sample_position(sample) for sample in range(first, first + 100)] for first in (0, 100)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 400, 4))
    assert epochs[0] != epochs[1]


def test_the_order_depends_on_the_seed() -> None:
    orders = [[counted(401, seed=seed).sample_position(sample) for sample in range(100)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_a_sample_is_the_same_whichever_other_samples_a_rank_reads() -> None:
    read = counted(401).reader(3, 16)
    everything = read(list(range(16)))
    assert read([5, 2]).tolist() == [everything[5].tolist(), everything[2].tolist()]


def test_steps_read_one_after_another() -> None:
    data = counted(401)
    assert data.reader(1, 8)([0]).tolist() == data.reader(0, 16)([8]).tolist()


@pytest.mark.parametrize(("content", "found"), [(None, "nothing at"), ("", "no text in"), ("abcd", "4 tokens in")])
def test_missing_empty_and_short_data_are_refused(tmp_path: Path, content: str | None, found: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidDataError, match=found):
        open_small(path)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(InvalidDataError, match="no text in"):
        open_small(tmp_path)


def test_text_needs_a_vocabulary_of_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    with pytest.raises(InvalidDataError, match="vocab_size: found 255"):
        open_small(tmp_path / "a.txt", vocab_size=255)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4, 256]))
    with pytest.raises(InvalidDataError, match="token 256 between tokens 0 and 4"):
        open_small(tmp_path / "a.npy").reader(0, 1)([0])


def test_a_file_that_is_no_token_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 9)))
    with pytest.raises(InvalidDataError, match="2 dimensions of float64"):
        open_small(tmp_path / "a.npy")
    (tmp_path / "b.npy").write_text("no array")
    with pytest.raises(InvalidDataError, match=r"b\.npy"):
        open_small(tmp_path / "b.npy")
