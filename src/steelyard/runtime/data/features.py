"""Samples of token ids with features beside them: of a folder of arrays, or made up from the seed.

| ``--data``    | samples                                                                                       |
|---------------|-----------------------------------------------------------------------------------------------|
| a folder      | ``features.npy`` [N, ...] of the model's shape and ``tokens.npy`` [N, S] with the token ids   |
| ``synthetic`` | noise, and token ids without meaning                                                          |

Of token ids that are longer than the plan's sequences the first are read; -100 stands where there is no target. Beside
images they are the text alone, which stands behind the places of the image. Not done: text before an image, and
features of files of sound or images, which a model's own feature extractor makes.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from steelyard.errors import InvalidDataError
from steelyard.model.split import SplitFeatures
from steelyard.modules.batch import IGNORED, fitting_tokens
from steelyard.runtime.data.order import SampleOrder, mixed
from steelyard.runtime.data.samples import Samples

FEATURES, TOKENS = "features.npy", "tokens.npy"


class _Tokens(Protocol):
    num_samples: int

    def read(self, samples: list[int]) -> Tensor:
        """Tokens [len, S + 1]."""


class SyntheticFeatures:
    """Noise that the seed and a sample's number decide, with the samples of ``tokens``."""

    def __init__(self, features: SplitFeatures, tokens: _Tokens, *, seed: int) -> None:
        self.num_samples = tokens.num_samples
        self._features, self._tokens, self._seed = features, tokens, mixed(seed)

    def read(self, samples: list[int]) -> Samples:
        """Features [len, ...] and token ids [len, S]."""
        shape = self._features.shape
        noise = [np.random.default_rng((self._seed, each)).standard_normal(shape, np.float32) for each in samples]
        labels = fitting_tokens(self._tokens.read(samples)[:, :-1], self._features)
        return Samples(inputs=torch.from_numpy(np.stack(noise)), labels=labels)


class FeatureFolder:
    """Arrays of a folder, in an order that the seed decides; raises `InvalidDataError` if they are not the model's."""

    def __init__(self, folder: Path, of: SplitFeatures, *, seq_len: int, vocab_size: int, seed: int) -> None:
        self._features, self._tokens = (_opened(folder / name) for name in (FEATURES, TOKENS))
        self._before = max(of.places - 1, 0)
        shape, seq_len = of.shape, seq_len - self._before
        self._folder, self._seq_len, self._vocab_size = folder, seq_len, vocab_size
        self.num_samples = len(self._features)
        if self._features.shape[1:] != shape:
            raise _wrong(folder / FEATURES, self._features.shape, f"[N, {', '.join(map(str, shape))}]")
        if self._tokens.ndim != 2 or len(self._tokens) != self.num_samples or self._tokens.shape[1] < seq_len:
            raise _wrong(folder / TOKENS, self._tokens.shape, f"[{self.num_samples}, {seq_len} or more]")
        self._order = SampleOrder(num_samples=self.num_samples, seed=seed)

    def read(self, samples: list[int]) -> Samples:
        """Features [len, ...] and token ids [len, S]."""
        places = [self._order.data_sample(each) for each in samples]
        features = np.stack([self._features[place] for place in places]).astype(np.float32)
        tokens = np.stack([self._tokens[place, : self._seq_len] for place in places]).astype(np.int64)
        foreign = tokens[(tokens != IGNORED) & ((tokens < 0) | (tokens >= self._vocab_size))]
        if foreign.size:
            raise InvalidDataError(
                found=f"token {foreign[0]} in {self._folder / TOKENS}",
                expected=f"token ids from 0 to {self._vocab_size - 1}, the model's vocabulary, or {IGNORED}",
                hint="tokenize the data with the vocabulary of the model",
            )
        labels = np.pad(tokens, ((0, 0), (self._before, 0)), constant_values=IGNORED)
        return Samples(inputs=torch.from_numpy(features), labels=torch.from_numpy(labels))


def _opened(file: Path) -> np.ndarray:
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidDataError(
            found=f"{file}: {error}",
            expected=f"a folder with the arrays {FEATURES} and {TOKENS}",
            hint="write them with numpy.save, or train on made-up samples with --data synthetic",
        ) from error
    if not len(found.shape) or not len(found):
        raise _wrong(file, found.shape, "at least one sample")
    return found


def _wrong(file: Path, shape: tuple[int, ...], expected: str) -> InvalidDataError:
    return InvalidDataError(
        found=f"an array of {list(shape)} in {file}",
        expected=expected,
        hint="give what the model's own feature extractor and tokenizer make, or plan for another --seq-len",
    )
