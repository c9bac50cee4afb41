"""Tests of training steps in a user's own loop."""

import torch

import steelyard
from steelyard.modules.build import build_model
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.processes import one_process

TOKENS = torch.arange(4 * 17).view(4, 17) % 64


def test_steps_before_the_optimizer_add_their_gradients_once_also_those_of_tied_weights() -> None:
    plan = make_plan(
        CONFIGS["llama-tied"],
        "single, single, single, single",
        num_devices=1,
        global_batch=4,
        num_microbatches=2,
        seq_len=16,
    )
    with one_process():
        model = steelyard.parallelize(build_model(plan.chain(), seed=1), plan)
        model.train_step(lambda samples: TOKENS[samples])
        first = [each.grad.clone() for each in model.parameters()]
        model.train_step(lambda samples: TOKENS[samples])
        for once, each in zip(first, model.parameters(), strict=True):
            torch.testing.assert_close(each.grad, 2 * once)
