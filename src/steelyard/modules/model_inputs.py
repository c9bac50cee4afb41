"""What a model of transformers is given beside its parameters: samples, as its first layer reads them, and options.

Legend of shapes: B samples, S tokens, C channels, H height, W width.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steelyard.model.config_values import ROUTER_LOSS
from steelyard.model.family import Task
from steelyard.model.split import ModelSplit, SplitFeatures

Read = tuple[int, int, int] | SplitFeatures | None
"""What the first layer reads: images of this shape, features, or token ids."""


def read_by(split: ModelSplit) -> Read:
    """What the first layer of a model reads."""
    return split.features or split.image


def ids_beside(task: Task) -> str:
    """What the model calls the token ids that its first layer does not read; empty where there are none."""
    return "decoder_input_ids" if task.has_decoder else "input_ids" if task.has_two_lists else ""


def first_tokens(read: Read) -> tuple[int | None, int]:
    """The token of a place of an image, with which a sample begins, and how many; None where there is none."""
    return (read.token, read.places) if isinstance(read, SplitFeatures) else (None, 0)


def given_samples(read: Read, samples: Tensor | None) -> dict[str, Tensor]:
    """What the model's first layer reads, as it is given it: token ids, images, or features [B, ...] by their name."""
    if samples is None:
        return {}
    if isinstance(read, SplitFeatures):
        return {read.name: samples.flatten(0, 1) if read.grid else samples}
    return {"pixel_values" if read else "input_ids": samples}


def beside_features(model: nn.Module, read: Read, ids: Tensor | None) -> dict[str, Tensor]:
    """What a model is told beside patches: the grid of each image, and which of the token ids [B, S] are its places."""
    if not isinstance(read, SplitFeatures) or read.grid is None:
        return {}
    assert ids is not None
    types = torch.zeros(ids.shape, dtype=torch.int, device=ids.device)
    types[:, : read.places] = 1
    found = {"image_grid_thw": torch.tensor([read.grid] * len(ids), device=ids.device), "mm_token_type_ids": types}
    known = inspect.signature(type(model).forward).parameters
    return {name: each for name, each in found.items() if name in known}


def blank(read: Read, samples: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make the first layer's input of zeros: token ids [B, S], images [B, C, H, W], or features, both of ``dtype``."""
    if read:
        shape = read.shape if isinstance(read, SplitFeatures) else read
        return torch.zeros((samples, *shape), dtype=dtype, device=device)
    return torch.zeros((samples, tokens), dtype=torch.long, device=device)


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """What the model's forward pass is told beside the token ids: to keep nothing, and to give logits alone."""
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    configs = (model.config, model.config.get_text_config(decoder=True))
    known = "use_cache" in parameters or (takes_any and any(hasattr(each, "use_cache") for each in configs))
    told = {"use_cache": known, ROUTER_LOSS: ROUTER_LOSS in parameters}
    return {name: False for name, is_known in told.items() if is_known}
