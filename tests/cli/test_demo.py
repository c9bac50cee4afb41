"""Test of the whole product in one command, on real processes and real text."""

import json
from functools import partial
from pathlib import Path

import pytest

from steelyard.cli import demo
from steelyard.errors import UserError
from steelyard.plan.file import parse_file, read_plan
from steelyard.profiler import launch
from steelyard.profiles.record import RunRecord
from tests.cli.conftest import Run
from tests.processes.forking_agent import fork_ranks


@pytest.mark.processes
def test_demo_profiles_plans_trains_and_compares(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on two processes, whose times are measured as briefly as possible."""
    fork_ranks(monkeypatch)
    monkeypatch.setattr(demo, "NUM_PROCESSES", 2)
    monkeypatch.setattr(demo, "SEQ_LEN", 64)
    monkeypatch.setattr(launch, "launch_profiler", partial(launch.launch_profiler, budget_s=1.0))
    finished = run("demo", "--steps", 5, "--memory", "40MiB", "--folder", tmp_path, "--json")
    assert finished.exit_code == 0, finished.output
    assert "does not fit in " in finished.stderr
    assert "Predicted and measured" in finished.stderr
    plan = read_plan(tmp_path / "plan.json")
    record = parse_file(tmp_path / "record.json", RunRecord, UserError, what="record")
    assert plan.prediction is not None
    assert plan.prediction.profile.is_measured
    assert tuple(str(strategy) for strategy in plan.strategies) == record.strategies
    assert record.steps[-1].loss < record.steps[0].loss
    for rank in record.ranks:
        assert rank.peak_bytes <= plan.prediction.stages[rank.stage].total_bytes
    printed = json.loads(finished.stdout)
    assert printed["profile"] == json.loads((tmp_path / "profile.json").read_text())
    assert printed["profile"]["identity"]["device"] == "cpu"
    assert printed["record"] == record.model_dump(mode="json", exclude_none=True)
