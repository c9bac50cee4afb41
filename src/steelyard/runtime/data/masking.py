"""Samples of masked-token prediction: some tokens are hidden, and the model is to say which they were.

A sample is ``seq_len`` consecutive tokens. Exactly ``num_masked(seq_len)`` of them are chosen, by a generator that the
seed and the sample's number in the run decide: every plan and a resumed run hide the same tokens, another epoch hides
others, and every rank knows the number of predictions in a global batch without asking. Of the chosen ones 80 % are
replaced by the mask token, 10 % by any token, and 10 % stay. Labels elsewhere are `IGNORED`.

Source: Devlin et al. 2019, section 3.1. Differs: the number is exact per sample where theirs is 15 % on average.
"""

import numpy as np
import torch

from steelyard.errors import InvalidDataError
from steelyard.modules.batch import IGNORED
from steelyard.runtime.data.order import mixed
from steelyard.runtime.data.samples import Samples
from steelyard.runtime.data.tokens import TokenData

MASKED_SHARE = 0.15
_REPLACED, _ANY_TOKEN = 0.8, 0.9


def num_masked(seq_len: int) -> int:
    """Tokens of a sample that are predicted."""
    return max(1, round(MASKED_SHARE * seq_len))


class MaskedData:
    """Samples of masked-token prediction from those of ``tokens``; raises `InvalidDataError` for a foreign mask token.

    ``tokens`` holds ``seq_len`` + 1 tokens a sample, of which the last is left out.
    """

    def __init__(self, tokens: TokenData, *, mask_token: int | None, vocab_size: int, seed: int) -> None:
        if mask_token is None or not 0 <= mask_token < vocab_size:
            raise InvalidDataError(
                found="no mask token" if mask_token is None else f"mask token {mask_token}",
                expected=f"a token id from 0 to {vocab_size - 1} that stands for a hidden token",
                hint="give a tokenizer with a mask token (--tokenizer), or its id (--mask-token)",
            )
        self.num_samples = tokens.num_samples
        self._tokens = tokens
        self._mask_token = mask_token
        self._vocab_size = vocab_size
        self._seed = seed

    def read(self, samples: list[int]) -> Samples:
        """Inputs and labels [len, S]."""
        pairs = [self.sample(sample) for sample in samples]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
        return Samples(inputs=inputs, labels=labels)

    def sample(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Input [S] and labels [S] of the ``sample``-th sample of the run."""
        tokens = self._tokens.sample(sample).numpy()[:-1]
        generator = np.random.default_rng((mixed(self._seed), sample))
        chosen = generator.choice(len(tokens), num_masked(len(tokens)), replace=False, shuffle=False)
        fate = generator.random(len(chosen))
        replacement = np.where(fate < _REPLACED, self._mask_token, tokens[chosen])
        any_token = generator.integers(0, self._vocab_size, len(chosen))
        replacement = np.where((fate >= _REPLACED) & (fate < _ANY_TOKEN), any_token, replacement)
        inputs, labels = tokens.copy(), np.full_like(tokens, IGNORED)
        inputs[chosen], labels[chosen] = replacement, tokens[chosen]
        return inputs, labels
