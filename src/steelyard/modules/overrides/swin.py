"""Swin's stages of blocks, and what merges patches behind each, become one list: structure has a list of stages."""

from typing import Any

from torch import nn

TYPES = ("donut-swin", "swin", "swinv2")


def prepare(model: Any) -> None:
    """Gives a stack of stages one list of what runs in them, which its own forward pass calls; twice does no harm.

    A block that is never left out, as the first, is of the class of those that are.
    """
    stack = getattr(model, model.base_model_prefix).encoder
    parts = [each for stage in stack.layers for each in (*stage.blocks, stage.downsample) if each is not None]
    ways = {type(part.drop_path) for part in parts if hasattr(part, "drop_path")} - {nn.Identity}
    for part in parts:
        if type(getattr(part, "drop_path", None)) is nn.Identity and ways:
            part.drop_path = next(iter(ways))(0.0)
    stack.parts = nn.ModuleList(parts)
