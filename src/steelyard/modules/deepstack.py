"""Blocks that add what their stack adds between them: features of an image, where it stands in a sample.

Qwen3-VL's first blocks of text take them from several blocks of the tower. An image is at the beginning of a sample.

Legend of shapes: B samples, S tokens, H hidden width.
"""

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steelyard.modules.forward_pass import replace_forward


def _give_features(
    stack: Any,
    *places: Any,
    visual_pos_masks: Tensor | None = None,
    deepstack_visual_embeds: Sequence[Tensor] | None = None,
    **names: Any,
) -> Any:
    """As before, with the features [places of an image, H] of all samples given to the blocks by their number."""
    if not deepstack_visual_embeds:
        return stack.own_forward(*places, **names)
    samples, numbered = len(names["inputs_embeds"]), enumerate(deepstack_visual_embeds)
    given = UserDict({str(number): (each.unflatten(0, (samples, -1)),) for number, each in numbered})
    return stack.own_forward(*places, features=given, **names)


def _add_features(
    block: Any,
    hidden_BSH: Tensor,  # noqa: N803
    *places: Any,
    features: UserDict[str, Any] | None = None,
    **names: Any,
) -> Tensor:
    """The next hidden state, with what this block is given added to its first places."""
    made = block.own_forward(hidden_BSH, *places, **names)
    own = features and features.get(str(block.self_attn.layer_idx))
    if not own:
        return made
    count = own[0].shape[1]
    return torch.cat([made[:, :count] + own[0].to(made.dtype), made[:, count:]], 1)


def add_features_in_blocks(stack: Any) -> None:
    """Has the blocks of a stack add what it adds between them, if it does; twice does no harm."""
    if hasattr(stack, "_deepstack_process"):
        replace_forward(stack, _give_features)
        for block in stack.layers:
            replace_forward(block, _add_features)
