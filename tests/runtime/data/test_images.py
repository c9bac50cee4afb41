"""Tests of images: folders of classes and generated ones, the same for every reader."""

from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import InvalidDataError
from steelyard.runtime.data.source import ImageFolder, SyntheticImages

SHAPE = (3, 8, 8), 3


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(exist_ok=True)
    image.new("RGB", size, colour).save(path)


def test_made_up_images_have_the_shape_and_classes_of_the_model() -> None:
    data = SyntheticImages(*SHAPE, seed=0)
    samples = data.read(list(range(6)))
    assert samples.inputs.shape == (6, 3, 8, 8)
    assert set(samples.labels.tolist()) <= {0, 1, 2}


def test_made_up_images_of_a_class_are_alike_and_no_two_the_same() -> None:
    data = SyntheticImages(*SHAPE, seed=0)
    first, second, other = (data.image(number)[0] for number in (0, 3, 1))
    assert not np.array_equal(first, second)
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > np.corrcoef(first.ravel(), other.ravel())[0, 1] + 0.2
    assert np.abs(first).max() <= 1


def test_a_made_up_image_depends_on_seed_and_number_alone() -> None:
    read = SyntheticImages(*SHAPE, seed=1).read
    everything = read(list(range(16, 24)))
    assert read([22]).inputs.tolist() == [everything.inputs[6].tolist()]
    assert not np.array_equal(SyntheticImages(*SHAPE, seed=2).image(0)[0], SyntheticImages(*SHAPE, seed=1).image(0)[0])


def test_images_of_a_folder_carry_their_class(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "1.png", (255, 0, 0))
    write_image(tmp_path / "dog" / "1.png", (0, 0, 255), size=(20, 10))
    samples = ImageFolder(tmp_path, *SHAPE, seed=0).read([0, 1])
    by_class = {int(label): image for image, label in zip(samples.inputs, samples.labels, strict=True)}
    assert by_class[0][:, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert by_class[1][:, 0, 0].tolist() == [-1.0, -1.0, 1.0]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(InvalidDataError, match="no images in the folders of"):
        ImageFolder(tmp_path, *SHAPE, seed=0)


def test_more_classes_than_outputs_are_refused(tmp_path: Path) -> None:
    for name in "abcd":
        write_image(tmp_path / name / "1.png", (0, 0, 0))
    with pytest.raises(InvalidDataError, match="4 classes in"):
        ImageFolder(tmp_path, *SHAPE, seed=0)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_text("no image")
    with pytest.raises(InvalidDataError, match=r"1\.png"):
        ImageFolder(tmp_path, *SHAPE, seed=0).image(0)
