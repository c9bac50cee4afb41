"""Tests of ``python benchmarks/published_runs.py`` from the command line."""

import csv
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.published_runs.examples import FOLDER, sample

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "published_runs.py"
Script = Callable[..., str]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Run the script in this process and return its output."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_tables_and_targets_are_printed_and_predictions_written(script: Script, tmp_path: Path) -> None:
    output = script(FOLDER, "--predictions", tmp_path / "out.csv")
    for expected in ("time: predicted over measured", "memory: predicted over measured", "skipped", "targets"):
        assert expected in output
    assert "…" not in output, "a file has room for every column"
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(sample())


@pytest.mark.slow
def test_json_has_every_source_and_target(script: Script) -> None:
    found = json.loads(script(FOLDER, "--json"))
    assert {score["source"] for score in found["time"]} >= {"vtrain", "ultrascale_playbook"}
    assert found["num_runs"] == len(sample())
    assert all({"name", "bound", "reached", "is_met"} <= set(line) for line in found["targets"])


@pytest.mark.slow
def test_runs_beside_it_are_predicted_from_any_folder_with_no_path_set(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--sources", "torchtitan", "--json"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [score["source"] for score in json.loads(process.stdout)["time"]] == ["torchtitan"]


@pytest.mark.parametrize(("arguments", "named"), [(["nowhere"], "path"), ([str(FOLDER), "--sources", "x"], "sources")])
def test_what_is_not_there_is_named_without_a_traceback(
    script: Script, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script(*arguments)
    assert f"error: {named}: found" in capsys.readouterr().err
