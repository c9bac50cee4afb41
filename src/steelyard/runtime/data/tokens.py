"""Samples of next-token prediction: ``seq_len`` + 1 consecutive tokens, sample ``i`` from token ``i · seq_len`` on."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from steelyard.errors import InvalidDataError
from steelyard.runtime.data.order import SampleOrder


class TokenSource(Protocol):
    """A stream of token ids."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the stream."""

    def read(self, first: int, count: int) -> np.ndarray:
        """``count`` token ids from token ``first`` on, as 64-bit numbers."""


class MadeUpTokens:
    """A long stream of tokens without meaning, evenly drawn from the vocabulary; token ``i`` is a hash of the seed and
    ``i`` (splitmix64: Steele, Lea and Flood 2014)."""

    num_tokens = 1 << 40

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def read(self, first: int, count: int) -> np.ndarray:
        """``count`` token ids from token ``first`` on, as 64-bit numbers."""
        mixed = np.arange(first, first + count, dtype=np.uint64) + (np.uint64(self._seed) << np.uint64(32))
        mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(self._vocab_size)).astype(np.int64)


class TokenData:
    """Samples of ``seq_len`` + 1 tokens from a stream of tokens, in an order that the seed decides.

    Raises `InvalidDataError` if the stream is shorter than one sample.
    """

    def __init__(self, tokens: TokenSource, *, name: str, seq_len: int, vocab_size: int, seed: int) -> None:
        self.num_samples = (tokens.num_tokens - 1) // seq_len
        if self.num_samples < 1:
            raise InvalidDataError(
                found=f"{tokens.num_tokens} tokens in {name}",
                expected=f"at least {seq_len + 1}, one sample of the plan's sequence length {seq_len}",
                hint="give more data, or plan for a shorter --seq-len",
            )
        self._tokens = tokens
        self._name = name
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._order = SampleOrder(num_samples=self.num_samples, seed=seed)

    def read(self, samples: list[int]) -> Tensor:
        """Tokens [len, S + 1]."""
        return torch.stack([self.sample(sample) for sample in samples])

    def sample_position(self, sample: int) -> int:
        """First token of the ``sample``-th sample of the run, counted from its first step on."""
        return self._order.data_sample(sample) * self._seq_len

    def sample(self, sample: int) -> Tensor:
        """The tokens [S + 1] of the ``sample``-th sample of the run; raises `InvalidDataError` for a foreign token."""
        first = self.sample_position(sample)
        tokens = self._tokens.read(first, self._seq_len + 1)
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self._vocab_size:
            raise InvalidDataError(
                found=f"token {most if most >= self._vocab_size else least} "
                f"between tokens {first} and {first + self._seq_len} of {self._name}",
                expected=f"token ids from 0 to {self._vocab_size - 1}, the model's vocabulary",
                hint="tokenize the data with the vocabulary of the model",
            )
        return torch.from_numpy(tokens)
