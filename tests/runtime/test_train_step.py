"""Tests of training steps in a user's own loop."""

from pathlib import Path

import pytest
import torch

import steelyard
from steelyard.errors import InvalidPlanError
from steelyard.modules.build import build_model
from steelyard.plan.file import write_plan
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


def test_a_plan_is_given_by_its_file_to_processes_in_a_group(tmp_path: Path) -> None:
    plan = make_plan("llama-tied", "single, single, single, single", num_devices=1)
    write_plan(plan, tmp_path / "plan.json")
    with pytest.raises(InvalidPlanError, match=r"no process group[\s\S]*init_process_group"):
        steelyard.parallelize(build_model(plan.chain(), seed=1), plan)
    with one_process():
        assert steelyard.parallelize(build_model(plan.chain(), seed=1), tmp_path / "plan.json").plan == plan
