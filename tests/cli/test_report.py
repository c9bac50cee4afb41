"""Tests of ``steelyard report`` from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.file import read_plan
from tests.cli.conftest import Run, user_error

JOB = ("tinyllama-1.1b", "--cluster", "1x2xa100-80gb", "--seq-len", 2048, "--global-batch", 16, "--memory", "14GiB")


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    result = CliRunner().invoke(app, [str(argument) for argument in ("plan", *JOB, "-o", path)])
    assert result.exit_code == 0, result.output
    return path


def changed(path: Path, to: Path, **changes: Any) -> Path:
    to.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to


def record_of(path: Path, **changes: Any) -> dict[str, Any]:
    plan = read_plan(path)
    return {
        "version": 1,
        "model_name": plan.model.name,
        "config_hash": plan.chain().config_hash,
        "device": "a100-80gb",
        "num_devices": plan.num_devices,
        "strategies": [str(strategy) for strategy in plan.strategies],
        "num_warmup_steps": 0,
        "median_step_s": 12.5,
        "tokens_per_s": 4000.0,
        "steps": [{"step": 1, "loss": 9.0, "time_s": 12.5, "grad_norm": 1.0}],
        "ranks": [
            {"rank": rank, "stage": 0, "peak_bytes": 2**33, "memory_method": "counted", "num_params": 1}
            for rank in range(plan.num_devices)
        ],
    } | changes


@pytest.mark.slow
def test_the_page_is_one_small_file_with_the_figures_of_the_plan(run: Run, plan_path: Path, tmp_path: Path) -> None:
    result = run("report", plan_path, "-o", tmp_path / "plan.html")
    assert result.exit_code == 0, result.output
    assert "Written to" in result.stdout
    page = (tmp_path / "plan.html").read_text()
    assert len(page) < 8_000_000
    prediction = read_plan(plan_path).prediction
    assert prediction is not None
    assert f"{prediction.tokens_per_s_per_device:,.0f}" in page
    for expected in (
        "step time",
        "MFU",
        "TFLOP/s",
        " per rank), bf16",
        "One step, pass by pass",
        "Time against memory",
        "this plan",
        "Not modelled",
    ):
        assert expected in page


@pytest.mark.slow
def test_json_has_the_plan_its_frontier_and_its_baselines(run: Run, plan_path: Path, tmp_path: Path) -> None:
    result = run("report", plan_path, "-o", tmp_path / "plan.html", "--time-limit", 60, "--json")
    found = json.loads(result.stdout)
    assert found["plan"] == json.loads(plan_path.read_text())
    assert found["study"]["points"]
    assert found["study"]["explanation"]["rivals"]
    assert 0 <= found["bubble_share"] < 1


@pytest.mark.slow
def test_a_plan_by_hand_is_priced(run: Run, plan_path: Path, tmp_path: Path) -> None:
    content = json.loads(plan_path.read_text())
    del content["prediction"]
    (tmp_path / "hand.json").write_text(json.dumps(content))
    result = run("report", tmp_path / "hand.json", "-o", tmp_path / "hand.html", "--time-limit", 0)
    assert result.exit_code == 0, result.output
    assert "priced as given, not searched" in (tmp_path / "hand.html").read_text()


@pytest.mark.slow
def test_a_run_is_shown_beside_the_prediction(run: Run, plan_path: Path, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(record_of(plan_path)))
    arguments = ("report", plan_path, "-o", tmp_path / "plan.html", "--run", tmp_path / "record.json")
    result = run(*arguments, "--time-limit", 0)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "plan.html").read_text()
    assert "Predicted and measured" in page
    assert "12.5 s" in page


def test_a_plan_for_an_unknown_cluster_still_makes_a_page_that_says_what_is_missing(
    run: Run, plan_path: Path, tmp_path: Path
) -> None:
    path = changed(plan_path, tmp_path / "lab.json", cluster="lab")
    result = run("report", path, "-o", tmp_path / "lab.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "lab.html").read_text()
    assert "add --cluster" in page
    assert "What fills the memory" in page


def test_a_plan_from_a_measured_profile_asks_for_it(run: Run, plan_path: Path, tmp_path: Path) -> None:
    prediction = json.loads(plan_path.read_text())["prediction"]
    prediction["profile"]["method"] = "measured"
    path = changed(plan_path, tmp_path / "measured.json", prediction=prediction)
    run("report", path, "-o", tmp_path / "measured.html")
    assert "add --profile" in (tmp_path / "measured.html").read_text()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"config_hash": "another"}, "config_hash"),
        ({"num_devices": 4}, "num_devices"),
        ({"strategies": ["tp4"]}, "strategies"),
        ({"steps": "none"}, "steps"),
        ({"version": 7}, "version"),
    ],
)
def test_a_record_of_another_run_is_one_clear_error(
    run: Run, plan_path: Path, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    (tmp_path / "record.json").write_text(json.dumps(record_of(plan_path, **changes)))
    error = user_error(run("report", plan_path, "-o", tmp_path / "p.html", "--run", tmp_path / "record.json"))
    assert error.exit_code == 2
    assert field in error.field
    assert not (tmp_path / "p.html").exists()


def test_an_unknown_version_a_truncated_file_and_another_model_are_one_clear_error(
    run: Run, plan_path: Path, tmp_path: Path
) -> None:
    text = plan_path.read_text()
    (tmp_path / "truncated.json").write_text(text[: len(text) // 2])
    model = json.loads(text)["model"]
    model["config"]["num_hidden_layers"] = 15
    cases = {
        changed(plan_path, tmp_path / "version.json", version=99): "version",
        tmp_path / "truncated.json": "plan",
        changed(plan_path, tmp_path / "model.json", model=model): "model.config_hash",
        tmp_path / "none.json": "plan",
    }
    for path, field in cases.items():
        error = user_error(run("report", path, "-o", tmp_path / "p.html"))
        assert error.exit_code == 2
        assert error.field == field
        assert error.hint


def test_a_path_that_cannot_be_written_is_one_clear_error(run: Run, plan_path: Path, tmp_path: Path) -> None:
    error = user_error(run("report", plan_path, "-o", tmp_path / "no" / "plan.html", "--time-limit", 0))
    assert error.field == "--output"
