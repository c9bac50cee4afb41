"""Tests of ``steelyard measure``: a file's plans run one after another, and the fastest one goes on."""

import json
from pathlib import Path
from shlex import quote

import pytest

from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Fallback, Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import with_fallbacks, with_next_best
from steelyard.planning.price import peak_bytes
from steelyard.planning.problem import make_tables
from steelyard.planning.variants import Study
from steelyard.processes.failure import RankFailedError
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord
from steelyard.runtime import launch as trying
from steelyard.runtime.options import TrainOptions
from tests.cli.conftest import Run, user_error
from tests.cost import examples
from tests.jobs import request_of
from tests.processes.forking_agent import fork_ranks
from tests.runtime.models import CONFIGS, make_plan

TINY = {**CONFIGS["llama-tied"], "tie_word_embeddings": False}


def two_stages(*, num_microbatches: int = 2) -> Plan:
    return make_plan(TINY, "single, single", "single, single", num_devices=2, num_microbatches=num_microbatches)


def contest() -> Plan:
    """A plan of one stage that keeps two of two stages."""
    others = [
        Fallback(num_microbatches=each.num_microbatches, schedule=each.schedule, stages=each.stages)
        for each in (two_stages(), two_stages(num_microbatches=4))
    ]
    plan = make_plan(TINY, "dp2, dp2, dp2, dp2", num_devices=2)
    return plan.model_copy(update={"next_best": tuple(others)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_plan(contest(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def record_of(plan: Plan, seconds: float) -> RunRecord:
    return RunRecord(
        model_name=plan.model.name,
        config_hash=plan.chain().config_hash,
        device="cpu",
        num_devices=plan.num_devices,
        strategies=tuple(map(str, plan.strategies)),
        num_warmup_steps=0,
        median_step_s=seconds,
        tokens_per_s=1.0,
        steps=(StepRecord(step=1, loss=1.0, time_s=seconds, grad_norm=1.0),),
        ranks=(RankRecord(rank=0, stage=0, peak_bytes=2**20, memory_method="made up", num_params=1),),
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Instead of training: the plan of one stage takes 3 s, that of 2 microbatches fails, the last takes 2 s."""
    ran: list[Plan] = []

    def launch(path: Path, data: Path, options: TrainOptions, *, stdout_to_stderr: bool) -> RunRecord:
        plan = read_plan(path)
        ran.append(plan)
        if plan.num_stages == 2 and plan.num_microbatches == 2:
            raise RankFailedError("rank 1 failed: out of memory\nmore", None)
        return record_of(plan, 3.0 if plan.num_stages == 1 else 2.0)

    monkeypatch.setattr(trying, "launch", launch)
    return ran


@pytest.mark.processes
def test_plans_are_run_on_processes_and_the_fastest_is_written(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    plan = contest().model_copy(update={"next_best": contest().next_best[:1]})
    write_plan(plan, path)
    result = run("measure", path, "--alternatives", "--steps", 2, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    seconds = [trial["measured_s"] for trial in found["trials"]]
    assert len(seconds) == 2
    assert found["best"] == seconds.index(min(seconds))
    best = read_plan(found["written"])
    assert best.stages == plan.contenders()[found["best"]].stages
    folder = path.with_suffix(".measured")
    for number, each in enumerate(plan.contenders()):
        record = RunRecord.model_validate_json((folder / f"record.{number}.json").read_text())
        assert record.strategies == tuple(map(str, each.strategies)), "each its own plan"
        assert len(record.steps) == 2


def test_the_fastest_goes_on_and_a_failed_run_does_not_stop_the_others(
    run: Run, path: Path, launched: list[Plan]
) -> None:
    result = run("measure", path, "--alternatives", "--json")
    assert result.exit_code == 0, result.output
    assert [plan.pipeline.num_microbatches for plan in launched][1:] == [2, 4]
    found = json.loads(result.stdout)
    assert [trial["failure"] for trial in found["trials"]] == ["", "rank 1 failed: out of memory", ""]
    assert [trial["measured_s"] for trial in found["trials"]] == [3.0, None, 2.0]
    assert found["best"] == 2
    assert read_plan(path.with_suffix(".best.json")).num_microbatches == 4


def test_the_command_to_go_on_with_names_the_fastest_plan(run: Run, path: Path, launched: list[Plan]) -> None:
    output = run("measure", path, "--alternatives").output
    assert f"  steelyard train {path.with_suffix('.best.json')} --data PATH" in output


def test_paths_with_brackets_are_printed_whole(run: Run, path: Path, launched: list[Plan], tmp_path: Path) -> None:
    folder = tmp_path / "runs [bold]"
    output = run("measure", path, "--alternatives", "--folder", folder, "-o", tmp_path / "[red].json").output
    assert f"Plans and records are in {folder}/" in output
    assert f"written to {tmp_path / '[red].json'}. Next:\n" in output
    assert f"--calibrate {quote(str(folder / 'record.2.json'))}" in output


def test_without_alternatives_the_plan_alone_is_run(run: Run, path: Path, launched: list[Plan]) -> None:
    assert run("measure", path).exit_code == 0
    assert [plan.num_stages for plan in launched] == [1]


def test_no_plan_that_is_measured_goes_on_with_another(run: Run, path: Path, launched: list[Plan]) -> None:
    run("measure", path, "--alternatives")
    assert not any(plan.fallbacks or plan.next_best for plan in launched)


def test_a_file_without_others_says_how_to_get_them(run: Run, tmp_path: Path) -> None:
    write_plan(two_stages(), tmp_path / "plan.json")
    error = user_error(run("measure", tmp_path / "plan.json", "--alternatives"))
    assert "no next best plans" in error.found
    assert "plan again" in error.hint


def test_where_every_run_fails_nothing_is_written(run: Run, tmp_path: Path, launched: list[Plan]) -> None:
    write_plan(two_stages(), tmp_path / "plan.json")
    result = run("measure", tmp_path / "plan.json")
    assert result.exit_code == 1
    assert "Every run failed" in result.output
    assert not (tmp_path / "plan.best.json").exists()


@pytest.mark.slow
def test_the_fastest_keeps_the_fallbacks_that_take_less_memory(run: Run, tmp_path: Path, launched: list[Plan]) -> None:
    job = examples.job()
    tables = make_tables(job, Decisions())
    result = with_next_best(plan_job(job, Decisions(), tables=tables), num_plans=3)
    assert result.plan is not None
    plan = with_fallbacks(result.plan, Study(request_of(job), job, tables=tables), num_fallbacks=3)
    write_plan(plan, tmp_path / "plan.json")
    run("measure", tmp_path / "plan.json", "--alternatives")
    best = read_plan(tmp_path / "plan.best.json")
    assert all(peak_bytes(best.fallback_plan(index)) < peak_bytes(best) for index in range(len(best.fallbacks)))
    assert list(best.fallbacks) == [each for each in plan.fallbacks if each in best.fallbacks]


@pytest.mark.slow
def test_plan_keeps_the_best_plans_of_configs_that_differ_and_says_how_to_measure_them(
    run: Run, tmp_path: Path
) -> None:
    job = ("--cluster", "1x8xa100-80gb", "--seq-len", 2048, "--global-batch", 32)
    output = run("plan", "llama3.2-1b", *job, "-o", tmp_path / "plan.json", "--top", 3).output
    assert "steelyard measure" in " ".join(output.split())
    plan = read_plan(tmp_path / "plan.json")
    assert len(plan.next_best) == 2
    assert len({each.pipeline for each in plan.contenders()}) == 3, "of configurations that differ"
    seconds = [each.prediction.step_time_s for each in plan.contenders() if each.prediction]
    assert seconds == sorted(seconds)


def test_another_engine_is_refused_with_what_starts_it(run: Run, tmp_path: Path) -> None:
    write_plan(two_stages(), tmp_path / "plan.json")
    error = user_error(run("measure", tmp_path / "plan.json", "--engine", "megatron"))
    assert error.field == "--engine"
    assert "own runtime" in error.expected
    assert "export" in error.hint
