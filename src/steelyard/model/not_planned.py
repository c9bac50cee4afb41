"""Model types that are refused by name, before anything is built, each with what to do instead."""

from collections.abc import Mapping
from typing import Any

from steelyard.errors import InvalidModelError

NOT_PLANNED = {
    "flaubert": "use camembert, whose blocks need no special case",
    "hrm_text": "write a function that builds it, with a sample: docs/your-own-model.md",
    "ibert": "use roberta, whose blocks are those of ibert without quantization",
    "longformer": "use led, or modernbert for a masked model",
    "prophetnet": "use bart or t5",
    "reformer": "use led, or a causal model of long sequences with cp",
    "xlm": "use xlm-roberta",
}
"""Types that nobody trains, and whose blocks would need code of their own."""
PAIRS = {
    "clip": "CLIPForImageClassification",
    "clipseg": "",
    "metaclip_2": "MetaClip2ForImageClassification",
    "siglip": "SiglipForImageClassification",
}
"""Types of an image and its text, whose loss compares all pairs of a batch; the class of the image tower alone."""


def check_type(config: Mapping[str, Any]) -> None:
    """Raises `InvalidModelError` for a config of a type that is not planned, or of pairs as a whole."""
    model_type, named = str(config.get("model_type")), config.get("architectures")
    if model_type in NOT_PLANNED:
        raise InvalidModelError(
            field="model_type",
            found=f"{model_type}, which is not planned",
            expected="a type that is trained today, as those of `steelyard models`",
            hint=NOT_PLANNED[model_type],
        )
    tower = PAIRS.get(model_type)
    if tower is not None and (not tower or named != [tower]):
        raise InvalidModelError(
            field="model_type",
            found=f"{model_type}, whose loss compares every image of a batch with every text",
            expected=f"its image tower alone: {tower}" if tower else "a model of one tower",
            hint=f'write "architectures": ["{tower}"] into the config' if tower else "plan the image tower of clip",
        )
