"""What the first layer of a model reads whose samples hold token ids and something else: its name and its shape.

Neither is told by structure, so each type is a line here. All samples have the shape that the config says; sound whose
length no config says is taken to last `_SOUND` values, 30 seconds at 16 kHz.
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from steelyard.errors import InvalidModelError
from steelyard.model.split import SplitFeatures

_SOUND = 30 * 16_000


def _frames(config: Any) -> SplitFeatures:
    """Mel bins by frames, two of which make one place."""
    return SplitFeatures(name="input_features", shape=(config.num_mel_bins, 2 * config.max_source_positions))


def _frames_first(config: Any) -> SplitFeatures:
    return SplitFeatures(name="input_features", shape=(config.max_source_positions, config.input_feat_per_channel))


def _sound(_config: Any) -> SplitFeatures:
    return SplitFeatures(name="input_values", shape=(_SOUND,))


_FEATURES: Mapping[str, Callable[[Any], SplitFeatures]] = {
    "moonshine": _sound,
    "speech_to_text": _frames_first,
    "whisper": _frames,
}


def features_of(config: PreTrainedConfig) -> SplitFeatures:
    """What the first layer of a model of speech reads; raises `InvalidModelError` where that is not known."""
    known = _FEATURES.get(config.model_type)
    if known is None:
        raise InvalidModelError(
            field="model_type",
            found=f"{config.model_type}, of which it is not known what a sample of sound is",
            expected=f"of models that write down speech {', '.join(_FEATURES)}",
            hint="write a function that builds it, with a sample: docs/your-own-model.md",
        )
    return known(config)
