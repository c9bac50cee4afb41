"""Tests of the contents of samples for each task."""

from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import InvalidDataError
from steelyard.model.read import chain_from_config
from steelyard.modules.model_inputs import IGNORED
from steelyard.runtime.data.prepare import TextOptions
from steelyard.runtime.data.source import open_samples
from steelyard.runtime.data.tokens import Samples, num_masked
from tests.runtime.models import FAMILY_CONFIGS

SEQ_LEN = 16


def read(path: Path | str, config: str, **options: int) -> Samples:
    """Samples 0 and 3 of the first step."""
    chain = chain_from_config(FAMILY_CONFIGS[config], name=config)
    data = open_samples(path, TextOptions(**options), chain, seq_len=SEQ_LEN, seed=0)
    assert data.num_samples > 0
    return Samples.of(data.read([0, 3]))


@pytest.fixture(name="tokens")
def _tokens(tmp_path: Path) -> Path:
    """Token ids that count on."""
    np.save(tmp_path / "t.npy", np.arange(400) % 60)
    return tmp_path / "t.npy"


def test_a_decoder_predicts_the_next_token(tokens: Path) -> None:
    samples = read(tokens, "llama")
    assert samples.inputs.shape == (2, SEQ_LEN)
    assert samples.labels.tolist() == ((samples.inputs + 1) % 60).tolist()


def test_an_encoder_predicts_hidden_tokens(tokens: Path) -> None:
    samples = read(tokens, "bert", mask_token=61)
    assert samples.inputs.shape == samples.labels.shape == (2, SEQ_LEN)
    assert (samples.labels != IGNORED).sum(dim=1).tolist() == [num_masked(SEQ_LEN)] * 2


def test_an_encoder_needs_a_mask_token(tokens: Path) -> None:
    with pytest.raises(InvalidDataError, match="no mask token"):
        read(tokens, "bert")


def test_an_encoder_with_a_decoder_writes_on_where_its_source_ends(tokens: Path) -> None:
    samples = read(tokens, "t5")
    assert samples.inputs.shape == samples.labels.shape == (2, SEQ_LEN)
    assert samples.labels[:, 0].tolist() == ((samples.inputs[:, -1] + 1) % 60).tolist()


@pytest.mark.parametrize("config", ["vit", "swin"])
def test_an_image_model_tells_classes_apart(config: str) -> None:
    samples = read("synthetic", config)
    assert samples.inputs.shape == (2, 3, 16, 16)
    assert samples.labels.max() < 10


def test_an_image_model_refuses_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match="nothing at"):
        read(tmp_path / "missing", "vit")
