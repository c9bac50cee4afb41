"""What a model of transformers is given beside its parameters: samples, as its first layer reads them, and options.

Legend of shapes: B samples, S tokens, C channels, H height, W width.

A forward pass of transformers that asks no values of samples: each is one sequence without padding.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel, masking_utils

from steelyard.model.config_values import ROUTER_LOSS
from steelyard.model.family import Task
from steelyard.model.split import ModelSplit, SplitFeatures
from steelyard.modules.known_values import is_known, known_of

NO_MASK = "flash_attention_2"
"""An implementation of attention that reads no mask of plain sequences: so that none is made where none is read."""


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """Within it a forward pass of transformers asks no values of samples, of which what follows is known.

    It does not search samples for several sequences packed together, since here there is one in each, nor for padding,
    since there is none, and does not draw whether it leaves a block out, since all blocks of a plan run. Threads may be
    within it at the same time.
    """
    global _num_within  # noqa: PLW0603  what is replaced is global, too
    with _within_lock:
        if not _num_within:
            for each in _REPLACED:
                each.start()
        _num_within += 1
    try:
        yield
    finally:
        with _within_lock:
            _num_within -= 1
            if not _num_within:
                for each in _REPLACED:
                    each.stop()


def _draw(*size: Any, **options: Any) -> Any:
    return 1.0 if size == ([],) else _rand(*size, **options)


def _nothing(*_places: Any, **_names: Any) -> None:
    """In the place of what has nothing to do where samples are not padded; a mock would keep what it was given."""


def _is_plain_causal(
    padding: Tensor | None, queries: int, keys: int, first_query: int, first_key: int, window: int | None = None
) -> bool:
    """Whether attention needs no mask: as in transformers, and where a window is as long as the sequence."""
    return _needs_no_mask(padding, queries, keys, first_query, first_key, None if window is None else window + 1)


def _listed(tensor: FakeTensor) -> Any:
    """What is known of a fake tensor, as a list; fake tensors ask for one entry after the other."""
    return known_of(tensor).tolist() if is_known(tensor) else _to_list(tensor)


_rand, _needs_no_mask = torch.rand, masking_utils._ignore_causal_mask_sdpa


_to_list = FakeTensor.tolist


_num_within, _within_lock = 0, threading.Lock()


_REPLACED = (
    mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", _nothing),
    mock.patch.object(masking_utils, "prepare_padding_mask", _nothing),
    mock.patch.dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {NO_MASK: _nothing}),
    mock.patch.object(masking_utils, "find_packed_sequence_indices", _nothing),
    mock.patch.object(masking_utils, "_ignore_causal_mask_sdpa", _is_plain_causal),
    mock.patch.object(torch, "rand", _draw),
    mock.patch.object(FakeTensor, "tolist", _listed),
)


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
