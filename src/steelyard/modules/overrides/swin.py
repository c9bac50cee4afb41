"""Swin's stages of blocks, and what merges patches behind each, become one list.

Structure has a list of stages, in each of which the height and width of the patches are numbers that no module returns.

Legend of shapes: B samples, S patches, H hidden width.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.swin.modeling_swin import SwinEncoderOutput

from steelyard.modules.mixin import mix_in

TYPES = ("donut-swin", "swin", "swinv2")


class _HiddenAlone:
    """What replaces the forward pass of a block that returns more than the next hidden state."""

    def forward(self: Any, hidden: Tensor, grid: tuple[int, int]) -> Tensor:
        """The next hidden state [B, S, H] of patches in so many rows and columns."""
        made = super().forward(hidden, grid)  # type: ignore[misc]
        return made[0] if isinstance(made, tuple) else made


class _InStages:
    """What replaces the forward pass of a stack of stages: one list of their blocks and of what merges patches."""

    def forward(self: Any, hidden_states: Tensor, input_dimensions: tuple[int, int], *_: Any, **_options: Any) -> Any:
        """The last hidden state, and nothing of what else the stack may return."""
        grid = input_dimensions
        for place, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, grid)
            if place in self.merges:
                grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        return SwinEncoderOutput(last_hidden_state=hidden_states)


def prepare(model: Any) -> None:
    """Gives a stack of stages one list of blocks, in place; twice does no harm.

    A block that is never left out, as the first, is of the class of those that are.
    """
    stack = getattr(model, model.base_model_prefix).encoder
    if isinstance(stack, _InStages):
        return
    parts = [[*stage.blocks, *([stage.downsample] if stage.downsample is not None else [])] for stage in stack.layers]
    blocks = [each for stage in parts for each in stage]
    ways = {type(block.drop_path) for block in blocks if hasattr(block, "drop_path")} - {nn.Identity}
    for block in blocks:
        if type(getattr(block, "drop_path", None)) is nn.Identity and ways:
            block.drop_path = next(iter(ways))(0.0)
        mix_in(block, _HiddenAlone)
    stack.blocks = nn.ModuleList(blocks)
    stack.merges = frozenset(place for place, each in enumerate(blocks) if not hasattr(each, "attention"))
    mix_in(stack, _InStages)
