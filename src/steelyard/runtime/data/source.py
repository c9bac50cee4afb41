"""Samples from ``--data PATH``: token files are read directly, text is tokenized, other data is read from folders.

| model                 | a folder                                                                                     |
|-----------------------|----------------------------------------------------------------------------------------------|
| image classification  | images of its subfolders in name order; each subfolder is a class, numbered by name          |
| features with text    | ``features.npy`` [N, ...] of the model's shape and ``tokens.npy`` [N, S] with token ids      |

``synthetic`` generates samples. Images are noise over a pattern per class, so that there is something to learn.
Features are noise, with random token ids.

An image file is scaled until it just covers the model's image size and cropped to its centre (with Pillow); values are
mapped from 0…255 to -1…1. Rows of token ids that are longer than the plan's sequences are truncated; -100 marks a
position without a target. In models of images with text, token ids cover only the text, which follows the positions of
the image. Not implemented: random crops, flips and other augmentation; text before an image; features from sound or
image files, which a model's own feature extractor makes.

Samples for a user's own module are tensors of a file, named as in the module's sample, or that sample itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree as pytree

from steelyard.errors import InvalidDataError
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.model.split import SplitFeatures
from steelyard.modules.model_inputs import IGNORED, fitting_tokens
from steelyard.modules.own_pieces import OwnModel
from steelyard.runtime.data.completions import (
    IS_TARGET,
    LABELS,
    NUM_TARGETS,
    NUM_TOKENS,
    TOKEN_IDS,
    RowOptions,
    open_completions,
)
from steelyard.runtime.data.files import is_token_file, open_bytes, open_token_file
from steelyard.runtime.data.order import SampleOrder, mixed
from steelyard.runtime.data.packing import BFD, SPLIT, pack
from steelyard.runtime.data.prepare import (
    SYNTHETIC,
    TextOptions,
    check_data_path,
    check_vocabulary,
    mask_token,
    prepare_text,
)
from steelyard.runtime.data.rows import Rows
from steelyard.runtime.data.tokens import MadeUpTokens, MaskedData, PrefixLmData, Samples, TokenData


class OwnData:
    """Samples for a user's own module, in a seeded order: rows of a safetensors file or of the module's sample."""

    def __init__(self, path: Path, model: OwnModel, *, seed: int) -> None:
        own = model.split
        self._leaves, self._tree = pytree.tree_flatten(model.sample)
        if str(path) == SYNTHETIC:
            tensors: list[Any] = [each for each in self._leaves if isinstance(each, Tensor)]
            counts = {tensors[0].shape[0]}
        else:
            tensors = _opened_tensors(path, [each.path for each in own.inputs])
            counts = {each.get_shape()[0] for each in tensors}
            for wanted, found in zip(own.inputs, tensors, strict=True):
                if tuple(found.get_shape()[1:]) != wanted.shape:
                    raise InvalidDataError(
                        found=f"{wanted.path} of shape {found.get_shape()} in {path}",
                        expected=f"{wanted.shape} per sample, as in the sample of planning",
                        hint="write samples of that shape, or plan with another sample",
                    )
        if len(counts) > 1 or 0 in counts:
            raise InvalidDataError(
                found=f"tensors of {', '.join(map(str, sorted(counts)))} samples in {path}",
                expected="equal numbers of samples, 1 or more",
                hint="write one entry per sample into every tensor",
            )
        self.num_samples = counts.pop()
        self._tensors = tensors
        self._order = SampleOrder(num_samples=self.num_samples, seed=seed)

    def read(self, samples: list[int]) -> Any:
        """Return these samples in the structure of the sample that was planned with."""
        rows = [self._order.data_sample(sample) for sample in samples]
        taken = iter(torch.stack([each[row : row + 1][0] for row in rows]) for each in self._tensors)
        leaves = [next(taken) if isinstance(each, Tensor) else each for each in self._leaves]
        return pytree.tree_unflatten(leaves, self._tree)


def _opened_tensors(path: Path, names: list[str]) -> list[Any]:
    """Return slices of a file's tensors, which rows can be read from. Raises `InvalidDataError` if one is missing."""
    check_data_path(path)
    try:
        file = safe_open(path, framework="pt")
        there = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise InvalidDataError(
            found=f"{path}: {str(error).splitlines()[0]}",
            expected="a safetensors file, or synthetic",
            hint=f"write it with safetensors.torch.save_file, tensors {', '.join(names)}",
        ) from error
    missing = [name for name in names if name not in there]
    if missing:
        raise InvalidDataError(
            found=f"{path} with {', '.join(there) or 'nothing'}",
            expected=f"tensors {', '.join(names)}, samples first",
            hint=f"add {', '.join(missing)}",
        )
    return [file.get_slice(name) for name in names]


FEATURES, TOKENS = "features.npy", "tokens.npy"


class SyntheticFeatures:
    """Noise as features, determined by the seed and the sample number, with the samples of ``tokens``."""

    def __init__(self, features: SplitFeatures, tokens: TokenData, *, seed: int) -> None:
        self.num_samples = tokens.num_samples
        self._features, self._tokens, self._seed = features, tokens, mixed(seed)

    def read(self, samples: list[int]) -> Samples:
        """Read features [len, ...] and token ids [len, S]."""
        shape = self._features.shape
        noise = [np.random.default_rng((self._seed, each)).standard_normal(shape, np.float32) for each in samples]
        labels = fitting_tokens(self._tokens.read(samples)[:, :-1], self._features)
        return Samples(inputs=torch.from_numpy(np.stack(noise)), labels=labels)


class FeatureFolder:
    """Arrays of a folder, in a seeded order. Raises `InvalidDataError` if their shapes do not fit the model."""

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
        """Read features [len, ...] and token ids [len, S]."""
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
            hint="write them with numpy.save, or use synthetic samples: --data synthetic",
        ) from error
    if not len(found.shape) or not len(found):
        raise _wrong(file, found.shape, "at least one sample")
    return found


def _wrong(file: Path, shape: tuple[int, ...], expected: str) -> InvalidDataError:
    return InvalidDataError(
        found=f"an array of {list(shape)} in {file}",
        expected=expected,
        hint="use the output of the model's feature extractor and tokenizer, or plan for another --seq-len",
    )


_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_NUM_SYNTHETIC = 1 << 20
_PATTERN_SIZE = 4


class ImageData(ABC):
    """Images of ``shape``, channels × height × width, and their classes, in a seeded order."""

    def __init__(self, shape: tuple[int, int, int], *, num_samples: int, seed: int) -> None:
        self.num_samples, self._shape = num_samples, shape
        self._order = SampleOrder(num_samples=num_samples, seed=seed)

    @abstractmethod
    def image(self, data_sample: int) -> tuple[np.ndarray, int]:
        """Return the values [C, H, W], from -1 to 1, and the class of one image."""

    def read(self, samples: list[int]) -> Samples:
        """Read images [len, C, H, W] and their classes."""
        images, classes = zip(*(self.image(self._order.data_sample(sample)) for sample in samples), strict=True)
        return Samples(inputs=torch.from_numpy(np.stack(images)), labels=torch.tensor(classes))


class SyntheticImages(ImageData):
    """Synthetic images: a block pattern per class, with noise determined by the seed and the image number."""

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, seed: int) -> None:
        super().__init__(shape, num_samples=_NUM_SYNTHETIC, seed=seed)
        self._num_classes, self._seed = num_classes, seed

    def image(self, data_sample: int) -> tuple[np.ndarray, int]:
        """Return a noisy pattern and its class."""
        label = data_sample % self._num_classes
        pattern = np.random.default_rng((mixed(self._seed), 0, label)).uniform(
            -0.5, 0.5, (self._shape[0], _PATTERN_SIZE, _PATTERN_SIZE)
        )
        rows, columns = (np.arange(size) * _PATTERN_SIZE // size for size in self._shape[1:])
        noise = np.random.default_rng((mixed(self._seed), 1, data_sample)).uniform(-0.5, 0.5, self._shape)
        return (pattern[:, rows][:, :, columns] + noise).astype(np.float32), label


class ImageFolder(ImageData):
    """Images of a folder of classes. Raises `InvalidDataError` if there are none, or more classes than outputs."""

    def __init__(self, folder: Path, shape: tuple[int, int, int], num_classes: int, *, seed: int) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        self._files = [
            (file, label)
            for label, place in enumerate(classes)
            for file in sorted(path for path in place.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES)
        ]
        if not self._files:
            raise InvalidDataError(
                found=f"no images in the folders of {folder}",
                expected="a folder of images per class (" + ", ".join(_IMAGE_SUFFIXES) + ")",
                hint="check the path, or use synthetic images: --data synthetic",
            )
        if len(classes) > num_classes:
            raise InvalidDataError(
                found=f"{len(classes)} classes in {folder}",
                expected=f"at most {num_classes}, the outputs of the model",
                hint="use a model with more outputs (num_labels or id2label in its config)",
            )
        super().__init__(shape, num_samples=len(self._files), seed=seed)

    def image(self, data_sample: int) -> tuple[np.ndarray, int]:
        """Return an image of the folder and its class. Raises `InvalidDataError` if it cannot be read."""
        file, label = self._files[data_sample]
        return _read_image(file, self._shape), label


def _read_image(file: Path, shape: tuple[int, int, int]) -> np.ndarray:
    num_channels, height, width = shape
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise InvalidDataError(
            found=f"image files such as {file.name}, but no package pillow",
            expected="the package pillow, which reads images",
            hint="pip install pillow, or use synthetic images: --data synthetic",
        ) from error
    try:
        with Image.open(file) as opened:
            converted = opened.convert("L" if num_channels == 1 else "RGB")
            square = ImageOps.fit(converted, (width, height))
    except (OSError, UnidentifiedImageError) as error:
        raise InvalidDataError(
            found=f"{file}: {error}", expected="an image", hint="restore or remove the file"
        ) from error
    values = np.asarray(square, dtype=np.float32).reshape(height, width, -1)
    return np.ascontiguousarray(values.transpose(2, 0, 1)) / 127.5 - 1


NO_SAMPLE = -1
"""Placeholder for a sample: nothing is read, and it has no target."""


class CompletionData:
    """Rows of `open_completions` as samples of one length, in a seeded order."""

    def __init__(self, rows: Rows, options: RowOptions, *, seed: int) -> None:
        self._rows = open_completions(rows, options).with_format("numpy")
        self._seq_len, self._is_seq2seq = options.seq_len, options.is_seq2seq
        self._num_tokens, self._num_targets = (np.asarray(self._rows[name][:]) for name in (NUM_TOKENS, NUM_TARGETS))
        self._packed = pack(self._num_tokens, options.seq_len) if options.packing in (BFD, SPLIT) else None
        """Rows of each sample; None if each is one row."""
        self.num_samples = len(self._rows if self._packed is None else self._packed)
        self._order = SampleOrder(num_samples=self.num_samples, seed=seed)

    def _rows_of(self, sample: int) -> Iterable[int]:
        if sample == NO_SAMPLE:
            return ()
        place = self._order.data_sample(sample)
        return (place,) if self._packed is None else self._packed[place].tolist()

    def read(self, samples: list[int]) -> Samples:
        """Read tokens [len, S] and labels [len, S], which are the next token if it is a target, or the target's tokens.

        `NO_SAMPLE` has no targets.
        """
        inputs = np.zeros((len(samples), self._seq_len), dtype=np.int64)
        labels = np.full_like(inputs, IGNORED)
        for place, sample in enumerate(samples):
            begin = 0
            for number in self._rows_of(sample):
                row = self._rows[number]
                tokens = row[TOKEN_IDS]
                end = begin + len(tokens)
                inputs[place, begin:end] = tokens
                if self._is_seq2seq:
                    labels[place, : len(row[LABELS])] = row[LABELS]
                else:
                    labels[place, begin : end - 1] = np.where(row[IS_TARGET].astype(bool), tokens, IGNORED)[1:]
                begin = end
        return Samples(inputs=torch.from_numpy(inputs), labels=torch.from_numpy(labels))

    def num_targets(self, samples: Iterable[int]) -> int:
        """Return the number of targets in some samples, without reading the samples."""
        return sum(int(self._num_targets[row]) for each in samples for row in self._rows_of(each))

    def model_kwargs(self, samples: list[int]) -> dict[str, Tensor]:
        """Return the mask of padding [len, S] for encoders, or the positions [len, S] of packed rows, if any.

        They need no tokens. `NO_SAMPLE` has no padding, because attention to nothing is undefined.
        """
        if not self._is_seq2seq and self._packed is None:
            return {}
        lengths = [[int(self._num_tokens[row]) for row in self._rows_of(each)] for each in samples]
        if self._is_seq2seq:
            mask = [np.arange(self._seq_len) < (sum(each) or self._seq_len) for each in lengths]
            return {"attention_mask": torch.from_numpy(np.stack(mask).astype(np.int64))}
        places = np.zeros((len(samples), self._seq_len), dtype=np.int64)
        for place, of_sample in enumerate(lengths):
            places[place, : sum(of_sample)] = [number for length in of_sample for number in range(length)]
        return {"position_ids": torch.from_numpy(places)}


SampleData: TypeAlias = (
    TokenData | PrefixLmData | MaskedData | CompletionData | ImageData | FeatureFolder | SyntheticFeatures
)
"""Samples in an order that does not depend on the plan."""


def open_samples(
    path: str | Path | Rows, text: TextOptions, chain: ModelChain, *, seq_len: int, seed: int
) -> SampleData:
    """Open data as samples for the model's task.

    Raises `InvalidDataError` if the path does not exist, holds no data of the required type, is shorter than one
    sample, or does not fit the model's vocabulary or classes.
    """
    task, is_made_up = chain.family.task, str(path) == SYNTHETIC
    if isinstance(path, Rows):
        of_rows = text.of_rows(task, seq_len)
        if of_rows is not None:
            check_vocabulary(text, chain.vocab_size)
            return CompletionData(path, of_rows, seed=seed)
        return _open_tokens(path, text, chain, seq_len=seq_len, seed=seed)
    if not is_made_up:
        check_data_path(path)
    if task is Task.IMAGE_CLASSIFICATION:
        assert chain.image is not None, "a model of images has an image size"
        of = chain.image, chain.vocab_size
        return SyntheticImages(*of, seed=seed) if is_made_up else ImageFolder(Path(path), *of, seed=seed)
    if chain.features:
        options = {"seq_len": seq_len, "vocab_size": chain.vocab_size, "seed": seed}
        if is_made_up:
            return SyntheticFeatures(chain.features, open_data(path, TextOptions(), **options), seed=seed)
        return FeatureFolder(Path(path), chain.features, **options)
    return _open_tokens(path, text, chain, seq_len=seq_len, seed=seed)


def _open_tokens(
    path: str | Path | Rows, text: TextOptions, chain: ModelChain, *, seq_len: int, seed: int
) -> TokenData | PrefixLmData | MaskedData:
    task = chain.family.task
    length = 2 * seq_len if task is Task.SEQ2SEQ_LM else seq_len
    tokens = open_data(path, text, seq_len=length, vocab_size=chain.vocab_size, seed=seed)
    if task is Task.SEQ2SEQ_LM:
        return PrefixLmData(tokens)
    if task is Task.MASKED_LM:
        hidden = mask_token(path, text)
        return MaskedData(tokens, mask_token=hidden, vocab_size=chain.vocab_size, seed=seed)
    return tokens


def open_data(path: str | Path | Rows, text: TextOptions, *, seq_len: int, vocab_size: int, seed: int) -> TokenData:
    """Open a token file, text, rows or ``synthetic`` tokens as samples for next-token prediction."""
    if not isinstance(path, Rows):
        path = Path(path)
        if str(path) == SYNTHETIC:
            made_up = MadeUpTokens(vocab_size=vocab_size, seed=seed)
            return TokenData(made_up, name=SYNTHETIC, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
        check_data_path(path)
    if isinstance(path, Path) and is_token_file(path):
        tokens = open_token_file(path, vocab_size=vocab_size)
    else:
        check_vocabulary(text, vocab_size)
        prepared = prepare_text(path, text)
        tokens = open_bytes(prepared) if prepared == path else open_token_file(prepared, vocab_size=vocab_size)
    return TokenData(tokens, name=str(path), seq_len=seq_len, vocab_size=vocab_size, seed=seed)
