"""Tests of the memory meter: each live storage counts once, from birth until it is freed or shrunk."""

import torch
from torch.utils.checkpoint import checkpoint

from steelyard.runtime.peak_memory import LiveStorages

KIB = 1024


def floats(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes // 4)


def test_tensors_that_were_there_before_count() -> None:
    given = floats(8 * KIB)
    with LiveStorages([given, given.view(2, -1)]) as meter:
        pass
    assert meter.peak_bytes == 8 * KIB


def test_the_peak_is_of_what_lives_at_once() -> None:
    with LiveStorages([]) as meter:
        first = floats(8 * KIB)
        del first
        second = floats(4 * KIB)
        third = floats(2 * KIB)
        assert meter.live_bytes == 6 * KIB
        del second, third
    assert meter.peak_bytes == 8 * KIB
    assert meter.live_bytes == 0


def test_views_and_in_place_operations_take_no_memory() -> None:
    with LiveStorages([]) as meter:
        kept = floats(8 * KIB)
        view = kept.view(2, -1)[0]
        view.add_(1)
    assert meter.peak_bytes == 8 * KIB


def test_a_storage_that_is_shrunk_and_grown_counts_at_its_size() -> None:
    with LiveStorages([]) as meter:
        gathered = floats(8 * KIB)
        gathered.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        gathered.untyped_storage().resize_(16 * KIB)
    assert meter.peak_bytes == 16 * KIB


def test_tensors_saved_for_backward_count_and_remat_saves_them() -> None:
    weight = torch.ones(256, requires_grad=True)

    def deep(inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            inputs = (inputs * weight).sin()
        return inputs

    peaks = []
    for remat in (False, True):
        with LiveStorages([weight]) as meter:
            hidden = floats(256 * 256 * 4).view(256, 256).requires_grad_()
            for _ in range(3):
                hidden = checkpoint(deep, hidden, use_reentrant=False) if remat else deep(hidden)
            hidden.sum().backward()
        weight.grad = None
        peaks.append(meter.peak_bytes)
    layer_bytes = 256 * 256 * 4
    assert peaks[0] > 3 * 8 * layer_bytes
    assert peaks[1] < peaks[0] * 0.6


def test_the_patch_of_resize_ends_with_the_measurement() -> None:
    original = torch.UntypedStorage.resize_
    with LiveStorages([]):
        assert torch.UntypedStorage.resize_ is not original
    assert torch.UntypedStorage.resize_ is original
