"""Tests of ``steelyard plan --calibrate`` from the command line."""

from pathlib import Path

import pytest

from steelyard.plan.file import read_plan
from tests.cli.conftest import Run, user_error

JOB = ("llama3.2-1b", "--cluster", "1x8xa100-80gb", "--seq-len", 2048, "--global-batch", 32, "--stages", 1)


@pytest.mark.slow
def test_a_measured_run_scales_the_plan_and_the_table_says_so(run: Run, tmp_path: Path) -> None:
    run("plan", *JOB, "-o", tmp_path / "plan.json", "--fallbacks", 0)
    first = read_plan(tmp_path / "plan.json").prediction
    assert first is not None
    (tmp_path / "run.yaml").write_text(f"version: 1\nplan: plan.json\nstep_time_s: {2 * first.step_time_s}\n")
    again = ("--calibrate", tmp_path / "run.yaml", "-o", tmp_path / "again.json", "--fallbacks", 0)
    output = run("plan", *JOB, *again).output
    second = read_plan(tmp_path / "again.json").prediction
    assert second is not None
    assert second.step_time_s == pytest.approx(2 * first.step_time_s)
    assert "all times × 2.000" in " ".join(output.split())


@pytest.mark.slow
def test_several_runs_stand_behind_one_option_or_several(run: Run, tmp_path: Path) -> None:
    run("plan", *JOB, "-o", tmp_path / "plan.json", "--fallbacks", 0)
    first = read_plan(tmp_path / "plan.json").prediction
    assert first is not None
    paths = [tmp_path / f"run{number}.yaml" for number in range(3)]
    for factor, path in zip((1.5, 2.0, 9.0), paths, strict=True):
        path.write_text(f"version: 1\nplan: plan.json\nstep_time_s: {factor * first.step_time_s}\n")
    keep = ("-o", tmp_path / "again.json", "--fallbacks", 0)
    for words in (("--calibrate", *paths), ("--calibrate", paths[0], "--calibrate", *paths[1:])):
        output = run("plan", *JOB, *words, *keep).output
        source = read_plan(tmp_path / "again.json").prediction.profile
        assert source.time_factor == pytest.approx(2.0)
        assert source.num_calibrating == 3
        assert "the median of run0.yaml × 1.500, run1.yaml × 2.000, run2.yaml × 9.000" in " ".join(output.split())


def test_words_that_belong_to_nothing_are_a_user_error(run: Run) -> None:
    assert "'second' after the model" in user_error(run("plan", *JOB, "second")).found


def test_a_run_that_is_not_there_is_a_user_error(run: Run, tmp_path: Path) -> None:
    assert user_error(run("plan", *JOB, "--calibrate", tmp_path / "nowhere.yaml")).field == "--calibrate"
