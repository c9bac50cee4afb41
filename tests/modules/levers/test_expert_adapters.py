"""Tests that adapters of stacked experts compute what peft's sums of whole matrices do."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import silu

from steelyard.modules.experts import run_experts
from steelyard.modules.levers.expert_adapters import put_in

TOKENS, CHOSEN, EXPERTS, HIDDEN, WIDTH = 11, 3, 5, 4, 6


class _Experts(nn.Module):
    """Experts without a gate, with biases, with matrices as a model stores them or transposed."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.is_transposed = EXPERTS, silu, is_transposed
        self.has_gate, self.has_bias = False, True
        up, down = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
        self.up_proj, self.down_proj = (
            nn.Parameter(torch.randn(EXPERTS, *(reversed(shape) if is_transposed else shape))) for shape in (up, down)
        )
        self.up_proj_bias, self.down_proj_bias = (nn.Parameter(torch.randn(EXPERTS, size)) for size in (WIDTH, HIDDEN))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return run_experts(self, hidden, chosen, weights)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_outputs_and_gradients_are_those_of_sums_of_matrices(is_transposed: bool) -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({"experts": _Experts(is_transposed=is_transposed)}).double()
    targets = ["experts.up_proj", "experts.down_proj"]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=targets), model)
    adapters = {name: each for name, each in model.named_parameters() if ".lora_" in name}
    for each in adapters.values():
        nn.init.normal_(each)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, CHOSEN, dtype=torch.float64)

    def run() -> list[Tensor]:
        output = model["experts"](hidden, chosen, weights)
        return [output, *torch.autograd.grad(output.square().sum(), [hidden, *adapters.values()])]

    expected = run()
    put_in(model)
    assert len(adapters) == 4
    for found, each in zip(run(), expected, strict=True):
        assert each.abs().max() > 0
        torch.testing.assert_close(found, each)


def test_experts_of_another_implementation_have_sums_of_matrices() -> None:
    model = nn.ModuleDict({"experts": _Experts(is_transposed=False)})
    config = LoraConfig(r=2, target_modules=[], target_parameters=["experts.up_proj"])
    inject_adapter_in_model(config, model)
    put_in(model)
    experts = model["experts"].base_layer
    nn.init.normal_(model["experts"].lora_B["default"].weight)
    for implementation, is_sum in (("eager", True), ("steelyard", False)):
        experts.config = SimpleNamespace(_experts_implementation=implementation)
        with model["experts"]._activate_lora(["default"]):
            assert ("parametrizations" in experts._modules) == is_sum
            assert bool(experts.__dict__.get("added")) != is_sum
