"""What ``--data PATH`` means for a model: token files are read as they are, text is tokenized, images are folders.

What has features beside token ids is a folder of arrays.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.runtime.data.features import FeatureFolder, SyntheticFeatures
from steelyard.runtime.data.files import is_token_file, open_bytes, open_token_file
from steelyard.runtime.data.images import ImageData, ImageFolder, ImageShape, SyntheticImages
from steelyard.runtime.data.masking import MaskedData
from steelyard.runtime.data.prefix_lm import PrefixLmData
from steelyard.runtime.data.prepare import (
    SYNTHETIC,
    TextOptions,
    check_data_path,
    check_vocabulary,
    mask_token,
    prepare_text,
)
from steelyard.runtime.data.samples import Samples
from steelyard.runtime.data.tokens import MadeUpTokens, TokenData


class SampleData(Protocol):
    """Samples in an order that no plan changes."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    def read(self, samples: list[int]) -> Tensor | Samples:
        """These samples of the run, counted from its first step on."""


def open_samples(path: str | Path, text: TextOptions, chain: ModelChain, *, seq_len: int, seed: int) -> SampleData:
    """The samples at ``path`` for what a model is trained for.

    Raises `InvalidDataError` if the path is missing, holds nothing of the kind, is shorter than one sample, or does not
    belong to the model's vocabulary or classes.
    """
    task = chain.family.task
    if task is Task.IMAGE_CLASSIFICATION:
        return open_images(Path(path), chain, seed=seed)
    if chain.features:
        return open_features(Path(path), chain, seq_len=seq_len, seed=seed)
    length = 2 * seq_len if task is Task.SEQ2SEQ_LM else seq_len
    tokens = open_data(path, text, seq_len=length, vocab_size=chain.vocab_size, seed=seed)
    if task is Task.SEQ2SEQ_LM:
        return PrefixLmData(tokens)
    if task is Task.MASKED_LM:
        hidden = mask_token(Path(path), text)
        return MaskedData(tokens, mask_token=hidden, vocab_size=chain.vocab_size, seed=seed)
    return tokens


def open_data(path: str | Path, text: TextOptions, *, seq_len: int, vocab_size: int, seed: int) -> TokenData:
    """The samples of next-token prediction from the token file or text at ``path``; ``synthetic`` ones are made up."""
    path = Path(path)
    if str(path) == SYNTHETIC:
        made_up = MadeUpTokens(vocab_size=vocab_size, seed=seed)
        return TokenData(made_up, name=SYNTHETIC, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    check_data_path(path)
    if is_token_file(path):
        tokens = open_token_file(path, vocab_size=vocab_size)
    else:
        check_vocabulary(text, vocab_size)
        prepared = prepare_text(path, text)
        tokens = open_bytes(path) if prepared == path else open_token_file(prepared, vocab_size=vocab_size)
    return TokenData(tokens, name=str(path), seq_len=seq_len, vocab_size=vocab_size, seed=seed)


def open_features(path: Path, chain: ModelChain, *, seq_len: int, seed: int) -> SyntheticFeatures | FeatureFolder:
    """Features of the model's shape with token ids: those of a folder, or made-up ones for ``synthetic``."""
    assert chain.features is not None
    options = {"seq_len": seq_len, "vocab_size": chain.vocab_size, "seed": seed}
    if str(path) == SYNTHETIC:
        return SyntheticFeatures(chain.features, open_data(path, TextOptions(), **options), seed=seed)
    check_data_path(path)
    return FeatureFolder(path, chain.features, **options)


def open_images(path: Path, chain: ModelChain, *, seed: int) -> ImageData:
    """Labelled images of the model's size: those of a folder, or made-up ones where ``path`` is ``synthetic``."""
    assert chain.image is not None, "a model of images has an image size"
    num_channels, height, width = chain.image
    shape = ImageShape(num_channels=num_channels, height=height, width=width, num_classes=chain.vocab_size)
    if str(path) == SYNTHETIC:
        return SyntheticImages(shape, seed=seed)
    check_data_path(path)
    return ImageFolder(path, shape, seed=seed)
