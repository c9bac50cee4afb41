"""Test of selective remat of a user's own block whose arguments are matrix products."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import steelyard
from steelyard.modules.own_proof import Built, own_model
from tests.modules.own_models import TOKENS, WIDTH, NanoBlock
from tests.runtime.models import make_plan
from tests.runtime.processes import one_process


class Placed(nn.Module):
    """Module that makes an argument of its blocks by a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])
        self.register_buffer("rates", torch.ones(WIDTH, 1))
        self.register_buffer("shift", torch.zeros(WIDTH))

    class Block(NanoBlock):
        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return super().forward(x + places)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(TOKENS, device=x.device)[:, None] / TOKENS
        places = functional.linear(places, self.rates, self.shift)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, places)
        return self.head(x)


@pytest.mark.slow
def test_a_block_recomputes_no_products_that_make_its_arguments() -> None:
    sample = torch.randn(2, TOKENS, 8), torch.randn(2, TOKENS, 3)
    module = Placed()
    own = own_model(Built(module=module, sample=sample, loss=functional.mse_loss)).split
    sizes: dict[str, Any] = {"num_devices": 1, "num_microbatches": 1, "seq_len": own.seq_len, "global_batch": 2}
    plan = make_plan(None, "single, single remat=selective, single, single", split=own, **sizes)
    expected = functional.mse_loss(module(sample[0]), sample[1])
    with one_process():
        trainer = steelyard.parallelize(module, plan, loss=functional.mse_loss)
        loss = trainer.train_step(lambda samples: (sample[0][samples], sample[1][samples]))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
