"""Samples of image classification: a folder with one subfolder per class, or images made up from the seed.

| ``--data``    | samples                                                                                       |
|---------------|-----------------------------------------------------------------------------------------------|
| a folder      | the images of its subfolders in the order of names; a subfolder is a class, numbered by name  |
| ``synthetic`` | noise over a pattern of each class's own, so that there is something to learn                 |

An image file is scaled until it just covers the model's image, cut to its middle, and its values are mapped from 0…255
to -1…1. Needs Pillow. Not done: random crops, flips and other augmentation.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steelyard.errors import InvalidDataError
from steelyard.runtime.data.order import SampleOrder, mixed
from steelyard.runtime.data.samples import Samples

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_NUM_SYNTHETIC = 1 << 20
_PATTERN_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShape:
    """What a model reads, ``num_channels`` × ``height`` × ``width``, and how many classes it tells apart."""

    num_channels: int
    height: int
    width: int
    num_classes: int


class ImageData(ABC):
    """Images and their classes, in an order that the seed decides."""

    def __init__(self, shape: ImageShape, *, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._shape = shape
        self._order = SampleOrder(num_samples=num_samples, seed=seed)

    @abstractmethod
    def image(self, data_sample: int) -> tuple[np.ndarray, int]:
        """The values [C, H, W], from -1 to 1, of one image, and its class."""

    def read(self, samples: list[int]) -> Samples:
        """Images [len, C, H, W] and their classes."""
        images, classes = zip(*(self.image(self._order.data_sample(sample)) for sample in samples), strict=True)
        return Samples(inputs=torch.from_numpy(np.stack(images)), labels=torch.tensor(classes))


class SyntheticImages(ImageData):
    """Endless images: the pattern of a class in blocks, with noise that the seed and the image's number decide."""

    def __init__(self, shape: ImageShape, *, seed: int) -> None:
        super().__init__(shape, num_samples=_NUM_SYNTHETIC, seed=seed)
        self._seed = seed

    def image(self, data_sample: int) -> tuple[np.ndarray, int]:
        """A noisy pattern."""
        shape = self._shape
        label = data_sample % shape.num_classes
        pattern = np.random.default_rng((mixed(self._seed), 0, label)).uniform(
            -0.5, 0.5, (shape.num_channels, _PATTERN_SIZE, _PATTERN_SIZE)
        )
        rows, columns = (np.arange(size) * _PATTERN_SIZE // size for size in (shape.height, shape.width))
        size = (shape.num_channels, shape.height, shape.width)
        noise = np.random.default_rng((mixed(self._seed), 1, data_sample)).uniform(-0.5, 0.5, size)
        return (pattern[:, rows][:, :, columns] + noise).astype(np.float32), label


class ImageFolder(ImageData):
    """The images of a folder of classes; raises `InvalidDataError` if there are none, or more classes than outputs."""

    def __init__(self, folder: Path, shape: ImageShape, *, seed: int) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        self._files = [(file, label) for label, place in enumerate(classes) for file in _image_files(place)]
        if not self._files:
            raise InvalidDataError(
                found=f"no images in the folders of {folder}",
                expected="a folder for each class that holds its images (" + ", ".join(_IMAGE_SUFFIXES) + ")",
                hint="check the path, or train on made-up images with --data synthetic",
            )
        if len(classes) > shape.num_classes:
            raise InvalidDataError(
                found=f"{len(classes)} classes in {folder}",
                expected=f"at most {shape.num_classes}, the outputs of the model",
                hint="use a model with more outputs (num_labels or id2label in its config)",
            )
        super().__init__(shape, num_samples=len(self._files), seed=seed)

    def image(self, data_sample: int) -> tuple[np.ndarray, int]:
        """An image of the folder; raises `InvalidDataError` if it cannot be read any more."""
        file, label = self._files[data_sample]
        return _read_image(file, self._shape), label


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES)


def _read_image(file: Path, shape: ImageShape) -> np.ndarray:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise InvalidDataError(
            found=f"image files, {file.name} for one, and no Pillow to read them",
            expected="the package pillow",
            hint="pip install pillow, or train on made-up images with --data synthetic",
        ) from error
    try:
        with Image.open(file) as opened:
            converted = opened.convert("L" if shape.num_channels == 1 else "RGB")
            square = ImageOps.fit(converted, (shape.width, shape.height))
    except (OSError, UnidentifiedImageError) as error:
        raise InvalidDataError(
            found=f"{file}: {error}", expected="an image", hint="restore or remove the file"
        ) from error
    values = np.asarray(square, dtype=np.float32).reshape(shape.height, shape.width, -1)
    return np.ascontiguousarray(values.transpose(2, 0, 1)) / 127.5 - 1
