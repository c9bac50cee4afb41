"""What the first layer of a model reads whose samples hold token ids and something else: its name and its shape.

Neither is told by structure, so each type of sound is a line here. All samples have the shape that the config says;
sound whose length no config says is taken to last `_SOUND` values, 30 seconds at 16 kHz. Images that a model takes as
patches of a grid have the size that the config says as ``vision_config.image_size``, where `plan` puts it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.family import Task
from steelyard.model.split import SplitFeatures
from steelyard.modules.not_split import failed_at

_SOUND = 30 * 16_000


def _frames(config: Any) -> SplitFeatures:
    """Mel bins by frames, two of which make one place."""
    return SplitFeatures(name="input_features", shape=(config.num_mel_bins, 2 * config.max_source_positions))


def _frames_first(config: Any) -> SplitFeatures:
    return SplitFeatures(name="input_features", shape=(config.max_source_positions, config.input_feat_per_channel))


def _sound(_config: Any) -> SplitFeatures:
    return SplitFeatures(name="input_values", shape=(_SOUND,))


_CHANNELS = ("in_channels", "num_channels", "in_chans")
_UNFLATTENED = ("paddleocr_vl",)
"""Types that take patches with their channels, rows and columns, and not as rows of entries."""
_FEATURES: Mapping[str, Callable[[Any], SplitFeatures]] = {
    "moonshine": _sound,
    "speech_to_text": _frames_first,
    "whisper": _frames,
}


def features_of(model: PreTrainedModel, task: Task) -> SplitFeatures:
    """What the first layer of a model reads beside token ids; raises `InvalidModelError` where that is not known."""
    config = model.config
    if task is Task.IMAGE_TEXT:
        return _image_and_places(model)
    known = _FEATURES.get(config.model_type)
    if known is None:
        raise _unknown(config, f"sound (it is of {', '.join(_FEATURES)})")
    return known(config)


def _image_and_places(model: PreTrainedModel) -> SplitFeatures:
    """One image of the size that the config says, and the places that the model makes of it among the tokens."""
    config = model.config
    vision = getattr(config, "vision_config", None)
    if "image_grid_thw" in inspect.signature(type(model).forward).parameters:
        return _patches(config, vision)
    sides, token = _sides(getattr(vision, "image_size", None)), getattr(config, "image_token_id", None)
    if len(sides) != 2 or not isinstance(token, int):
        raise _unknown(config, "images (its config gives no vision_config.image_size, or no image_token_id)")
    shape = (getattr(vision, "num_channels", 3), *sides)
    try:
        with torch.no_grad():
            made = model.get_image_features(pixel_values=torch.zeros((1, *shape), device="meta"))
        found = getattr(made, "pooler_output", made)
        places = sum(each.shape[-2] for each in found)
    except Exception as error:
        words = " ".join(str(error).split())[:120] + failed_at(error)
        raise _unknown(config, f"images (one of {' × '.join(map(str, shape))} is refused: {words})") from error
    return SplitFeatures(name="pixel_values", shape=shape, token=token, places=places)


def _sides(size: Any) -> tuple[int, ...]:
    """Height and width of an image, as a config says it; empty where it does not."""
    return (size, size) if isinstance(size, int) else tuple(size or ())


def _patches(config: Any, vision: Any) -> SplitFeatures:
    """The patches of one image, each a row of all its entries, of which the model merges squares to places of text."""
    patch, merge = vision.patch_size, getattr(vision, "spatial_merge_size", 1)
    channels = next((getattr(vision, key) for key in _CHANNELS if hasattr(vision, key)), 3)
    sides = _sides(getattr(vision, "image_size", None))
    if not isinstance(patch, int) or not isinstance(merge, int):
        raise _unknown(config, f"images (its patches are of {patch}, of which {merge} merge)")
    if len(sides) != 2 or any(side <= 0 or side % (patch * merge) for side in sides):
        raise InvalidModelError(
            field="image_size",
            found=f"{' × '.join(map(str, sides)) or 'none'} for {config.model_type}, which reads images of any size",
            expected=f"one size of all images, whose sides {patch * merge} divides ({merge} patches of {patch} merge)",
            hint=f"give --image-size {16 * patch * merge}, or vision_config.image_size in the config",
        )
    rows, columns = (side // patch for side in sides)
    frames = getattr(vision, "temporal_patch_size", 1)
    of_patch = (channels, patch, patch) if config.model_type in _UNFLATTENED else (channels * frames * patch * patch,)
    return SplitFeatures(
        name="pixel_values",
        shape=(rows * columns, *of_patch),
        token=config.image_token_id,
        places=rows * columns // merge**2,
        grid=(1, rows, columns),
    )


def _unknown(config: PreTrainedConfig, of: str) -> InvalidModelError:
    return InvalidModelError(
        field="model_type",
        found=f"{config.model_type}, of which it is not known what a sample holds of {of}",
        expected="a model whose config says the one size of what it reads",
        hint="write a function that builds it, with a sample: docs/your-own-model.md",
    )
