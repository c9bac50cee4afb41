"""Swin's stages of blocks, and what merges patches behind each, become one list: structure has a list of stages."""

from typing import Any

from torch import nn

TYPES = ("donut-swin", "swin", "swinv2")


def prepare(model: Any) -> None:
    """Gives a stack of stages one list of what runs in them, which its own forward pass calls; twice does no harm."""
    stack = getattr(model, model.base_model_prefix).encoder
    parts = [each for stage in stack.layers for each in (*stage.blocks, stage.downsample) if each is not None]
    stack.parts = nn.ModuleList(parts)
