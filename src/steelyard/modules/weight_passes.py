"""Weight gradients of linear layers in a separate pass, after the backward pass that other stages wait for.

A linear layer computes the gradient of its input in the backward pass, and keeps its input and the gradient of its
output for the weight gradient. The weight pass computes that and gives it to autograd, which accumulates it and calls
its hooks as in any backward pass. All other parameters of a block (norms, experts that are not linear layers) get their
gradients in the backward pass. So do embeddings and heads, because the gradients of logits, which would have to wait,
are large.

`torch.distributed.pipelining` splits backward passes itself if no ``dw_builder`` is given. It finds weights as
parameters of the stage, but here other parameters take their place while a layer computes, sharded or not
(docs/explanation/log/runtime.md); it also keeps everything that the forward pass saved until the weight pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_Work = Callable[[], None]


class WaitingGradients:
    """Weight gradients of one block that its backward passes leave to weight passes."""

    def __init__(self, layer: nn.Module) -> None:
        self._waiting: list[_Work] = []
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = _WaitingLinear  # code that divides it calls the forward pass of its class
                module.wait = self._waiting.append

    def take(self) -> list[_Work]:
        """Return the work of a weight pass for the backward pass that has just ended."""
        taken = self._waiting.copy()
        self._waiting.clear()
        return taken


class _WaitingLinear(nn.Linear):
    """A linear layer that leaves the gradients of its weight and bias to a weight pass."""

    wait: Callable[[_Work], None]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the output."""
        is_trained = any(each.requires_grad for each in (self.weight, self.bias) if each is not None)
        if not (is_trained and input.requires_grad):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.detach()
        later = partial(_compute_gradients, self.weight, self.bias)
        output: Tensor = _Linear.apply(
            input, self.weight.detach(), bias, lambda *given: self.wait(partial(later, *given))
        )
        return output


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass computes the input's gradient, and hands on the inputs of the weight pass."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, wait: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        """Return the output."""
        ctx.save_for_backward(inputs, weight)
        ctx.wait = wait
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the input."""
        (gradient,), (inputs, weight) = gradients, ctx.saved_tensors
        ctx.wait(inputs, gradient)
        return gradient @ weight, None, None, None


@torch.no_grad()
def _compute_gradients(weight: Tensor, bias: Tensor | None, inputs: Tensor, gradient: Tensor) -> None:
    rows, made = gradient.flatten(0, -2), {}
    if weight.requires_grad:
        made[weight] = rows.t() @ inputs.flatten(0, -2)
    if bias is not None and bias.requires_grad:
        made[bias] = rows.sum(dim=0)
    torch.autograd.backward(list(made), list(made.values()))
