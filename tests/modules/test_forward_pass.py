"""Tests of our forward pass in place of a module's: the calls that it makes, and that replacing twice is harmless."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from steelyard.modules.prepared import replace_forward


class _Block(GradientCheckpointingLayer):
    """A class of those whose forward pass transformers wraps."""

    def forward(self, inputs: Tensor) -> Tensor:
        """One more."""
        return inputs + 1


def _doubled(module: Any, inputs: Tensor) -> Tensor:
    return 2 * module.own_forward(inputs)


def test_a_module_with_another_forward_pass_is_of_its_class() -> None:
    matrix = nn.Linear(3, 2)
    replace_forward(matrix, _doubled)
    assert isinstance(matrix, nn.Linear)


@pytest.mark.parametrize("make", [nn.Identity, _Block])
@pytest.mark.parametrize("times", [1, 2])
def test_a_forward_pass_that_is_replaced_calls_the_modules_own_once(make: type[nn.Module], times: int) -> None:
    module, inputs = make(), torch.ones(1, 3)
    expected = 2 * module(inputs)
    for _ in range(times):
        replace_forward(module, _doubled)
    assert torch.equal(module(inputs), expected)
