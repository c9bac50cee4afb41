"""Tests of plans that the runtime refuses."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from steelyard.errors import InvalidPlanError, UserError
from steelyard.modules.build import build_meta_model, hub_config
from steelyard.processes.group import world_size
from steelyard.runtime.checks import check_world_size
from steelyard.runtime.parallel_model import check_same_model, check_same_modules
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.processes import one_process

PLAN = make_plan({**CONFIGS["llama"], "num_hidden_layers": 2}, "dp2, dp2, dp2, dp2", num_devices=2)


def test_another_number_of_processes_is_refused() -> None:
    check_world_size(PLAN, 2)
    with pytest.raises(InvalidPlanError, match=r"stages\.ranks: found a plan for 2 processes"):
        check_world_size(PLAN, 4)


def test_another_model_is_refused_naming_what_differs() -> None:
    config = hub_config(PLAN.chain())
    check_same_model(config, PLAN.chain())
    config.num_hidden_layers = 3
    with pytest.raises(InvalidPlanError, match=r"model\.config\.num_hidden_layers: found 2 in the plan"):
        check_same_model(config, PLAN.chain())


def test_a_module_without_a_config_is_told_to_plan_for_itself() -> None:
    with pytest.raises(
        InvalidPlanError, match=r"found a module without a config(.|\n)*find_plan\(model, cluster, sample=…\)"
    ):
        check_same_model(None, PLAN.chain())


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_that_the_plan_ties_otherwise_are_refused(is_tied: bool) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": 2, "tie_word_embeddings": is_tied}
    chain = make_plan(config, "dp2, dp2, dp2, dp2", num_devices=2).chain()
    check_same_modules(build_meta_model(chain), chain)
    found = "separate in" if is_tied else "shared by"
    other = make_plan(config | {"tie_word_embeddings": not is_tied}, "dp2, dp2, dp2, dp2", num_devices=2).chain()
    with pytest.raises(InvalidPlanError, match=f"model: found weights {found} layers 0, 3"):
        check_same_modules(build_meta_model(other), chain)


def test_a_model_without_its_head_is_refused() -> None:
    chain = PLAN.chain()
    with pytest.raises(InvalidPlanError, match=r"LlamaModel, which has no module (.|\n)* a LlamaForCausalLM"):
        check_same_modules(build_meta_model(chain).model, chain)


def test_a_sharded_model_is_refused() -> None:
    chain = PLAN.chain()
    model = build_meta_model(chain)
    with one_process():
        model.lm_head.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), init_device_mesh("cpu", (1,))))
        with pytest.raises(InvalidPlanError, match="found a model that is already sharded"):
            check_same_modules(model, chain)


def test_a_process_outside_torchrun_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="no torchrun environment"):
        world_size()
