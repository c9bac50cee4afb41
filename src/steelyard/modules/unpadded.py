"""A forward pass of transformers that asks no values of samples: each is one sequence without padding."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel, masking_utils

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
