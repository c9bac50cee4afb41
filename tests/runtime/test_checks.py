"""Tests of plans that the runtime refuses."""

import pytest

from steelyard.errors import InvalidPlanError, UserError
from steelyard.modules.build import hub_config
from steelyard.processes.group import world_size
from steelyard.runtime.checks import check_world_size
from steelyard.runtime.parallel_model import check_same_model
from tests.runtime.models import CONFIGS, make_plan

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


def test_a_process_outside_torchrun_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="no torchrun environment"):
        world_size()
