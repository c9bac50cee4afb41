"""Tests of the decisions of ``steelyard profile`` before it measures, and of the use of its file."""

import json
from pathlib import Path

import pytest

from steelyard.cli.profile import MOST_MEASURED, SAMPLES, parse_samples
from steelyard.errors import UserError
from steelyard.plan.file import read_plan
from tests.cli.conftest import Run
from tests.planning.test_assumed_links import LINKED
from tests.processes.forking_agent import fork_ranks
from tests.runtime.models import CONFIGS


@pytest.mark.parametrize("batch", [2, 3, 8, 16, 17, 2 * MOST_MEASURED])
def test_the_samples_for_a_batch_reach_from_one_sample_to_all_of_it(batch: int) -> None:
    sizes = parse_samples(None, batch)
    assert sizes[0] == 1
    assert 2 * sizes[-1] >= batch > sizes[-1] or sizes == (1, 2)


def test_a_batch_of_very_many_samples_is_measured_as_far_as_a_rank_may_hold() -> None:
    assert parse_samples(None, 10**6)[-1] == MOST_MEASURED


def test_without_samples_and_batch_the_usual_sizes_are_measured() -> None:
    assert ",".join(map(str, parse_samples(None))) == SAMPLES


def test_samples_are_sorted_and_each_is_there_once() -> None:
    assert parse_samples("4,1,4") == (1, 4)


@pytest.mark.parametrize(("text", "batch"), [("0", None), ("a", None), ("", None), ("1,2", 16)])
def test_other_samples_or_both_are_an_error(text: str, batch: int | None) -> None:
    with pytest.raises(UserError) as caught:
        parse_samples(text, batch)
    assert caught.value.field == "--samples"


@pytest.mark.processes
def test_a_profile_with_adapters_plans_for_a_job_with_them_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-tied"]))
    job = (tmp_path / "config.json", "--seq-len", 32, "--precision", "fp32")
    asked = ("--train", "lora:r=4,targets=q_proj")
    measured = run("profile", *job, *asked, "-n", 1, "--samples", "1,2", "--budget", 1, "-o", tmp_path / "of.json")
    assert measured.exit_code == 0, measured.output
    assert "--train lora:r=4,alpha=8,targets=q_proj --profile" in " ".join(measured.output.split())
    layers = json.loads((tmp_path / "of.json").read_text())["layers"]
    assert all(each["times"] for each in layers)
    options = ("--cluster", "1x1xcpu", "--memory", "1GiB", "--global-batch", 4, "--profile", tmp_path / "of.json")
    planned = run("plan", *job, *asked, *options)
    assert planned.exit_code == 0, planned.output
    for others in ((), ("--train", "lora:r=8,targets=q_proj")):
        refused = run("plan", *job, *others, *options)
        assert "found train lora:r=4,alpha=8,targets=q_proj, freeze all except adapters" in str(refused.exception)


@pytest.mark.processes
def test_a_profile_of_one_process_plans_for_four_with_the_links_of_a_cluster_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-tied"]))
    (tmp_path / "cluster.yaml").write_text(LINKED)
    job = (tmp_path / "config.json", "--seq-len", 32, "--precision", "fp32")
    measuring = ("-n", 1, "--samples", "1,2", "--budget", 1, "-o", tmp_path / "profile.json")
    measured = run("profile", *job, *measuring)
    assert measured.exit_code == 0, measured.output
    assert "clusters of any number of nodes and devices" in measured.output
    options = ("--cluster", tmp_path / "cluster.yaml", "--memory", "1GiB", "--global-batch", 8)
    planned = run("plan", *job, *options, "-v", "--profile", tmp_path / "profile.json", "-o", tmp_path / "plan.json")
    assert planned.exit_code == 0, planned.output
    plan = read_plan(tmp_path / "plan.json")
    assert plan.num_devices == 4
    said = " ".join(planned.output.split())
    assert "layers measured on cpu" in said
    assert "Links assumed, per device and direction: cable inside a node, 2 GB/s" in said
    explained = run("explain", tmp_path / "plan.json")
    assert explained.exit_code == 0, explained.output
    assert "links assumed" in " ".join(explained.output.split())
