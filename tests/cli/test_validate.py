"""``steelyard validate`` as a user meets it."""

import csv
import json
from pathlib import Path

from tests.cli.conftest import Run, user_error
from tests.validation.examples import FOLDER, sample


def test_tables_and_targets_are_printed_and_predictions_written(run: Run, tmp_path: Path) -> None:
    result = run("validate", FOLDER, "--predictions", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    for expected in ("time: predicted over measured", "memory: predicted over measured", "skipped", "targets"):
        assert expected in result.output
    assert "…" not in result.output, "a file has room for every column"
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(sample())


def test_json_has_every_source_and_target(run: Run) -> None:
    found = json.loads(run("validate", FOLDER, "--json").output)
    assert {score["source"] for score in found["time"]} >= {"vtrain", "ultrascale_playbook"}
    assert found["num_runs"] == len(sample())
    assert all({"name", "bound", "reached", "is_met"} <= set(line) for line in found["targets"])


def test_a_missing_folder_is_a_user_error(run: Run, tmp_path: Path) -> None:
    assert user_error(run("validate", tmp_path / "nowhere")).field == "path"
