"""Tests of known values of valueless tensors: those implied by samples and constants, and even choices."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from steelyard.modules.known_values import KnownValues, plain_token, tell, without_values


def _ids() -> Tensor:
    return torch.empty((2, 6), dtype=torch.long, device="meta")


def test_what_follows_from_samples_and_constants_has_values() -> None:
    ids = _ids()
    with without_values([ids], token=3) as known:
        places = (torch.arange(6, device="meta") < 4) & (ids == 3)
        assert places.sum(dim=1).tolist() == [4, 4]
        assert not (ids == 5).any()
        assert places.nonzero().shape == (8, 2)
    assert known is not None
    assert known.asked


def test_samples_with_values_stay_as_they_are() -> None:
    with without_values([torch.zeros(2, 6)]) as known:
        assert known is None


def test_every_expert_is_chosen_by_the_same_share_of_tokens() -> None:
    with KnownValues():
        _, chosen = torch.empty((12, 8), device="meta").topk(2)
        mask = torch.nn.functional.one_hot(chosen, num_classes=8).permute(2, 1, 0)
        rows = [torch.where(mask[expert])[1].shape for expert in mask.sum(dim=(1, 2)).nonzero().flatten()]
    assert rows == [(3,)] * 8


def test_a_mask_chooses_rows_of_a_tensor_of_which_nothing_is_known() -> None:
    hidden = torch.empty((4, 8), device="meta", requires_grad=True)
    with KnownValues():
        kept = hidden[torch.arange(4, device="meta") < 3]
    assert kept.shape == (3, 8)
    assert kept.requires_grad


def test_what_is_written_into_a_known_tensor_is_known_of_it() -> None:
    with KnownValues():
        mask = torch.zeros(4, device="meta")
        before = mask + 1
        mask[1] = 1
        mask.add_(1)
        assert mask.tolist() == [1, 2, 1, 1]
        assert before.tolist() == [1, 1, 1, 1]


def test_a_tensor_into_which_unknown_values_are_written_is_not_known() -> None:
    with KnownValues():
        mask = torch.zeros(4, device="meta")
        mask.add_(torch.empty(4, device="meta"))
        with pytest.raises(NotImplementedError, match="no data"):
            mask.tolist()


def test_a_number_of_which_nothing_is_known_is_zero_and_chooses_no_branch() -> None:
    unknown = torch.empty((), device="meta")
    with KnownValues():
        assert unknown.item() == 0
        with pytest.raises(RuntimeError, match="meta"):
            bool(unknown > 0)


def test_fake_tensors_are_known_likewise() -> None:
    with FakeTensorMode():
        ids = torch.empty((2, 6), dtype=torch.long)
        with without_values([ids], token=1):
            assert ids.ne(1).sum().item() == 0
            assert torch.empty((2, 8))[ids[:, 0] == 1].shape == (2, 8)


def test_a_token_with_a_meaning_of_its_own_is_not_plain() -> None:
    assert plain_token(SimpleNamespace(pad_token_id=0, eos_token_id=[1, 3], bos_token_id=None)) == 2


def test_a_known_number_stands_for_a_size_of_a_tensor_that_is_not_known() -> None:
    rows = torch.empty((), dtype=torch.long, device="meta")
    tell(rows, torch.tensor(4))
    with KnownValues():
        assert torch.empty(8, 3, device="meta").reshape(rows // 2, 4, 3).shape == (2, 4, 3)
