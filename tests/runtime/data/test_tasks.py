"""Tests of the contents of samples for each task."""

from pathlib import Path

import numpy as np
import pytest
import torch

from steelyard.errors import InvalidDataError
from steelyard.model.read import chain_from_config
from steelyard.modules.model_inputs import IGNORED
from steelyard.runtime.data.prepare import TextOptions
from steelyard.runtime.data.source import open_samples
from steelyard.runtime.data.tokens import Samples, checked_samples, num_masked
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


def test_what_a_loop_reads_becomes_samples_of_the_plan() -> None:
    chain = chain_from_config(FAMILY_CONFIGS["llama"], name="llama")
    read = checked_samples(torch.zeros(2, SEQ_LEN + 1, dtype=torch.int32), chain, 2, SEQ_LEN)
    assert (read.inputs.shape, read.labels.dtype) == ((2, SEQ_LEN), torch.long)
    given = Samples(inputs=read.inputs, labels=torch.full_like(read.labels, IGNORED))
    assert (checked_samples(given, chain, 2, SEQ_LEN).labels == IGNORED).all()


@pytest.mark.parametrize(
    ("config", "given", "found"),
    [
        ("llama", torch.zeros(8, SEQ_LEN + 1, dtype=torch.long), r"shape \[8, 17\](.|\n)*shape \[2, 17\], for 2"),
        ("llama", torch.zeros(2, SEQ_LEN, dtype=torch.long), r"shape \[2, 16\](.|\n)*shape \[2, 17\]"),
        ("llama", torch.zeros(2, SEQ_LEN + 1), r"token ids of float32"),
        ("llama", torch.full((2, SEQ_LEN + 1), 64), r"with 64(.|\n)*from 0 to 63"),
        ("llama", torch.full((2, SEQ_LEN + 1), IGNORED), r"token ids with -100"),
        ("llama", [[1, 2]], r"read: found a list"),
        ("t5", Samples(inputs=torch.zeros(2, SEQ_LEN).long(), labels=torch.full((2, SEQ_LEN), -1)), r"labels with -1"),
        ("vit", Samples(inputs=torch.zeros(2, 3, 8, 8), labels=torch.zeros(2).long()), r"\[2, 3, 16, 16\]"),
    ],
)
def test_a_loop_that_reads_other_samples_is_told_so(config: str, given: object, found: str) -> None:
    chain = chain_from_config(FAMILY_CONFIGS[config], name=config)
    with pytest.raises(InvalidDataError, match=found):
        checked_samples(given, chain, 2, SEQ_LEN)
