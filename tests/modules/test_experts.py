"""Tests of routed experts against the formula: weighted sums of each token's experts, and all gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from steelyard.modules.experts import run_experts

TOKENS, CHOSEN, EXPERTS, HIDDEN, WIDTH = 11, 3, 5, 4, 6


class _Experts(nn.Module):
    """Experts stored as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = EXPERTS, silu
        self.has_gate, self.has_bias, self.is_transposed = True, False, False
        generator = torch.Generator().manual_seed(1)
        self.gate_up_proj = nn.Parameter(
            torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator, dtype=torch.float64)
        )
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator, dtype=torch.float64))

    def _apply_gate(self, wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return silu(gate) * up


def one_by_one(experts: _Experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for token in range(TOKENS):
        total = hidden.new_zeros(HIDDEN)
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            total = total + weight * (experts.down_proj[expert] @ (silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the experts of each (one expert is taken by nobody), and their weights."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, CHOSEN, generator=generator, dtype=torch.float64)
    return hidden, chosen, weights


def gradients(run: object, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The output, and the gradients of tokens, weights and parameters of a sum that weighs all entries differently."""
    experts = _Experts()
    hidden, weights = (tensor.clone().requires_grad_() for tensor in (inputs[0], inputs[2]))
    output = run(experts, hidden, inputs[1], weights)  # type: ignore[operator]
    scale = torch.arange(1.0, 1 + output.numel(), dtype=output.dtype).view_as(output)
    return output, *torch.autograd.grad((scale * output).sum(), [hidden, weights, *experts.parameters()])


@pytest.mark.parametrize("which", range(5), ids=["output", "tokens", "weights", "gate and up", "down"])
def test_experts_and_their_gradients_are_those_of_the_plain_formula(
    inputs: tuple[Tensor, Tensor, Tensor], which: int
) -> None:
    torch.testing.assert_close(gradients(run_experts, inputs)[which], gradients(one_by_one, inputs)[which])


def test_bf16_rows_are_summed_as_precisely_as_their_type_allows(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, chosen, weights = inputs
    found = run_experts(_Experts().bfloat16(), hidden.bfloat16(), chosen, weights.bfloat16())
    torch.testing.assert_close(found.double(), one_by_one(_Experts(), *inputs), rtol=0.05, atol=0.1)
