"""Tests of plans from a measured profile: the profile is found again, or the error says why not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.file import dump_json, read_plan
from tests.cli.conftest import Run, user_error
from tests.cost.examples import CONFIG, SEQ_LEN, chain, measured_profile

JOB = ("--cluster", "1x4xcpu", "--memory", "1GiB", "--seq-len", SEQ_LEN, "--precision", "fp32")
LEFT_OUT = "baselines and other memory budgets are left out"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a config, its profile and a plan that was made from it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "profile.json").write_text(dump_json(measured_profile(chain())))
    arguments = ["plan", "config.json", *JOB, "--global-batch", 8, "--profile", "profile.json", "-o", "plan.json"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return tmp_path


def explained(run: Run, path: str | Path) -> str:
    result = run("explain", path)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


@pytest.mark.slow
def test_a_plan_keeps_the_path_and_the_hash_of_its_profile(folder: Path) -> None:
    prediction = read_plan(folder / "plan.json").prediction
    assert prediction is not None
    assert prediction.profile.file is not None
    assert prediction.profile.file.path == "profile.json"
    assert len(prediction.profile.file.sha256) == 64


@pytest.mark.slow
def test_explain_finds_the_profile_by_itself(run: Run, folder: Path) -> None:
    assert "Best plan under a restriction" in explained(run, "plan.json")


@pytest.mark.slow
def test_the_profile_is_found_beside_the_plan_from_anywhere(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert "Best plan under a restriction" in explained(run, folder / "plan.json")


@pytest.mark.slow
@pytest.mark.parametrize(("option", "page"), [("report", "Why the others lost"), ("timeline", "traceEvents")])
def test_report_and_timeline_find_it_too(run: Run, folder: Path, option: str, page: str) -> None:
    result = run(option, "plan.json", "-o", "out.html")
    assert result.exit_code == 0, result.output
    text = Path("out.html").read_text()
    assert page in text
    assert "left out" not in text


@pytest.mark.slow
def test_a_profile_that_is_gone_is_said_to_be(run: Run, folder: Path) -> None:
    (folder / "profile.json").rename(folder / "old.json")
    text = explained(run, "plan.json")
    assert f"{LEFT_OUT}: no file profile.json" in text
    assert "--profile" in text


@pytest.mark.slow
def test_a_profile_that_changed_is_said_to_have(run: Run, folder: Path) -> None:
    (folder / "profile.json").write_text(dump_json(measured_profile(chain(), (1, 2, 8))))
    assert f"{LEFT_OUT}: profile.json, which has changed since" in explained(run, "plan.json")


@pytest.mark.slow
def test_a_changed_profile_that_is_given_is_taken(run: Run, folder: Path) -> None:
    (folder / "profile.json").write_text(dump_json(measured_profile(chain(), (1, 2, 8))))
    assert "Best plan under a restriction" in run("explain", "plan.json", "--profile", "profile.json").stdout


@pytest.mark.slow
def test_a_timeline_cannot_do_without_its_profile(run: Run, folder: Path) -> None:
    (folder / "profile.json").unlink()
    error = user_error(run("timeline", "plan.json", "-o", "out.json"))
    assert error.field == "--profile"
    assert "no file profile.json" in error.found


@pytest.mark.slow
def test_a_plan_by_hand_is_priced_from_a_profile_that_is_given(run: Run, folder: Path) -> None:
    by_hand = json.loads((folder / "plan.json").read_text())
    del by_hand["prediction"]
    (folder / "hand.json").write_text(json.dumps(by_hand))
    result = run("explain", "hand.json", "--profile", "profile.json", "--memory", "1GiB", "-o", "priced.json")
    assert result.exit_code == 0, result.output
    assert "Time:" in result.stdout
    assert "Best plan under a restriction" in explained(run, "priced.json")


def planned(run: Run, batch: int, *options: object) -> str:
    result = run("plan", "config.json", *JOB, "--global-batch", batch, "--profile", "profile.json", *options)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


@pytest.mark.slow
def test_what_lies_beyond_the_measured_sizes_is_left_out_and_said_so(run: Run, folder: Path) -> None:
    text = planned(run, 64, "-o", "large.json")
    assert "left out: 16, 32, 64 samples per rank (the profile measured 1, 2, 4 and covers 0.5 to 8" in text
    assert "steelyard profile --global-batch 64" in text
    plan = read_plan("large.json")
    samples = {plan.microbatch_samples / strategy.sample_degree for strategy in plan.strategies}
    assert max(samples) <= 8
    assert plan.prediction is not None
    reasons = {each.description: each.reason for each in plan.prediction.alternatives}
    assert reasons["1 stage, 1 microbatch"].startswith("left out, 16 samples per rank")


@pytest.mark.slow
def test_explain_lists_the_sizes_that_were_never_searched(run: Run, folder: Path) -> None:
    planned(run, 64, "-o", "large.json")
    content = json.loads(run("explain", "large.json", "--all", "--json").stdout)
    found = {each["what"]: each["values"] for each in content["explanation"]["not_searched"]}
    assert found["samples per rank"] == "16, 32, 64"


@pytest.mark.slow
def test_nothing_is_left_out_of_a_batch_that_the_profile_reaches(run: Run, folder: Path) -> None:
    assert "left out" not in planned(run, 8)


@pytest.mark.slow
def test_where_no_size_is_reached_the_measured_sizes_are_named(run: Run, folder: Path) -> None:
    options = ("--stages", 1, "--microbatches", 1)
    result = run("plan", "config.json", *JOB, "--global-batch", 64, "--profile", "profile.json", *options)
    assert result.exit_code == 1
    assert "a profile that reaches further" in result.stderr
    assert "measured 1, 2, 4" in result.stderr


@pytest.mark.slow
def test_why_not_a_size_that_was_not_measured_says_so(run: Run, folder: Path) -> None:
    planned(run, 64, "-o", "large.json")
    output = run("explain", "large.json", "--why-not", "microbatches=1, tp=4").stdout
    assert "the profile measured 1, 2, 4" in " ".join(output.split())
