"""Tests of masked-token samples: the number of hidden tokens, chosen by seed and sample number alone."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InvalidDataError
from steelyard.modules.model_inputs import IGNORED
from steelyard.runtime.data.tokens import MaskedData, TokenData, num_masked

MASK = 999


@dataclass(frozen=True)
class Counting:
    num_tokens: int = 64 * 40 + 1

    def read(self, first: int, count: int) -> np.ndarray:
        return np.arange(first, first + count) % 900


def masked(seed: int = 0, seq_len: int = 64) -> MaskedData:
    tokens = TokenData(Counting(), name="count", seq_len=seq_len, vocab_size=1000, seed=seed)
    return MaskedData(tokens, mask_token=MASK, vocab_size=1000, seed=seed)


@given(st.integers(0, 10_000), st.integers(0, 100), st.integers(1, 64))
def test_the_number_of_hidden_tokens_is_known_in_advance(sample: int, seed: int, seq_len: int) -> None:
    _, labels = masked(seed, seq_len).sample(sample)
    assert np.count_nonzero(labels != IGNORED) == num_masked(seq_len)


@given(st.integers(0, 10_000))
def test_labels_are_the_tokens_that_were_there(sample: int) -> None:
    data = masked()
    inputs, labels = data.sample(sample)
    tokens = data._tokens.sample(sample).numpy()[:-1]
    hidden = labels != IGNORED
    assert (labels[hidden] == tokens[hidden]).all()
    assert (inputs[~hidden] == tokens[~hidden]).all()


def test_most_hidden_tokens_become_the_mask_token() -> None:
    pairs = [masked().sample(sample) for sample in range(400)]
    inputs, labels = (np.concatenate(part) for part in zip(*pairs, strict=True))
    hidden = labels != IGNORED
    assert 0.77 < np.mean(inputs[hidden] == MASK) < 0.83
    assert 0.07 < np.mean(inputs[hidden] == labels[hidden]) < 0.13


def test_a_sample_is_hidden_alike_whichever_others_are_read() -> None:
    everything = masked().read(list(range(16, 24)))
    some = masked().read([21, 17])
    assert some.inputs.tolist() == [everything.inputs[5].tolist(), everything.inputs[1].tolist()]
    assert some.labels.tolist() == [everything.labels[5].tolist(), everything.labels[1].tolist()]


def test_another_epoch_hides_other_tokens() -> None:
    data = masked()
    first = {int(data._tokens.sample(sample)[0]): data.sample(sample)[1].tolist() for sample in range(40)}
    second = {int(data._tokens.sample(sample)[0]): data.sample(sample)[1].tolist() for sample in range(40, 80)}
    assert first.keys() == second.keys()
    assert first != second


@pytest.mark.parametrize(("mask_token", "found"), [(None, "no mask token"), (1000, "mask token 1000")])
def test_a_mask_token_that_the_model_lacks_is_refused(mask_token: int | None, found: str) -> None:
    tokens = TokenData(Counting(), name="count", seq_len=8, vocab_size=1000, seed=0)
    with pytest.raises(InvalidDataError, match=found):
        MaskedData(tokens, mask_token=mask_token, vocab_size=1000, seed=0)
