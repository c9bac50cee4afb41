"""Samples for an encoder with a decoder: ``seq_len`` tokens to read, and the ``seq_len`` tokens after them to write.

Source: Raffel et al. 2020, section 3.2.1 (prefix language modelling). Not done: span corruption.
"""

from collections.abc import Callable

import torch

from steelyard.runtime.data.samples import Samples
from steelyard.runtime.data.tokens import TokenData


class PrefixLmData:
    """Samples of two halves from those of ``tokens``, which holds 2 · ``seq_len`` + 1 tokens a sample."""

    def __init__(self, tokens: TokenData) -> None:
        self.num_samples = tokens.num_samples
        self._tokens = tokens

    def reader(self, step: int, global_batch: int) -> Callable[[list[int]], Samples]:
        """What `ParallelModel.train_step` reads with: indices into the global batch to sources and targets [len, S]."""

        def read(indices: list[int]) -> Samples:
            tokens = torch.stack([self._tokens.sample(step * global_batch + index)[:-1] for index in indices])
            source, target = tokens.chunk(2, dim=1)
            return Samples(inputs=source, labels=target)

        return read
