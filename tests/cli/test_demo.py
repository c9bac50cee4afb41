"""Test of the whole product in one command, on real processes and real text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import UserError
from steelyard.plan.file import parse_file, read_plan
from steelyard.profiles.record import RunRecord
from tests.cli.conftest import check_printed
from tests.processes.forking_agent import ROOT

DEMO = """
import pytest, sys
from steelyard.cli import demo, main
from tests.processes.forking_agent import fork_ranks
fork_ranks(pytest.MonkeyPatch())
demo.NUM_PROCESSES = 2
demo.SEQ_LEN = 64
sys.argv.insert(1, "demo")
main()
"""
"""The command on two processes; its two launches fork these from one that has imported what they need."""


@pytest.mark.processes
def test_demo_profiles_plans_trains_and_compares(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEMO, "--steps", "5", "--memory", "40MiB", "--folder", str(tmp_path), "--json"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
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
    check_printed("demo", finished.stdout)
    assert printed["profile"] == json.loads((tmp_path / "profile.json").read_text())
    assert printed["profile"]["identity"]["device"] == "cpu"
    assert printed["record"] == record.model_dump(mode="json", exclude_none=True)
