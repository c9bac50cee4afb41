"""Tests of lost and slow nodes from the command line: `train --elastic` and `explain --record`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.file import dump_json, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.elastic import replan
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord
from tests.cli.conftest import Run, user_error
from tests.cost.examples import CONFIG, SEQ_LEN, chain, measured_profile
from tests.runtime.models import make_plan

pytestmark = pytest.mark.slow

JOB = ("llama3.2-1b", "--cluster", "2x4xa100-80gb", "--seq-len", 2048, "--global-batch", 16)


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    arguments = ["plan", *JOB, "--stages", 2, "-o", path]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return path


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def elastic_error(run: Run, path: Path, *options: object) -> str:
    return str(user_error(run("train", path, "--data", "text.txt", "--elastic", *options)))


@pytest.mark.slow
def test_an_elastic_run_needs_checkpoints(run: Run, plan_path: Path) -> None:
    assert "--elastic: found no --checkpoint-dir" in elastic_error(run, plan_path)


def test_an_elastic_run_needs_checkpoints_on_the_way(run: Run, plan_path: Path, tmp_path: Path) -> None:
    options = ("--checkpoint-dir", tmp_path, "--steps", 50, "--checkpoint-every", 50)
    found = elastic_error(run, plan_path, *options)
    assert "found --checkpoint-every 50, so no checkpoint before the last of 50 steps" in found
    assert "lower --checkpoint-every" in found


def test_an_elastic_run_needs_a_plan_whose_costs_are_known(run: Run, tmp_path: Path) -> None:
    plan = make_plan("llama-tied", "dp2, dp2, dp2, dp2", num_devices=2)
    write_plan(plan.model_copy(update={"cluster": "ours"}), tmp_path / "plan.json")
    found = elastic_error(run, tmp_path / "plan.json", "--checkpoint-dir", tmp_path)
    assert found.startswith("--elastic: ")
    assert "'ours'" in found


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--elastic", "--hosts", "1:2"), "--hosts --elastic"),
        (("--elastic", "--rendezvous", "a:1"), "--rendezvous --elastic"),
        (("--hosts", "1:2", "--rendezvous", "a:1"), "--hosts --rendezvous"),
        (("--elastic", "--hosts", "2:1", "--rendezvous", "a:1"), "'2:1'"),
        (("--elastic", "--hosts", "many", "--rendezvous", "a:1"), "'many'"),
        (("--elastic", "--hosts", "1:3", "--rendezvous", "a:1"), "'1:3'"),
    ],
)
def test_hosts_that_do_not_go_together_are_one_error(
    run: Run, plan_path: Path, tmp_path: Path, options: tuple[str, ...], found: str
) -> None:
    result = run("train", plan_path, "--data", "text.txt", "--checkpoint-dir", tmp_path, "--steps", 500, *options)
    assert f"--hosts: found {found}\n" in str(user_error(result))


def record(plan: Plan, folder: Path, *, slow: int | None = None, **changes: Any) -> Path:
    """Write the record of a run in which ranks compute twice as long as predicted, the slow one four times as long."""
    predicted = (1.0,) * plan.num_stages
    content = RunRecord(
        model_name=plan.model.name,
        config_hash=plan.chain().config_hash,
        device="NVIDIA A100-SXM4-80GB",
        num_devices=plan.num_devices,
        strategies=tuple(map(str, plan.strategies)),
        num_warmup_steps=0,
        median_step_s=2.0,
        tokens_per_s=1.0,
        steps=(StepRecord(step=1, loss=1.0, time_s=2.0, grad_norm=1.0),),
        ranks=tuple(
            RankRecord(
                rank=rank,
                stage=rank * plan.num_stages // plan.num_devices,
                peak_bytes=1,
                memory_method="counted",
                num_params=1,
                own_s=4.0 if rank == slow else 2.0,
                host=f"node{rank // 4}",
            )
            for rank in range(plan.num_devices)
        ),
        predicted_own_s=predicted,
    )
    (folder / "record.json").write_text(dump_json(content.model_copy(update=changes)))
    return folder / "record.json"


@pytest.mark.slow
def test_explain_names_a_slow_rank_and_what_planning_without_its_node_gains(
    run: Run, plan_path: Path, tmp_path: Path
) -> None:
    plan = read_plan(plan_path)
    result = run("explain", plan_path, "--record", record(plan, tmp_path, slow=5), "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["explanation"]["slow_nodes"]
    assert found["rank"] == "rank 5 (stage 1) on node1 computes 2.0 × as long"
    assert found["step_time_s"] == pytest.approx(step_s(plan), rel=1e-6)
    assert 1.5 * step_s(plan) < found["slowed_step_s"] < 2.0 * step_s(plan)
    assert found["cluster"] == "1x4xa100-80gb"
    assert found["without_step_s"] == step_s(replan(plan, (4,), tmp_path).plan)
    text = " ".join(run("explain", plan_path, "--record", tmp_path / "record.json").stdout.split())
    assert "Rank 5 (stage 1) on node1 computes 2.0 × as long as predicted, relative to the others: a step takes" in text
    assert "the best plan without its node takes" in text


@pytest.mark.slow
def test_explain_tells_what_a_plan_with_fewer_layers_on_the_slow_node_gains(
    run: Run, plan_path: Path, tmp_path: Path
) -> None:
    plan = read_plan(plan_path)
    result = run("explain", plan_path, "--record", record(plan, tmp_path, slow=5), "--json")
    (found,) = json.loads(result.stdout)["explanation"]["slow_nodes"]
    recut = found["recut"]
    layers = {is_slow: count for count, is_slow in zip(recut["layers"], recut["is_slow"], strict=True)}
    assert layers[True] < layers[False]
    assert sum(recut["layers"]) == plan.chain().num_layers
    assert step_s(plan) < recut["step_time_s"] < min(found["slowed_step_s"], found["without_step_s"])
    text = " ".join(run("explain", plan_path, "--record", tmp_path / "record.json").stdout.split())
    gain = 1 - recut["step_time_s"] / found["slowed_step_s"]
    assert f"{layers[True]} (slow)" in text
    assert f"{gain:.1%} faster" in text


@pytest.fixture(scope="module")
def pooled_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pooled") / "plan.json"
    machines = ("--cluster", "1x2xa100-80gb+1x2xa100-40gb", "--stages", 2)
    result = CliRunner().invoke(app, [str(each) for each in ("plan", JOB[0], *machines, *JOB[3:], "-o", path)])
    assert result.exit_code == 0, result.output
    assert read_plan(path).is_mixed
    return path


MEETING = ("--rendezvous", "a:1")
POOL = ("--pool", "1x2xa100-80gb")


@pytest.mark.parametrize(
    ("options", "found", "expected"),
    [
        (("--hosts", "1:2", *MEETING), "--pool: found nothing", "the device group of this host: 1x2xa100-"),
        (("--pool", "1x2xt4", "--hosts", "1:2", *MEETING), "--pool: found '1x2xt4'", "the device group of this host:"),
        (POOL, "--elastic: found a plan over 2 device groups", "one host or more per device group"),
        ((*POOL, "--hosts", "1:4", *MEETING), "--hosts: found '1:4'", "MAX hosts have the 2 nodes of all groups"),
    ],
)
def test_an_elastic_run_over_pools_needs_hosts_that_say_of_which_pool_they_are(
    run: Run, pooled_path: Path, tmp_path: Path, options: tuple[str, ...], found: str, expected: str
) -> None:
    error = elastic_error(run, pooled_path, "--checkpoint-dir", tmp_path, "--steps", 500, *options)
    assert error.startswith(found)
    assert expected in " ".join(error.split())


def test_a_pool_is_named_for_plans_over_pools_alone(run: Run, plan_path: Path, tmp_path: Path) -> None:
    error = elastic_error(run, plan_path, "--checkpoint-dir", tmp_path, *POOL)
    assert "expected: a plan over pools" in error


def test_a_pool_without_an_elastic_run_is_refused(run: Run, pooled_path: Path) -> None:
    error = str(user_error(run("train", pooled_path, "--data", "text.txt", *POOL)))
    assert "--pool: found '1x2xa100-80gb'\n  expected: --elastic, and a plan" in error


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 3])
def test_explain_names_the_pool_of_a_slow_rank_and_plans_around_its_node(
    run: Run, pooled_path: Path, tmp_path: Path, slow: int
) -> None:
    plan = read_plan(pooled_path)
    path = record(plan, tmp_path, slow=slow)
    result = run("explain", pooled_path, "--record", path, "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["explanation"]["slow_nodes"]
    stage = slow // 2
    own = plan.cluster.split("+")[stage]
    assert found["rank"] == f"rank {slow} (stage {stage} in {own}) on node0 computes 2.0 × as long"
    assert step_s(plan) < found["slowed_step_s"] < 2.0 * step_s(plan)
    left = plan.cluster.replace(own, own.replace("1x2x", "1x1x"))
    assert set(found["cluster"].split("+")) == set(left.split("+")), "of one node a device goes"
    text = " ".join(run("explain", pooled_path, "--record", path).stdout.split())
    assert f"(stage {stage} in {own}) on node0 computes 2.0 × as long as predicted, relative to the others" in text
    assert "the best plan without its device takes" in text


@pytest.mark.slow
def test_explain_cuts_a_plan_over_pools_for_a_slow_node_of_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ("--seq-len", 2048, "--global-batch", 32)
    result = run("plan", "llama3-8b", "--cluster", "2x2xa100-80gb+2x2xh100-80gb", *asked, "-o", path)
    assert result.exit_code == 0, result.output
    plan = read_plan(path)
    assert plan.is_mixed
    slow = plan.num_devices - 1
    stages = [stage for stage, size in enumerate(plan.stage_sizes) for _ in range(size)]
    content = json.loads(record(plan, tmp_path, slow=slow).read_text())
    for rank, stage in zip(content["ranks"], stages, strict=True):
        rank["stage"] = stage
    (tmp_path / "record.json").write_text(json.dumps(content))
    result = run("explain", path, "--record", tmp_path / "record.json", "--json")
    (found,) = json.loads(result.stdout)["explanation"]["slow_nodes"]
    recut, own = found["recut"], plan.cluster.split("+")[-1]
    assert own in found["rank"]
    assert set(found["cluster"].split("+")) == {*plan.cluster.split("+")[:-1], own.replace("2x2x", "1x2x")}
    assert step_s(plan) < recut["step_time_s"] < found["slowed_step_s"]
    assert any(recut["is_slow"])
    assert not all(recut["is_slow"])
    assert sum(recut["layers"]) == plan.chain().num_layers


def test_an_even_run_over_pools_is_said_to_be_one(run: Run, pooled_path: Path, tmp_path: Path) -> None:
    path = record(read_plan(pooled_path), tmp_path)
    explanation = json.loads(run("explain", pooled_path, "--record", path, "--json").stdout)["explanation"]
    assert any("more than 30% longer than predicted" in note for note in explanation["notes"])


def test_explain_says_that_a_run_was_even(run: Run, plan_path: Path, tmp_path: Path) -> None:
    path = record(read_plan(plan_path), tmp_path)
    result = run("explain", plan_path, "--record", path, "--json")
    explanation = json.loads(result.stdout)["explanation"]
    assert explanation.get("slow_nodes", []) == []
    assert any("more than 30% longer than predicted" in note for note in explanation["notes"])


@pytest.mark.slow
def test_a_record_of_another_plan_is_refused(run: Run, plan_path: Path, tmp_path: Path) -> None:
    path = record(read_plan(plan_path), tmp_path, config_hash="another")
    assert "expected: one of this plan" in str(user_error(run("explain", plan_path, "--record", path)))


def test_a_record_from_before_own_work_was_measured_is_refused(run: Run, plan_path: Path, tmp_path: Path) -> None:
    plan = read_plan(plan_path)
    path = record(plan, tmp_path)
    content = json.loads(path.read_text())
    for rank in content["ranks"]:
        del rank["own_s"]
    path.write_text(json.dumps(content))
    assert "found a record from before" in str(user_error(run("explain", plan_path, "--record", path)))


@pytest.mark.slow
@pytest.mark.parametrize("left", [3, 2, 1])
def test_a_plan_of_a_measured_profile_is_found_again_for_fewer_processes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("profile.json").write_text(dump_json(measured_profile(chain())))
    cluster = ("--cluster", "1x4xcpu", "--memory", "1GiB", "--seq-len", SEQ_LEN, "--precision", "fp32")
    result = run("plan", "config.json", *cluster, "--global-batch", 8, "--profile", "profile.json", "-o", "plan.json")
    assert result.exit_code == 0, result.output
    found = replan(read_plan("plan.json"), (left,), tmp_path)
    assert found.plan.num_devices == sum(found.taken) <= left
    assert found.plan.global_batch == 8
