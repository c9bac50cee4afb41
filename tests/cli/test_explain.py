"""Tests of ``steelyard explain`` from the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.choices import Explanation
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.planning.problem import pipeline_configs
from tests.cli.conftest import Run, user_error
from tests.engines.examples import uniform
from tests.jobs import job_of

JOB = ("tinyllama-1.1b", "--cluster", "1x4xa100-80gb", "--seq-len", 512, "--global-batch", 16)
TIGHT = "8GiB"


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    arguments = ["plan", *JOB, "--memory", TIGHT, "-o", path]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def explained(plan_path: Path) -> Explanation:
    result = CliRunner().invoke(app, ["explain", str(plan_path), "--all", "--json"])
    assert result.exit_code == 0, result.output
    return Explanation.model_validate(json.loads(result.stdout)["explanation"])


def baselines(explanation: Explanation) -> dict[str, Any]:
    return {baseline.name: baseline for baseline in explanation.rivals}


@pytest.mark.slow
def test_explain_fits_a_screen_and_says_what_binds(run: Run, plan_path: Path) -> None:
    output = run("explain", plan_path).stdout
    assert len(output.splitlines()) <= 68  # of a simple plan, which has a line on its groups and one on any plan
    for expected in ("Time:", "Memory:", "Search:", "Memory limits it", "Best plan under a restriction", "less"):
        assert expected in output


@pytest.mark.slow
def test_no_baseline_is_faster_than_the_searched_plan(explained: Explanation) -> None:
    assert explained.rivals
    assert all(baseline.slowdown is None or baseline.slowdown > -0.01 for baseline in explained.rivals)


@pytest.mark.slow
def test_a_baseline_is_the_plan_that_a_restricted_search_finds(run: Run, explained: Explanation) -> None:
    for name, options in (
        ("2 stages", ("--stages", 2)),
        ("without tp", ("--max-tp", 1)),
        ("without remat", ("--remat", "none")),
    ):
        baseline = baselines(explained).get(name)
        result = run("plan", *JOB, "--memory", TIGHT, *options, "--simplify", 0, "--json")
        if baseline is None:
            continue
        if result.exit_code == 1:
            assert baseline.missing_bytes == json.loads(result.stdout)["missing_bytes"] or baseline.missing_bytes > 0
        else:
            step_s = json.loads(result.stdout)["prediction"]["step_time_s"]
            assert baseline.step_time_s >= step_s * (1 - 1e-9)
            assert baseline.step_time_s == pytest.approx(step_s, rel=0.05)


@pytest.mark.slow
def test_a_baseline_that_does_not_fit_says_by_how_many_bytes(explained: Explanation) -> None:
    for baseline in explained.rivals:
        assert (baseline.step_time_s is None) != (baseline.missing_bytes is None)


@pytest.mark.slow
def test_more_memory_is_never_slower_and_less_never_faster(explained: Explanation) -> None:
    more, less = explained.budgets
    assert more.step_time_s is not None
    assert less.step_time_s is None or more.step_time_s <= less.step_time_s * 1.01


@pytest.mark.slow
def test_all_lists_every_strategy_and_every_config_with_a_reason(
    run: Run, plan_path: Path, explained: Explanation
) -> None:
    verdicts = {each.verdict for each in explained.verdicts}
    assert {"undominated", "dominated", "not offered"} <= verdicts
    assert all(each.reason for each in explained.verdicts if each.verdict != "undominated")
    never = {(each.what, each.values): each.reason for each in explained.not_searched}
    assert never["stages", "3"] == "does not divide the 4 devices"
    assert never["microbatches", "3, 5–7, 9–15"] == "does not divide the global batch of 16"
    alternatives = read_plan(plan_path).prediction.alternatives  # type: ignore[union-attr]
    assert len(alternatives) == len(pipeline_configs(job_of(read_plan(plan_path)), Decisions())) - 1
    assert all(each.reason for each in alternatives)
    output = run("explain", plan_path, "--all").stdout
    for expected in ("Not searched", "Plans that lost", "dominated", "Predicted, per stage"):
        assert expected in output


@pytest.mark.slow
def test_a_slower_plan_by_hand_has_the_best_plan_as_its_baseline(run: Run, plan_path: Path, tmp_path: Path) -> None:
    by_hand = json.loads(plan_path.read_text()) | {"num_microbatches": 4, "schedule": "1f1b"}
    del by_hand["prediction"]
    by_hand["stages"] = [{"ranks": [0, 3], "runs": [{"layers": [0, 23], "parallel": "fsdp4", "remat": "full"}]}]
    (tmp_path / "hand.json").write_text(json.dumps(by_hand))
    result = run("explain", tmp_path / "hand.json", "--json")
    found = baselines(Explanation.model_validate(json.loads(result.stdout)["explanation"]))
    assert found["any plan"].slowdown < 0


@pytest.mark.slow
def test_a_plan_from_a_measured_profile_asks_for_it_and_shows_the_rest(
    run: Run, plan_path: Path, tmp_path: Path
) -> None:
    content = json.loads(plan_path.read_text())
    content["prediction"]["profile"]["method"] = "measured"
    (tmp_path / "measured.json").write_text(json.dumps(content))
    result = run("explain", tmp_path / "measured.json")
    assert result.exit_code == 0, result.output
    assert "--profile" in result.stdout
    assert "Time:" in result.stdout
    assert "Best plan under a restriction" not in result.stdout


@pytest.mark.slow
def test_a_plan_for_an_unknown_cluster_asks_for_it(run: Run, plan_path: Path, tmp_path: Path) -> None:
    content = json.loads(plan_path.read_text()) | {"cluster": "lab"}
    (tmp_path / "lab.json").write_text(json.dumps(content))
    result = run("explain", tmp_path / "lab.json")
    assert result.exit_code == 0, result.output
    assert "--cluster" in result.stdout


def test_a_plan_priced_on_another_cluster_names_it_and_is_written_for_it(
    run: Run, plan_path: Path, tmp_path: Path
) -> None:
    cluster = f"{read_plan(plan_path).cluster.rpartition('x')[0]}xh100-80gb"
    shown = run("explain", plan_path, "--cluster", cluster, "-o", tmp_path / "there.json").stdout
    assert f" on {cluster}: " in shown.splitlines()[0]
    there = read_plan(tmp_path / "there.json")
    assert (there.cluster, there.machines().device.name) == (cluster, "h100-80gb")
    again = run("explain", tmp_path / "there.json").stdout
    assert again.splitlines()[0] == shown.splitlines()[0]


def test_a_file_that_is_no_plan_is_one_clear_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"version": 1')
    assert user_error(run("explain", tmp_path / "broken.json")).exit_code == 2


@pytest.mark.slow
def test_why_not_shows_the_best_plan_that_does_what_is_asked(run: Run, plan_path: Path) -> None:
    content = json.loads(run("explain", plan_path, "--why-not", "stages=2", "--json").stdout)
    asked = content["explanation"]["why_not"]["plan"]
    assert len(asked["stages"]) == 2
    output = run("explain", plan_path, "--why-not", "stages=2").stdout
    for expected in ("Step time", "Memory of the fullest stage", "difference", "Layers that differ"):
        assert expected in output


@pytest.mark.slow
def test_why_not_a_dimension_of_no_degree_takes_its_best_one_for_all_blocks(run: Run, plan_path: Path) -> None:
    content = json.loads(run("explain", plan_path, "--memory", "16GiB", "--why-not", "tp", "--json").stdout)
    runs = [run for stage in content["explanation"]["why_not"]["plan"]["stages"] for run in stage["runs"]]
    assert all("tp" in run["parallel"] for run in runs if run["layers"][0] <= 22 and run["layers"][1] >= 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("ep", "the model has no experts"),
        ("tp=3", "tp 3 does not divide the"),
        ("stages=3", "stages among 1, 2, 4"),
        ("dp4, remat=none, microbatches=1", "does not fit"),
        ("fsdp=4, microbatches=16", "does not divide"),
    ],
)
def test_why_not_names_what_stands_in_the_way(run: Run, plan_path: Path, asked: str, reason: str) -> None:
    result = run("explain", plan_path, "--why-not", asked)
    assert result.exit_code == 0, result.output
    assert reason in result.stdout


@pytest.mark.slow
def test_a_pinned_plan_obeys_the_pin_and_is_no_faster(run: Run, plan_path: Path) -> None:
    free = json.loads(plan_path.read_text())
    result = run("plan", *JOB, "--memory", TIGHT, "--pin", "blocks 0-1: remat=full, tp=2", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    runs = [run for stage in plan["stages"] for run in stage["runs"]]
    own = [run for run in runs if run["layers"][0] <= 2 and run["layers"][1] >= 1]
    assert own
    assert all(run["remat"] == "full" and "tp2" in run["parallel"] for run in own)
    assert plan["prediction"]["lower_bound_s"] >= free["prediction"]["lower_bound_s"] * (1 - 1e-9)


@pytest.mark.slow
def test_diff_lists_the_layers_that_differ(run: Run, plan_path: Path, tmp_path: Path) -> None:
    run("plan", *JOB, "-o", tmp_path / "roomy.json")
    content = json.loads(run("diff", plan_path, tmp_path / "roomy.json", "--json").stdout)
    before, after = read_plan(plan_path), read_plan(tmp_path / "roomy.json")
    changed = {layer for each in content["layers"] for layer in range(each["layers"][0], each["layers"][1] + 1)}
    if before.num_stages == after.num_stages == 1:
        pairs = zip(before.strategies, after.strategies, strict=True)
        assert changed == {layer for layer, (one, other) in enumerate(pairs) if one != other}
    assert sum(content["first"]["time_s"].values()) == pytest.approx(content["first"]["step_time_s"])
    shown = run("diff", plan_path, tmp_path / "roomy.json").stdout
    assert "difference" in shown
    assert re.search(r"^ blocks? \d", shown, re.MULTILINE), "by the names that the plan shows"


def test_diff_with_an_engine_compares_with_its_plan_of_the_same_request(
    run: Run, plan_path: Path, tmp_path: Path
) -> None:
    content = json.loads(run("diff", plan_path, "--engine", "megatron", "--json").stdout)
    own = read_plan(plan_path)
    assert own.prediction is not None
    assert content["first"]["step_time_s"] == pytest.approx(own.prediction.step_time_s)
    planned = json.loads(run("plan", *JOB, "--memory", TIGHT, "--engine", "megatron", "--json").stdout)
    assert content["second"]["step_time_s"] == pytest.approx(planned["prediction"]["step_time_s"])
    shown = run("diff", plan_path, "--engine", "megatron").stdout
    assert "run by megatron" in " ".join(shown.split())
    assert user_error(run("diff", plan_path)).field == "SECOND"
    assert user_error(run("diff", plan_path, plan_path, "--engine", "megatron")).field == "SECOND"
    assert user_error(run("diff", plan_path, "--engine", "nowhere")).field == "--engine"


def test_diff_writes_a_page_of_both_plans(run: Run, plan_path: Path, tmp_path: Path) -> None:
    run("plan", *JOB, "-o", tmp_path / "roomy.json")
    result = run("diff", plan_path, tmp_path / "roomy.json", "-o", tmp_path / "diff.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "diff.html").read_text()
    for expected in ("plan.json", "roomy.json", "Step time", "Memory of the fullest stage", "Layers that differ"):
        assert expected in page
    assert "difference" in page


def test_a_page_of_a_diff_ends_in_html(run: Run, plan_path: Path, tmp_path: Path) -> None:
    assert ".html" in user_error(run("diff", plan_path, plan_path, "-o", tmp_path / "diff.txt")).expected


def test_a_plan_does_not_differ_from_itself(run: Run, plan_path: Path) -> None:
    assert json.loads(run("diff", plan_path, plan_path, "--json").stdout)["layers"] == []


def test_plans_of_other_models_cannot_be_compared(run: Run, plan_path: Path, tmp_path: Path) -> None:
    write_plan(uniform("fsdp8", devices=8, model="llama3-8b"), tmp_path / "other.json")
    assert "same model" in user_error(run("diff", plan_path, tmp_path / "other.json")).hint


def test_why_not_another_plan_shows_what_it_costs(run: Run, plan_path: Path, tmp_path: Path) -> None:
    by_hand = json.loads(plan_path.read_text()) | {"num_microbatches": 4, "schedule": "1f1b"}
    del by_hand["prediction"]
    by_hand["stages"] = [{"ranks": [0, 3], "runs": [{"layers": [0, 23], "parallel": "fsdp4", "remat": "full"}]}]
    (tmp_path / "hand.json").write_text(json.dumps(by_hand))
    content = json.loads(run("explain", plan_path, "--why-not", tmp_path / "hand.json", "--json").stdout)
    asked = content["explanation"]["why_not"]
    assert not asked["reasons"]
    assert asked["plan"]["stages"][0]["runs"][0]["parallel"] == "fsdp4"
    assert asked["plan"]["prediction"]["step_time_s"] > content["plan"]["prediction"]["step_time_s"]
    assert "difference" in run("explain", plan_path, "--why-not", tmp_path / "hand.json").stdout


def test_why_not_a_plan_that_does_not_fit_says_by_how_much(run: Run, plan_path: Path, tmp_path: Path) -> None:
    by_hand = json.loads(plan_path.read_text()) | {"num_microbatches": 1, "schedule": "1f1b"}
    del by_hand["prediction"]
    by_hand["stages"] = [{"ranks": [0, 3], "runs": [{"layers": [0, 23], "parallel": "dp4"}]}]
    (tmp_path / "hand.json").write_text(json.dumps(by_hand))
    assert "does not fit: exceeds the memory" in run("explain", plan_path, "--why-not", tmp_path / "hand.json").stdout


def test_why_not_a_plan_for_another_batch_is_one_clear_error(run: Run, plan_path: Path, tmp_path: Path) -> None:
    by_hand = json.loads(plan_path.read_text()) | {"global_batch": 32}
    del by_hand["prediction"]
    (tmp_path / "hand.json").write_text(json.dumps(by_hand))
    assert user_error(run("explain", plan_path, "--why-not", tmp_path / "hand.json")).field == "global_batch"
