"""Tests of ``steelyard price``, and of ``--engine`` of the other commands."""

import json
import re
from pathlib import Path

import pytest

from steelyard.plan.file import read_plan
from tests.cli.conftest import Run, user_error

JOB = ("llama3-8b", "--cluster", "1x8xa100-80gb", "--seq-len", 4096, "--global-batch", 32)
SHOWS_ENGINES = True


def test_settings_are_priced_in_one_line_by_the_engine(run: Run) -> None:
    result = run("price", *JOB, "--engine", "megatron", "--tp", 2, "--remat", "full")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert line.startswith("megatron: ")
    assert "TFLOP/s per device" in line
    assert line.endswith("fits")


def test_settings_without_a_zero_stage_have_one_that_the_engine_runs(run: Run) -> None:
    for engine, usual in (("torchtitan", 3), ("deepspeed", 1), ("megatron", 1), ("native", 1)):
        priced = run("price", *JOB, "--engine", engine, "--remat", "full")
        assert priced.exit_code == 0, priced.output
        assert priced.stdout == run("price", *JOB, "--engine", engine, "--remat", "full", "--zero", usual).stdout
    error = user_error(run("price", *JOB, "--engine", "torchtitan", "--zero", 1))
    assert (error.field, error.found) == ("--engine", "torchtitan with zero 1")


@pytest.mark.slow
def test_a_plan_of_settings_is_written_and_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    priced = json.loads(run("price", *JOB, "--engine", "torchtitan", "--zero", 3, "-o", path, "--json").stdout)
    explained = json.loads(run("explain", path, "--json").stdout)
    assert priced["engine"] == explained["plan"]["engine"] == "torchtitan"
    step_s = priced["prediction"]["step_time_s"]
    assert explained["plan"]["prediction"]["step_time_s"] == pytest.approx(step_s)


def test_a_replicated_optimizer_is_priced_and_no_plan_of_its_engine(run: Run, tmp_path: Path) -> None:
    held = []
    for zero in (0, 1):
        priced = run("price", *JOB, "--engine", "megatron", "--tp", 4, "--zero", zero, "--json")
        held.append(sum(json.loads(priced.stdout)["prediction"]["stages"][0]["memory_bytes"].values()))
    assert held[0] > held[1]
    refused = run("price", *JOB, "--engine", "megatron", "--tp", 4, "--zero", 0, "-o", tmp_path / "plan.json")
    assert user_error(refused).field == "--output"


def test_a_plan_is_written_if_a_lever_changes_the_engine_and_not_if_it_lacks_the_model(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    job = ("llama3.2-1b", "--cluster", "1x1xh100-80gb", "--seq-len", 2048, "--global-batch", 16)
    priced = run("price", *job, "--engine", "torchtitan", "--float8", "rowwise", "--remat", "full", "-o", path)
    assert priced.exit_code == 0, priced.output
    assert read_plan(path).engine == "torchtitan"
    gpt2 = ("price", "gpt2", "--cluster", "1x2xa100-80gb", "--seq-len", 512, "--global-batch", 8)
    error = user_error(run(*gpt2, "--engine", "megatron-bridge", "-o", path))
    assert (error.field, error.found) == ("--engine", "megatron-bridge for gpt2 (gpt2)")
    assert error.hint.startswith("plan for megatron, ")  # among others that have it
    assert ", or without --engine, then export --to " in error.hint
    assert user_error(run(*gpt2, "--tp", 2)).hint.startswith("give --micro-batch 2")


def test_a_price_comes_with_its_warnings_and_says_if_the_engine_lacks_the_model(run: Run) -> None:
    job = ("price", "gemma2-2b", "--cluster", "1x1xh100-80gb", "--seq-len", 512, "--global-batch", 1)
    ours = run(*job)
    assert "fits" in ours.stdout
    assert ours.stdout.count("\n") == 1
    assert "Warning: attention of gemma2 has no fused kernel" in " ".join(ours.stderr.split())
    theirs = " ".join(run(*job, "--engine", "megatron").stderr.split())  # whose attention is fused
    assert "no fused kernel" not in theirs
    assert "Only priced: found megatron for gemma2-2b (gemma2); a plan for megatron expects a model" in theirs


@pytest.mark.slow
def test_settings_in_a_file_of_an_engine_are_explained(run: Run, tmp_path: Path) -> None:
    path, plan = tmp_path / "megatron.sh", tmp_path / "plan.json"
    settings = (
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --recompute-granularity full"
    )
    sizes = "--micro-batch-size 1 --global-batch-size 32 --seq-length 4096"
    path.write_text(f"{settings} {sizes} --bf16 --lr 1e-4 --delay-wgrad-compute")
    cluster = ("--cluster", "1x8xa100-80gb")
    explained = json.loads(run("explain", "llama3-8b", "--from", path, *cluster, "-o", plan, "--json").stdout)
    priced = run("price", *JOB, "--engine", "megatron", "--tp", 2, "--remat", "full", "--json")
    step_s = json.loads(priced.stdout)["prediction"]["step_time_s"]
    assert explained["plan"]["prediction"]["step_time_s"] == pytest.approx(step_s)
    assert "Not read of megatron.sh: delay_wgrad_compute." in explained["explanation"]["notes"]
    assert any(each["name"] == "one strategy for all layers" for each in explained["explanation"]["rivals"])
    assert read_plan(plan).engine == "megatron"
    assert user_error(run("explain", "llama3-8b", "--from", path)).field == "--cluster"
    assert user_error(run("explain", plan, "--seq-len", 4096)).field == "--seq-len"


def test_a_lever_that_only_the_engine_runs_is_priced_as_it_is_planned(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    job = ("llama3.1-8b", "--engine", "torchtitan", "--cluster", "1x8xb200-180gb", "--seq-len", 4096)
    options = ("--global-batch", 16, "--float8", "mxfp8", "-o", path)
    run("plan", *job, *options, "--fsdp", 8, "--zero", 3, "--remat", "none", "--micro-batch", 1)
    planned = read_plan(path)
    path.unlink()
    run("price", *job, *options)
    priced = read_plan(path)
    assert priced.stages == planned.stages
    assert priced.prediction.step_time_s == planned.prediction.step_time_s


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_settings_are_those_of_one_device_type(run: Run, engine: str) -> None:
    several = ("llama3-8b", "--cluster", "1x8xh100-80gb+1x8xa100-80gb", "--seq-len", 4096, "--global-batch", 32)
    assert user_error(run("price", *several, "--engine", engine)).found.endswith("a mixed cluster of 2 device groups")


def test_settings_that_do_not_fit_say_by_how_much(run: Run) -> None:
    result = run("price", *JOB, "--engine", "megatron", "--memory", "20GiB")
    assert "does not fit" in result.stdout


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--engine", "megatorn"), "--engine"),
        (("--precision", "fp8"), "--precision"),
        (("--engine", "megatron", "--tp", 3), "--tp, --cp and --pp"),
        (("--engine", "megatron", "--remat", "some"), "--remat"),
    ],
)
def test_a_mistake_names_its_option(run: Run, options: tuple[object, ...], field: str) -> None:
    assert user_error(run("price", *JOB, *options)).field == field


def test_settings_that_divide_unevenly_are_refused_before_the_model_is_traced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steelyard.planning.job.cached_trace", None)
    for options, field in (
        (("--micro-batch", 3), "--micro-batch"),
        (("--tp", 3), "--tp, --cp and --pp"),
        (("--ep", 2), "--ep"),
    ):
        assert user_error(run("price", *JOB, *options)).field == field


@pytest.mark.slow
def test_the_fastest_other_engines_stand_in_the_first_lines_of_a_plan(run: Run) -> None:
    shown = " ".join(run("plan", *JOB, "--top", 0, "--fallbacks", 0).stdout.partition("Engines")[2].split())
    named = re.search(r"(.*); all: --engines", shown)
    assert named is not None
    times = [float(each) for each in re.findall(r"([\d.]+) s \(", named[1])]
    assert len(times) == 3
    assert times == sorted(times)
    assert "Engines" not in run("plan", *JOB, "--engine", "megatron").stdout


@pytest.mark.slow
def test_plan_takes_an_engine_and_names_the_others(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run("plan", *JOB, "--engine", "megatron", "--engines", "-o", path)
    assert result.exit_code == 0, result.output
    assert "run by megatron" in " ".join(result.stdout.split())
    assert "  torchtitan: " in result.stdout
    assert "  native: " in result.stdout
    refused = run("train", path, "--data", "synthetic")
    assert user_error(refused).field == "engine"


@pytest.mark.slow
def test_a_plan_for_an_engine_is_written_for_it_and_for_nothing_that_starts_steelyard(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    shown = run("plan", *JOB, "--engine", "megatron", "-o", path).stdout
    assert "--to megatron" in " ".join(shown.split())
    assert "steelyard train" not in shown
    assert run("export", path, "--to", "megatron").exit_code == 0
    assert "without --engine" in user_error(run("export", path, "--to", "slurm")).hint
