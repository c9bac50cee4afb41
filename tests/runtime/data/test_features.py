"""Tests of samples of features with token ids: from a folder of arrays, or generated."""

from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import InvalidDataError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.runtime.data.prepare import TextOptions
from steelyard.runtime.data.source import SampleData, open_samples
from tests.modules.split_configs import split_config
from tests.runtime.feature_cases import SPLITS


@pytest.fixture(name="chain")
def _chain() -> ModelChain:
    return chain_from_config(split_config("whisper"), name="whisper", split=SPLITS["whisper"])


def opened(path: str | Path, chain: ModelChain) -> SampleData:
    return open_samples(path, TextOptions(), chain, seq_len=4, seed=1)


def write(folder: Path, features: np.ndarray, tokens: np.ndarray) -> Path:
    np.save(folder / "features.npy", features)
    np.save(folder / "tokens.npy", tokens)
    return folder


def test_made_up_features_have_the_shape_of_the_model_and_depend_on_the_sample_alone(chain: ModelChain) -> None:
    data = opened("synthetic", chain)
    both = data.read([3, 5])
    assert both.inputs.shape == (2, 8, 48)
    assert both.labels.shape == (2, 4)
    assert data.read([5]).inputs.equal(both.inputs[1:])


def test_a_folder_of_arrays_is_read_as_far_as_the_sequence_goes(chain: ModelChain, tmp_path: Path) -> None:
    features = np.arange(3, dtype=np.float32)[:, None, None] * np.ones((3, 8, 48), np.float32)
    tokens = np.arange(3)[:, None] * np.ones((3, 6), np.int64)
    data = opened(write(tmp_path, features, tokens), chain)
    read = data.read([0, 1, 2])
    assert sorted(read.labels[:, 0].tolist()) == [0, 1, 2]
    assert read.labels.shape == (3, 4)
    assert read.inputs[:, 0, 0].long().equal(read.labels[:, 0])


@pytest.mark.parametrize(
    ("features", "tokens", "found"),
    [
        ((3, 8, 40), (3, 6), r"an array of \[3, 8, 40\]"),
        ((3, 8, 48), (2, 6), r"an array of \[2, 6\]"),
        ((3, 8, 48), (3, 2), r"an array of \[3, 2\]"),
    ],
)
def test_arrays_of_other_shapes_are_refused(
    chain: ModelChain, tmp_path: Path, features: tuple[int, ...], tokens: tuple[int, ...], found: str
) -> None:
    with pytest.raises(InvalidDataError, match=found):
        opened(write(tmp_path, np.zeros(features), np.zeros(tokens, np.int64)), chain)


def test_a_folder_without_arrays_is_refused(chain: ModelChain, tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match="features"):
        opened(tmp_path, chain)


def test_foreign_tokens_are_refused_and_places_without_a_target_are_not(chain: ModelChain, tmp_path: Path) -> None:
    tokens = np.array([[-100, 1, 2, 3]])
    assert opened(write(tmp_path, np.zeros((1, 8, 48)), tokens), chain).read([0]).labels.tolist() == tokens.tolist()
    with pytest.raises(InvalidDataError, match="token 128"):
        opened(write(tmp_path, np.zeros((1, 8, 48)), tokens + 125), chain).read([0])
