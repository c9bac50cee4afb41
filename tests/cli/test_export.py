"""Tests of ``steelyard export``: its files, its output and its refusals."""

import json
import re
from pathlib import Path

import pytest

from steelyard.engines import TARGETS
from steelyard.engines.pytorch import SCRIPT
from steelyard.errors import UserError
from steelyard.plan.file import write_plan
from tests.cli.conftest import Run, user_error
from tests.engines.examples import mixed, read, uniform
from tests.engines.examples import run as layers
from tests.plan.examples import COST_SOURCE

LAST = 9
"""The head of llama-demo, which is small enough to trace in a test."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of one strategy, and one that mixes two."""
    path = tmp_path_factory.mktemp("plans")
    write_plan(uniform("fsdp8", devices=8, model="llama3.1-8b"), path / "uniform.json")
    content = {
        "version": 1,
        "model": {"name": "llama-demo"},
        "cluster": "1x2xa100-80gb",
        "seq_len": 256,
        "global_batch": 16,
        "num_microbatches": 1,
        "precision": "bf16",
        "stages": [{"ranks": [0, 1], "runs": [layers(0, LAST - 1, "dp2"), layers(LAST, LAST, "fsdp2")]}],
    }
    write_plan(read(content), path / "mixed.json")
    write_plan(mixed(), path / "pipeline.json")
    return path


def test_list_names_every_target(run: Run) -> None:
    shown = run("export", "--to", "list").output
    assert [name for name in TARGETS if not re.search(rf"^{name} ", shown, flags=re.MULTILINE)] == []


def test_the_list_has_a_form_for_programs(run: Run) -> None:
    entries = json.loads(run("export", "--to", "list", "--json").output)
    assert [entry["target"] for entry in entries] == list(TARGETS)
    assert all(entry["precisions"] for entry in entries)
    (script,) = (entry for entry in entries if entry["target"] == "pytorch")
    assert (script["precisions"], script["levers"]) == (["bf16", "fp32"], [])


def test_without_an_output_the_file_is_printed(run: Run, folder: Path) -> None:
    result = run("export", folder / "uniform.json", "--to", "deepspeed")
    assert json.loads(result.stdout)["zero_optimization"]["stage"] == 3


def test_a_plan_of_an_engine_is_fitted_into_the_memory_and_onto_the_devices_given(run: Run, tmp_path: Path) -> None:
    path, asked = tmp_path / "plan.json", ("--global-batch", 64, "--seq-len", 512, "--engine", "deepspeed")
    run("plan", "llama-demo", "--cluster", "1x2xa100-80gb", *asked, "-o", path)
    exports = ("export", path, "--to", "deepspeed", "--json")
    itself, less = (json.loads(run(*exports, *more).stdout) for more in ((), ("--memory", "2GiB")))
    assert max(sum(each["memory_bytes"].values()) for each in less["plan"]["prediction"]["stages"]) <= 2 * 2**30
    assert less["step_time_s"] > itself["step_time_s"]
    error = user_error(run("export", path, "--to", "deepspeed", "--cluster", "1x4xa100-80gb"))
    assert (error.field, error.found) == ("number of devices", "2 in the plan")


@pytest.mark.parametrize("to", ["torchtitan", "automodel", "ms-swift"])
def test_a_target_without_the_precision_of_a_plan_refuses_it(run: Run, to: str, tmp_path: Path) -> None:
    write_plan(uniform("fsdp8", devices=8, model="llama3.1-8b", precision="fp16"), tmp_path / "plan.json")
    error = user_error(run("export", tmp_path / "plan.json", "--to", to))
    assert error.found.startswith(f"{to}: fp16 with the engine")


def test_a_plan_within_the_means_is_the_plan_itself(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder / "uniform.json", "--to", "accelerate", "-o", tmp_path / "a.yaml")
    assert "uniform fsdp8 in accelerate, the plan itself" in result.output
    assert (tmp_path / "a.yaml").read_text().startswith("# For accelerate")


@pytest.mark.slow
def test_a_mix_becomes_one_strategy_with_its_price(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder / "mixed.json", "--to", "transformers", "-o", tmp_path)
    headline = result.output.splitlines()[0]
    assert re.fullmatch(
        r"uniform \S+.* in transformers: [\d.]+ \ws per step, "
        r"(as fast as|[\d.]+% (slower|faster) than) the plan in steelyard's runtime",
        headline,
    )
    content = (tmp_path / "steelyard_trainer.py").read_text()
    assert headline in content
    assert "strategies that differ between layers (dp2 ×9, fsdp2 ×1)" in content


def test_a_plan_of_an_engine_is_compared_with_that_engine(run: Run, tmp_path: Path) -> None:
    job = ("--cluster", "1x2xa100-80gb", "--global-batch", 8, "--seq-len", 256)
    run("plan", "llama-demo", *job, "--engine", "accelerate", "-o", tmp_path / "plan.json")
    result = run("export", tmp_path / "plan.json", "--to", "deepspeed", "-o", tmp_path)
    assert re.search(r"(as fast as|(slower|faster) than) the plan in accelerate$", result.output.splitlines()[0])


@pytest.mark.slow
def test_options_of_an_engine_go_to_software_that_drives_it(run: Run, tmp_path: Path) -> None:
    engine = "megatron+bf16-moments+cuda-graphs"
    job = ("--cluster", "1x4xa100-80gb", "--global-batch", 8, "--seq-len", 1024, "--engine", engine)
    planned = run("plan", "llama3.2-1b", *job, "-o", tmp_path / "plan.json")
    assert planned.output.rstrip().endswith("--to megatron")
    result = run("export", tmp_path / "plan.json", "--to", "ms-swift", "-o", tmp_path / "swift")
    assert "not exported: +cuda-graphs: ms-swift has no such option" in result.output
    assert "--exp_avg_dtype bf16" in (tmp_path / "swift" / "swift.sh").read_text()
    result = run("export", tmp_path / "plan.json", "--to", "megatron", "-o", tmp_path / "megatron.sh")
    assert "the plan itself" in result.output
    assert "cuda-graphs" not in result.output


def test_the_result_has_a_form_for_programs(run: Run, folder: Path) -> None:
    content = json.loads(run("export", folder / "mixed.json", "--to", "deepspeed", "--json").output)
    assert content["step_time_s"] > 0
    assert len({part["parallel"] for stage in content["plan"]["stages"] for part in stage["runs"]}) == 1
    assert json.loads(content["files"]["ds_config.json"])["train_batch_size"] == 16


def test_a_folder_gets_every_file(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder / "uniform.json", "--to", "torchtitan", "-o", tmp_path / "titan")
    assert result.exit_code == 0, result.output
    assert {path.suffix for path in (tmp_path / "titan").iterdir()} == {".py", ".toml"}


@pytest.mark.parametrize("name", ["titan-0.3", "llama3.1-8b", "plans.d"])
def test_the_name_of_a_folder_may_have_a_dot(run: Run, folder: Path, tmp_path: Path, name: str) -> None:
    if name == "plans.d":
        (tmp_path / name).mkdir()
    result = run("export", folder / "uniform.json", "--to", "torchtitan", "-o", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert {path.suffix for path in (tmp_path / name).iterdir()} == {".py", ".toml"}


def test_a_file_name_chooses_among_the_files(run: Run, folder: Path, tmp_path: Path) -> None:
    run("export", folder / "uniform.json", "--to", "torchtitan", "-o", tmp_path / "plan.toml")
    assert "[parallelism]" in (tmp_path / "plan.toml").read_text()


def test_a_script_and_what_it_reads_go_together_under_the_given_name(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder / "pipeline.json", "--to", "pytorch", "-o", tmp_path / "my script.py")
    assert {path.name for path in tmp_path.iterdir()} == {"my script.py", "my script.json"}
    assert "my script.json" in result.output
    assert "keep them in one folder" in result.output


def test_a_folder_gets_a_script_and_what_it_reads_under_one_name(run: Run, folder: Path, tmp_path: Path) -> None:
    run("export", folder / "pipeline.json", "--to", "pytorch", "-o", tmp_path / "script")
    assert {path.name for path in (tmp_path / "script").iterdir()} == {"train_tiny.py", "train_tiny.json"}


def test_a_script_printed_alone_is_said_to_lack_what_it_reads(run: Run, folder: Path) -> None:
    result = run("export", folder / "pipeline.json", "--to", "pytorch")
    assert result.stdout == SCRIPT.read_text()
    assert "it reads train_tiny.json" in result.stderr


def test_an_export_never_writes_over_its_plan(run: Run, folder: Path, tmp_path: Path) -> None:
    content = (folder / "pipeline.json").read_text()
    (tmp_path / "plan.json").write_text(content)
    error = user_error(run("export", tmp_path / "plan.json", "--to", "pytorch", "-o", tmp_path / "plan.py"))
    assert (error.field, "would overwrite the plan" in error.found) == ("--output", True)
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json"}
    assert (tmp_path / "plan.json").read_text() == content


def test_another_file_name_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    error = user_error(run("export", folder / "uniform.json", "--to", "torchtitan", "-o", tmp_path / "plan.yaml"))
    assert (error.field, ".py or .toml" in error.expected) == ("--output", True)
    assert f"mkdir {tmp_path / 'plan.yaml'}" in error.hint


def test_an_unknown_target_names_the_nearest(run: Run, folder: Path) -> None:
    error = user_error(run("export", folder / "uniform.json", "--to", "deepsped"))
    assert error.hint == "did you mean deepspeed?"


def test_a_plan_is_needed(run: Run) -> None:
    assert user_error(run("export", "--to", "deepspeed")).field == "PLAN"


def test_a_mix_from_a_measured_profile_needs_that_profile(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "mixed.json").read_text())
    plan["prediction"] = {
        "step_time_s": 1.0,
        "tokens_per_s_per_device": 1.0,
        "budget_bytes": 10**9,
        "stages": [{"time_s": {"compute": 1.0}, "memory_bytes": {"parameters": 1}}],
        "certificate": {"status": "priced"},
        "lower_bound_s": 0.0,
        "profile": COST_SOURCE,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert user_error(run("export", tmp_path / "plan.json", "--to", "deepspeed")).field == "--profile"
    assert run("export", tmp_path / "plan.json", "--to", "pytorch").exit_code == 0


def test_nothing_that_fits_is_exit_code_1(run: Run, folder: Path) -> None:
    result = run("export", folder / "mixed.json", "--to", "deepspeed", "--memory", "1100MiB")
    assert isinstance(result.exception, UserError)
    assert result.exception.exit_code == 1


def test_an_unknown_cluster_is_named_by_what_needs_it(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "uniform.json").read_text()) | {"cluster": "basement"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    error = user_error(run("export", tmp_path / "plan.json", "--to", "slurm"))
    assert "'basement', which is unknown here" in error.found
    assert run("export", tmp_path / "plan.json", "--to", "slurm", "--cluster", "1x8xh100-80gb").exit_code == 0


@pytest.mark.parametrize("target", ["pytorch", "torchrun", "slurm"])
def test_what_runs_any_plan_needs_no_search(run: Run, folder: Path, target: str) -> None:
    result = run("export", folder / "pipeline.json", "--to", target)
    assert result.exit_code == 0, result.output
    assert f"the plan itself in {target}" in result.stderr


@pytest.mark.slow
def test_what_the_user_asked_of_a_plan_is_kept_by_an_export(run: Run, tmp_path: Path) -> None:
    job = ("llama-demo", "--cluster", "1x4xa100-80gb", "--seq-len", 256, "--global-batch", 16)
    run("plan", *job, "--stages", 2, "--pin", "blocks 0-3: tp=2", "-o", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["asked"] == {"pins": ["blocks 0-3: tp=2"], "num_stages": 2}
    result = run("export", tmp_path / "plan.json", "--to", "megatron", "-o", tmp_path / "megatron.sh")
    assert "kept as asked: --pin 'blocks 0-3: tp=2', --stages 2" in result.output
    flags = (tmp_path / "megatron.sh").read_text()
    assert "--tensor-model-parallel-size 2\n" in flags
    assert "--pipeline-model-parallel-size 2\n" in flags
    assert "#   kept as asked: --pin 'blocks 0-3: tp=2', --stages 2\n" in flags


def test_what_is_given_up_is_said_first(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "mixed.json").read_text()) | {"asked": {"num_stages": 2, "num_microbatches": 2}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = run("export", tmp_path / "plan.json", "--to", "transformers", "-o", tmp_path / "out.py")
    why = "nothing that transformers can run of this model, batch and number of devices has it"
    assert result.output.splitlines()[0] == f"given up: --stages 2: {why}"
    assert f"# Given up:\n#   --stages 2: {why}\n" in (tmp_path / "out.py").read_text()
    content = json.loads(run("export", tmp_path / "plan.json", "--to", "transformers", "--json").output)
    assert (content["given_up"], content["kept"]) == ([f"--stages 2: {why}"], ["--microbatches 2"])


def test_what_runs_any_plan_keeps_all_that_was_asked(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "mixed.json").read_text()) | {"asked": {"num_microbatches": 1}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = run("export", tmp_path / "plan.json", "--to", "torchrun")
    assert "kept as asked: --microbatches 1" in result.stdout
