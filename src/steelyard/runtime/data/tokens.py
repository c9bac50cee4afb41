"""Samples of token ids, cut from a stream of tokens, for each text task.

| task              | a sample                                                                                         |
|-------------------|--------------------------------------------------------------------------------------------------|
| next token        | ``seq_len`` + 1 consecutive tokens; sample ``i`` starts at token ``i · seq_len``                 |
| encoder, decoder  | ``seq_len`` source tokens, and the ``seq_len`` tokens after them as targets                      |
| masked token      | ``seq_len`` consecutive tokens, some hidden; labels elsewhere are `IGNORED`                      |

Exactly ``num_masked(seq_len)`` tokens of a masked sample are chosen, by a generator seeded with the seed and the sample
number in the run. Every plan and every resumed run therefore hides the same tokens, another epoch hides different ones,
and every rank knows the number of predictions in a global batch without communication. The mask token replaces 80 % of
the chosen tokens, a random token 10 %, and 10 % stay unchanged.

Sources: Devlin et al. 2019, section 3.1, where the number is 15 % on average and not exact per sample; Raffel et al.
2020, section 3.2.1 (prefix language modelling). Not implemented: span corruption.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from steelyard.errors import InvalidDataError
from steelyard.model.chain import ModelChain
from steelyard.modules.model_inputs import IGNORED, blank_samples
from steelyard.runtime.data.files import TokenFile
from steelyard.runtime.data.order import SampleOrder, mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Inputs of the first layer and labels for the last layer; the first dim of both counts samples."""

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, read: "Tensor | Samples") -> "Samples":
        """Return samples unchanged, or split token ids [N, S + 1] into inputs and labels for next-token prediction."""
        return cls(inputs=read[:, :-1], labels=read[:, 1:]) if isinstance(read, Tensor) else read


def checked_samples(read: object, chain: ModelChain, num_samples: int, seq_len: int) -> Samples:
    """Return what a user's loop has read, with 64-bit token ids.

    Raises `InvalidDataError` for samples of other shapes than the plan's, and for ids outside the vocabulary, which
    ranks of tp would ignore without an error.
    """
    if isinstance(read, Tensor):
        _check_ids("token ids", read, (num_samples, seq_len + 1), chain.vocab_size)
        read = read.long()
    elif isinstance(read, Samples):
        with torch.device("meta"):
            inputs, labels = blank_samples(chain, num_samples, seq_len)
        if inputs.is_floating_point():
            _check_shape("inputs", read.inputs, inputs.shape, "floats")
        else:
            _check_ids("inputs", read.inputs, inputs.shape, chain.vocab_size)
        _check_ids("labels", read.labels, labels.shape, chain.vocab_size, ignored=True)
        read = replace(read, labels=read.labels.long())
    else:
        raise _bad_read(f"a {type(read).__name__}", "a tensor of token ids, or Samples")
    return Samples.of(read)


def _check_shape(name: str, found: Tensor, shape: tuple[int, ...], values: str) -> None:
    if found.shape != shape or found.is_floating_point() != (values == "floats"):
        raise _bad_read(
            f"{name} of {str(found.dtype).removeprefix('torch.')} and shape {list(found.shape)}",
            f"{name} of {values} and shape {list(shape)}, for {shape[0]} samples",
        )


def _check_ids(name: str, found: Tensor, shape: tuple[int, ...], vocab_size: int, *, ignored: bool = False) -> None:
    _check_shape(name, found, shape, "integers")
    if isinstance(found, FakeTensor):
        return
    foreign = found[((found < 0) | (found >= vocab_size)) & ((found != IGNORED) | (not ignored))]
    if len(foreign):
        raise _bad_read(
            f"{name} with {int(foreign[0])}",
            f"{name} from 0 to {vocab_size - 1}, the model's vocabulary" + f", or {IGNORED} without a target" * ignored,
        )


def _bad_read(found: str, expected: str) -> InvalidDataError:
    hint = "return the samples of the given numbers, tokenized for the model, at the plan's sequence length"
    return InvalidDataError(field="read", found=found, expected=expected, hint=hint)


class MadeUpTokens:
    """A long stream of random tokens, uniform over the vocabulary.

    Token ``i`` is a hash of the seed and ``i`` (splitmix64: Steele, Lea and Flood 2014).
    """

    num_tokens = 1 << 40

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def read(self, first: int, count: int) -> np.ndarray:
        """Return ``count`` token ids from token ``first`` on, as 64-bit integers."""
        mixed = np.arange(first, first + count, dtype=np.uint64) + (np.uint64(self._seed) << np.uint64(32))
        mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(self._vocab_size)).astype(np.int64)


class TokenData:
    """Samples of ``seq_len`` + 1 tokens from a stream of tokens, in a seeded order.

    Raises `InvalidDataError` if the stream is shorter than one sample.
    """

    def __init__(
        self, tokens: TokenFile | MadeUpTokens, *, name: str, seq_len: int, vocab_size: int, seed: int
    ) -> None:
        self.num_samples = (tokens.num_tokens - 1) // seq_len
        if self.num_samples < 1:
            raise InvalidDataError(
                found=f"{tokens.num_tokens} tokens in {name}",
                expected=f"at least {seq_len + 1}, one sample of the plan's sequence length {seq_len}",
                hint="provide more data, or plan for a shorter --seq-len",
            )
        self._tokens, self._name, self._seq_len, self._vocab_size = tokens, name, seq_len, vocab_size
        self._order = SampleOrder(num_samples=self.num_samples, seed=seed)

    def read(self, samples: list[int]) -> Tensor:
        """Read tokens [len, S + 1]."""
        return torch.stack([self.sample(sample) for sample in samples])

    def sample(self, sample: int) -> Tensor:
        """Return tokens [S + 1] of the run's ``sample``-th sample. Raises `InvalidDataError` for foreign tokens."""
        first = self._order.data_sample(sample) * self._seq_len
        tokens = self._tokens.read(first, self._seq_len + 1)
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self._vocab_size:
            raise InvalidDataError(
                found=f"token id {(most if most >= self._vocab_size else least)} at positions {first} to "
                f"{first + self._seq_len} of {self._name}",
                expected=f"token ids from 0 to {self._vocab_size - 1}, the model's vocabulary",
                hint="tokenize the data with the vocabulary of the model",
            )
        return torch.from_numpy(tokens)


class PrefixLmData:
    """Samples split into source and target, from ``tokens`` with 2 · ``seq_len`` + 1 tokens per sample."""

    def __init__(self, tokens: TokenData) -> None:
        self.num_samples = tokens.num_samples
        self._tokens = tokens

    def read(self, samples: list[int]) -> Samples:
        """Read sources and targets [len, S]."""
        source, target = self._tokens.read(samples)[:, :-1].chunk(2, dim=1)
        return Samples(inputs=source, labels=target)


MASKED_SHARE = 0.15
_REPLACED, _ANY_TOKEN = 0.8, 0.9


def num_masked(seq_len: int) -> int:
    """Return the number of tokens in a sample that are predicted."""
    return max(1, round(MASKED_SHARE * seq_len))


class MaskedData:
    """Samples for masked-token prediction, from ``tokens`` with ``seq_len`` + 1 tokens per sample (the last is unused).

    Raises `InvalidDataError` if the mask token is missing or outside the vocabulary.
    """

    def __init__(self, tokens: TokenData, *, mask_token: int | None, vocab_size: int, seed: int) -> None:
        if mask_token is None or not 0 <= mask_token < vocab_size:
            raise InvalidDataError(
                found="no mask token" if mask_token is None else f"mask token {mask_token}",
                expected=f"a token id from 0 to {vocab_size - 1} that stands for a hidden token",
                hint="pass a tokenizer with a mask token (--tokenizer), or its id (--mask-token)",
            )
        self.num_samples = tokens.num_samples
        self._tokens, self._mask_token, self._vocab_size, self._seed = tokens, mask_token, vocab_size, seed

    def read(self, samples: list[int]) -> Samples:
        """Read inputs and labels [len, S]."""
        pairs = [self.sample(sample) for sample in samples]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
        return Samples(inputs=inputs, labels=labels)

    def sample(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input [S] and labels [S] of the ``sample``-th sample of the run."""
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
