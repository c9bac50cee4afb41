"""Sizes that image models share: images, patches and classes as their configs give them."""

from steelyard.errors import InvalidModelError
from steelyard.model.family import Sizes


def image_of(sizes: Sizes) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    height, width = _pair(sizes, "image_size")
    return sizes.size("num_channels", default=3), height, width


def patch_grid(sizes: Sizes) -> tuple[int, int]:
    """Rows and columns of patches of an image; raises `InvalidModelError` where patches do not divide it."""
    image, patch = _pair(sizes, "image_size"), _pair(sizes, "patch_size")
    if image[0] % patch[0] or image[1] % patch[1]:
        raise InvalidModelError(
            field="patch_size", found=str(patch), expected=f"a divisor of the image_size {image}", hint="check both"
        )
    return image[0] // patch[0], image[1] // patch[1]


def num_labels(sizes: Sizes) -> int:
    """Classes: as many as ``id2label`` names, else ``num_labels``, else the 2 that transformers takes."""
    names = sizes.config.get("id2label")
    return len(names) if names else sizes.size("num_labels", default=2)


def _pair(sizes: Sizes, key: str) -> tuple[int, int]:
    found = sizes.sizes(key)
    return (found[0], found[0]) if len(found) == 1 else (found[0], found[1])
