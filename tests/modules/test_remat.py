"""Tests that selective remat gives unchanged gradients, also with in-place results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from steelyard.modules.remat import REMAT_CONTEXTS
from steelyard.plan.strategy import Remat

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "kept": lambda product: functional.relu(product + 1),
    "written to": lambda product: functional.relu(product.add_(1), inplace=True),
    "written to by a view": lambda product: (product.view(-1).mul_(2), product.sigmoid())[1],
}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without_remat(way: str, dims: int) -> None:
    """A linear layer on three dims is a product and a view of it."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2))
    inputs = torch.randn((2, 2, 4)[-dims:], generator=generator, requires_grad=True)

    def block(hidden: Tensor) -> Tensor:
        return functional.linear(WAYS[way](functional.linear(hidden, first)), second)

    plain = torch.autograd.grad(block(inputs).square().sum(), (first, second, inputs))
    again = checkpoint(block, inputs, use_reentrant=False, context_fn=REMAT_CONTEXTS[Remat.SELECTIVE])
    for expected, found in zip(plain, torch.autograd.grad(again.square().sum(), (first, second, inputs)), strict=True):
        assert torch.equal(found, expected)
