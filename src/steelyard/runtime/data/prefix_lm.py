"""Samples for an encoder with a decoder: ``seq_len`` tokens to read, and the ``seq_len`` tokens after them to write.

Source: Raffel et al. 2020, section 3.2.1 (prefix language modelling). Not done: span corruption.
"""

from steelyard.runtime.data.samples import Samples
from steelyard.runtime.data.tokens import TokenData


class PrefixLmData:
    """Samples of two halves from those of ``tokens``, which holds 2 · ``seq_len`` + 1 tokens a sample."""

    def __init__(self, tokens: TokenData) -> None:
        self.num_samples = tokens.num_samples
        self._tokens = tokens

    def read(self, samples: list[int]) -> Samples:
        """Sources and targets [len, S]."""
        source, target = self._tokens.read(samples)[:, :-1].chunk(2, dim=1)
        return Samples(inputs=source, labels=target)
