"""Tests of ``steelyard timeline`` from the command line."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import parse_strategy
from steelyard.units import format_seconds
from tests.cli.conftest import Run


@pytest.fixture
def interleaved(tmp_path: Path) -> Path:
    """A plan written by hand: two stages of two chunks."""
    bounds = (0, 4, 9, 14, 18)
    stages = tuple(
        StagePart(
            ranks=(index % 2 * 4, index % 2 * 4 + 3),
            runs=fold_runs(first, (parse_strategy("fsdp4"),) * (end - first)),
        )
        for index, (first, end) in enumerate(pairwise(bounds))
    )
    plan = Plan(
        model=PlanModel(name="llama3.2-1b"),
        cluster="1x8xa100-80gb",
        seq_len=2048,
        global_batch=32,
        num_microbatches=8,
        precision="bf16",
        schedule="interleaved-1f1b",
        stages=stages_of(stages),
    )
    write_plan(plan, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_file_is_written_and_the_step_time_printed(run: Run, interleaved: Path, tmp_path: Path) -> None:
    result = run("timeline", interleaved, "-o", tmp_path / "timeline.json")
    assert result.exit_code == 0, result.output
    for expected in ("per step in simulation (interleaved-1f1b)", "bubbles", "perfetto"):
        assert expected in result.output
    content = json.loads((tmp_path / "timeline.json").read_text())
    assert {event["name"] for event in content["traceEvents"]} >= {"forward 0 chunk 0", "backward 7 chunk 1"}


def test_json_gives_the_step_time_and_what_is_shown(run: Run, interleaved: Path, tmp_path: Path) -> None:
    arguments = ("timeline", interleaved, "-o", tmp_path / "timeline.json", "--microbatches", 4, "--json")
    summary = json.loads(run(*arguments).output)
    assert summary["microbatches_shown"] == 4
    assert summary["step_time_s"] > 0
    assert "4 of 8 microbatches" in run(*arguments[:-1]).output


@pytest.mark.slow
def test_the_step_is_that_of_the_plan_with_what_is_fixed(run: Run, interleaved: Path, tmp_path: Path) -> None:
    priced = tmp_path / "priced.json"
    explained = json.loads(run("explain", interleaved, "-o", priced, "--json").output)["plan"]
    step_s = explained["prediction"]["step_time_s"]
    arguments = ("timeline", priced, "-o", tmp_path / "timeline.json")
    found = json.loads(run(*arguments, "--json").output)
    assert found["step_time_s"] == pytest.approx(step_s)
    assert found["fixed_s"] > 0
    output = run(*arguments).output
    assert f"{format_seconds(step_s)} per step in simulation" in output
    assert f"{format_seconds(found['fixed_s'])} per-step overhead after the passes" in output


@pytest.mark.slow
def test_an_interleaved_plan_written_by_hand_is_explained(run: Run, interleaved: Path) -> None:
    output = run("explain", interleaved).output
    assert "2 stages of 4 devices (interleaved-1f1b, 2 chunks each)" in " ".join(output.split())
    assert "1, chunk 1" in output
