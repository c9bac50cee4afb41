"""Tests of valueless tensors that report a device: computation that is allowed, and computation that is not."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from steelyard.errors import InvalidModelError
from steelyard.modules.known_values import Blank, Blanks, blank_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["plain", "fake"])
@pytest.mark.parametrize("within", [nullcontext, Blanks], ids=["outside", "within"])
def test_what_is_made_of_a_blank_is_one_on_its_device(mode: type, within: type) -> None:
    with mode(), within():
        hidden = functional.embedding(torch.zeros((2, 3), dtype=torch.long), blank_of((8, 4), torch.float32, CPU))
        hidden = functional.layer_norm(hidden, (4,), torch.ones(4)).to(torch.bfloat16)
        hidden += 1
        result = nn.Linear(4, 5, dtype=torch.bfloat16)(hidden[:, 1:])
    assert isinstance(result, Blank)
    assert (result.shape, result.dtype, result.device) == ((2, 2, 5), torch.bfloat16, CPU)


def test_what_reads_the_shape_of_a_blank_alone_has_values() -> None:
    zeros = torch.zeros_like(blank_of((2, 3), torch.float32, CPU))
    assert not isinstance(zeros, Blank)
    assert zeros.tolist() == [[0.0] * 3] * 2


def test_a_value_of_a_blank_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        bool(blank_of((2,), torch.float32, CPU).sum() > 0)


def test_a_blank_is_written_into_no_tensor_with_values() -> None:
    with pytest.raises(InvalidModelError, match="writes values that depend on parameters into a tensor"):
        torch.zeros(3).copy_(blank_of((3,), torch.float32, CPU))
