"""Tests of ``steelyard parity``: a plan at small width against one process, as table, JSON and exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.errors import InvalidPlanError
from steelyard.plan.file import write_plan
from steelyard.runtime import parity_run
from tests.cli.conftest import check_printed
from tests.modules.split_configs import split_config
from tests.processes.forking_agent import fork_ranks
from tests.runtime.feature_cases import SPLITS
from tests.runtime.models import FAMILY_CONFIGS, make_plan

FOUND = {
    "losses": [4.0, 3.0],
    "expected_losses": [4.0, 3.0],
    "norms": [1.0, 1.0],
    "expected_norms": [1.0, 1.0],
    "loss_error": 0.0,
    "gradient_error": 1e-6,
    "gradient_tensor": "lm_head.weight",
    "weight_error": 1e-6,
    "same_loss_on_all_ranks": True,
    "strategies": ["single"],
}


def plan_file(folder: Path) -> Path:
    path = folder / "plan.json"
    write_plan(make_plan(FAMILY_CONFIGS["llama"], "dp2, tp2+sp remat=full, fsdp2, tp2", num_devices=2), path)
    return path


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["parity", str(plan_file(folder)), *arguments])
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def pretend(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Pretend that the processes have found something, without starting them."""
    monkeypatch.setattr(parity_run, "launch_parity", lambda *_, **__: FOUND | changes)


def test_a_plan_of_another_engine_is_refused(tmp_path: Path) -> None:
    path = plan_file(tmp_path)
    content = json.loads(path.read_text()) | {"engine": "megatron"}
    path.write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["parity", str(path)])
    assert isinstance(result.exception, InvalidPlanError)
    assert (result.exception.field, result.exception.found) == ("engine", "megatron")


@pytest.mark.processes
def test_a_plan_of_two_processes_equals_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    code, text = run(tmp_path, "--json", "--steps", "1")
    check_printed("parity", text)
    found = json.loads(text)
    assert code == 0
    assert found["within_tolerance"]
    assert found["strategies"] == ["dp2", "tp2+sp remat=full", "fsdp2", "tp2"]
    assert 0 < found["gradient_error"] < found["gradient_tolerance"]
    assert len(found["losses"]) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("whisper", "fsdp2, dp2 remat=full, dp2 remat=full, tp2, fsdp2, dp2, tp2"),
        ("llava", "dp2, fsdp2 remat=full, fsdp2 remat=full, dp2, tp2, tp2, fsdp2"),
    ],
)
def test_a_plan_of_samples_with_features_equals_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, strategies: str
) -> None:
    fork_ranks(monkeypatch)
    plan = make_plan(split_config(name), strategies, num_devices=2, split=SPLITS[name])
    write_plan(plan, tmp_path / "plan.json")
    result = CliRunner().invoke(app, ["parity", str(tmp_path / "plan.json"), "--json", "--steps", "1"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["strategies"] == strategies.split(", ")
    assert 0 < found["gradient_error"] < found["gradient_tolerance"] == 1e-4


@pytest.mark.parametrize(
    "changes", [{"loss_error": 1e-3}, {"gradient_error": 0.5}, {"same_loss_on_all_ranks": False}], ids=str
)
def test_a_difference_beyond_the_tolerance_ends_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    pretend(monkeypatch, **changes)
    code, text = run(tmp_path)
    assert code == 1
    assert "DIFFERENT" in text


def test_the_table_names_the_tensor_that_differs_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    code, text = run(tmp_path)
    assert code == 0
    assert "equal: losses differ by 0.0e+00" in text
    assert "in lm_head.weight" in text


def test_more_processes_than_allowed_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlanError, match="--max-processes 2"):
        run(tmp_path, "--max-processes", "1")


def test_the_model_that_is_trained_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    _, text = run(tmp_path, "--json")
    assert json.loads(text)["config"]["hidden_size"] <= 64
