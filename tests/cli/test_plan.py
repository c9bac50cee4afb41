"""Tests of ``steelyard plan`` and ``steelyard explain`` from the command line."""

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.file import dump_json, read_plan
from steelyard.plan.prediction import Certificate
from steelyard.planning.complete import find_plan
from steelyard.planning.price import peak_bytes
from tests.cli.conftest import Run, user_error
from tests.cost.examples import chain, measured_profile
from tests.modules.split_configs import split_config

JOB = ("--cluster", "1x4xa100-80gb", "--seq-len", 2048, "--global-batch", 16)
SMALL = ("llama3.2-1b", *JOB)
USED_BY_PLAN = {
    *(
        "choose",
        "complete",
        "job",
        "pass_order",
        "pins",
        "price",
        "problem",
        "request",
        "simple",
        "sizes",
        "uniform",
        "variants",
    ),
    "why_not",
}
"""Modules of the planner that a plan on one pool needs: each that it does not need takes a part of its second."""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output of planning the job, and the path of the plan, in a folder whose long name must be kept."""
    folder = tmp_path_factory.mktemp("plan") / ("a-[b]-name-" + "long-" * 20)
    folder.mkdir()
    arguments = ["plan", *SMALL, "-v", "-o", folder / "plan.json"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output, folder / "plan.json"


@pytest.mark.slow
def test_plan_is_written_and_reads_back(planned: tuple[str, Path]) -> None:
    plan = read_plan(planned[1])
    assert plan.prediction is not None
    assert all(stage.total_bytes <= plan.prediction.budget_bytes for stage in plan.prediction.stages)


@pytest.mark.slow
def test_a_written_plan_carries_plans_of_less_memory(run: Run, tmp_path: Path) -> None:
    run("plan", *SMALL, "-o", tmp_path / "plan.json", "--fallbacks", 1)
    plan = read_plan(tmp_path / "plan.json")
    assert len(plan.fallbacks) == 1
    assert peak_bytes(plan.fallback_plan(0)) < peak_bytes(plan)


@pytest.mark.slow
def test_plan_shows_time_tokens_mfu_and_memory_against_the_budget(planned: tuple[str, Path]) -> None:
    output = " ".join(planned[0].split())
    figures = "per step", "tokens/s", "TFLOP/s per device", "MFU", "per rank", "headroom"
    for expected in (*figures, "optimal under the cost model"):
        assert expected in output


@pytest.mark.slow
def test_without_a_global_batch_every_device_has_a_sample_and_it_is_said(run: Run, tmp_path: Path) -> None:
    result = run("plan", "llama3.2-1b", *JOB[:4], "-o", tmp_path / "plan.json")
    assert "global batch 4: one sample per device (change it with --global-batch)" in result.output
    assert read_plan(tmp_path / "plan.json").global_batch == 4


def test_a_named_global_batch_is_not_said_again(planned: tuple[str, Path]) -> None:
    assert "global batch " not in planned[0]


@pytest.mark.slow
def test_days_and_money_for_tokens_are_said_written_and_scaled_when_priced_again(run: Run, tmp_path: Path) -> None:
    result = run("plan", *SMALL, "--tokens", "1T", "--price", 2.5, "-o", tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    assert plan.prediction is not None
    assert plan.training is not None
    seconds = 1e12 / (plan.prediction.tokens_per_s_per_device * 4)
    assert plan.training.days == pytest.approx(seconds / 86400, rel=1e-3)
    assert plan.training.cost == pytest.approx(seconds / 3600 * 4 * 2.5, rel=1e-3)
    assert str(plan.training) in " ".join(result.output.split())
    elsewhere = run("explain", tmp_path / "plan.json", "--cluster", "1x4xh100-80gb", "--json")
    again = json.loads(elsewhere.output)["plan"]
    factor = again["prediction"]["step_time_s"] / plan.prediction.step_time_s
    assert again["training"]["days"] == pytest.approx(plan.training.days * factor)


@pytest.mark.slow
def test_the_file_has_the_micro_batch_of_a_rank_and_the_model_flop_of_a_second(planned: tuple[str, Path]) -> None:
    plan = read_plan(planned[1])
    found = plan.prediction
    assert found is not None
    assert found.model_flop_per_s is not None
    assert found.rank_samples == plan.rank_samples
    assert all(samples * plan.num_microbatches <= plan.global_batch for samples in found.rank_samples)
    assert found.mfu == pytest.approx(found.model_flop_per_s / plan.machines().device.peak(plan.precision))


def test_what_is_left_out_of_the_search_stands_beside_what_it_proved(planned: tuple[str, Path]) -> None:
    output, path = planned
    found = read_plan(path).prediction
    assert found is not None
    hybrid = (
        "strategies such as dp2-fsdp2: hybrid sharding is searched with groups of one node, or of 4, 16, 64 … of them"
    )
    assert found.not_searched[0] == hybrid
    assert "interleaved-1f1b in more than 20 chunks a stage" in found.not_searched
    assert output.count("not searched: ") == len(found.not_searched)


def test_a_decision_is_not_said_to_be_left_out(run: Run) -> None:
    result = run("plan", *SMALL, "--stages", 1, "--max-tp", 1, "--json")
    found = json.loads(result.output)["prediction"]["not_searched"]
    assert not any("interleaved" in text or "gpipe" in text or "tp" in text for text in found)


def test_json_is_the_plan_file(run: Run, tmp_path: Path) -> None:
    result = run("plan", *SMALL, "--json", "-o", tmp_path / "plan.json")
    assert json.loads(result.output) == json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "mistral-7b", "pythia-1.4b"])
def test_any_known_family_is_planned_from_its_config_file(run: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text((resources.files("steelyard.model") / "configs" / f"{name}.json").read_text())
    result = run("plan", path, "--cluster", "1x2xa100-80gb", "--seq-len", 2048, "--global-batch", 8)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_whole_process_plans_without_gpu_and_without_torch_once_traced(run: Run, tmp_path: Path) -> None:
    run("plan", *SMALL)
    script = (
        "import sys\nfrom steelyard.cli.app import app\n"
        f"app({['plan', *map(str, SMALL)]!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_nothing_fits_exits_1_and_names_the_miss_in_bytes(run: Run) -> None:
    job = ("llama-demo", "--cluster", "1x1xa100-80gb", "--seq-len", 64, "--global-batch", 4)
    result = run("plan", *job, "--memory", "64MiB")
    assert result.exit_code == 1
    assert "nearest miss" in result.stderr
    assert "bytes) more" in result.stderr


@pytest.mark.slow
def test_a_plan_of_a_cluster_file_needs_the_file_no_more(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("{version: 1, num_nodes: 2, devices_per_node: 2, device: a100-80gb, inter_link: ethernet-25}")
    job = ("llama-demo", "--cluster", file, "--seq-len", 512, "--global-batch", 8)
    planned = run("plan", *job, "-v", "-o", tmp_path / "plan.json")
    file.unlink()
    explained = run("explain", tmp_path / "plan.json")
    run("report", tmp_path / "plan.json", "-o", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    for text in (planned.output, explained.output, page):
        assert "ethernet-25 (1 for 2 devices)" in text
        assert "1.56" in text
        assert "priced as given" not in text
    assert "Best plan under a restriction" in explained.output
    assert "Time against memory" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "network", "slower"), [("plan", "ethernet-25", True), ("explain", "2xinfiniband-hdr", False)]
)
def test_a_network_may_be_named_beside_the_cluster(
    run: Run, tmp_path: Path, command: str, network: str, slower: bool
) -> None:
    job = ("llama3.2-1b", "--cluster", "2x2xa100-80gb", "--seq-len", 2048, "--global-batch", 8)
    run("plan", *job, "-o", tmp_path / "plan.json")
    usual = json.loads((tmp_path / "plan.json").read_text())
    of = job if command == "plan" else (tmp_path / "plan.json",)
    found = json.loads(run(command, *of, "--network", network, "--json").output)
    found_s = found.get("plan", found)["prediction"]["step_time_s"]
    assert (found_s > 1.05 * usual["prediction"]["step_time_s"]) == slower


@pytest.mark.parametrize(
    ("arguments", "field", "suggestion"),
    [
        (("lama3-8b", *JOB), "model", "llama3-8b"),
        (("llama3-8b", "--cluster", "1x8xa10080", "--seq-len", 8, "--global-batch", 8), "device", "a100"),
        ((*SMALL, "--network", "ethernet-26"), "network", "ethernet-25"),
        (("llama3-8b", "--cluster", "8a100", "--seq-len", 8, "--global-batch", 8), "cluster", "1x8x"),
        ((*SMALL, "--memory", "lots"), "memory", "20GiB"),
        ((*SMALL, "--precision", "fp8"), "--precision", "bf16"),
        ((*SMALL, "--profile", "no-such.json"), "profile", "path"),
        ((*SMALL, "--stages", 3), "--stages", "1, 2, 4"),
        ((*SMALL, "--microbatches", 5), "--microbatches", "1, 2, 4"),
        ((*SMALL, "--tokens", "many"), "--tokens", "15T"),
        ((*SMALL, "--price", 2.5), "--price", "--tokens 15T --price 2.5"),
    ],
)
def test_a_mistake_is_one_clear_error(run: Run, arguments: tuple[object, ...], field: str, suggestion: str) -> None:
    error = user_error(run("plan", *arguments))
    assert error.exit_code == 2
    assert field in error.field
    assert suggestion in str(error)


def test_all_that_is_misspelt_is_said_at_once_and_before_a_length_that_is_missing(run: Run) -> None:
    named = ("lama3-8b", "--cluster", "1x8xa10080", "--memory", "lots", "--profile", "no-such.json")
    error = user_error(run("plan", *named))
    assert [line for line in str(error).splitlines() if "found" in line] == [
        "device: found 'a10080'",
        "error: model: found 'lama3-8b'",
        "error: --memory: found 'lots'",
        "error: profile: found no file no-such.json",
    ]


@pytest.mark.parametrize(("model", "length"), [("llama3-8b", 4096), ("bert-base", 512)])
@pytest.mark.parametrize("command", ["plan", "frontier"])
def test_a_missing_length_is_an_error_with_one_that_the_model_reads(
    run: Run, command: str, model: str, length: int
) -> None:
    error = user_error(run(command, model, "--cluster", "1x8xa100-80gb", "--global-batch", 8))
    assert (error.field, error.hint) == ("--seq-len", f"give for example --seq-len {length}")


@pytest.mark.slow
def test_a_model_of_images_of_one_size_needs_no_length(run: Run, tmp_path: Path) -> None:
    asked = ("vit-base", "--cluster", "1x8xa100-80gb", "--global-batch", 64)
    result = run("plan", *asked, "-o", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    assert read_plan(tmp_path / "plan.json").seq_len == 197
    assert find_plan("vit-base", "1x8xa100-80gb", global_batch=64).seq_len == 197


@pytest.mark.slow
def test_a_mistake_is_printed_without_a_traceback() -> None:
    arguments = [sys.executable, "-c", "from steelyard.cli import main; main()", "plan", "lama3-8b", *map(str, JOB)]
    finished = subprocess.run(arguments, capture_output=True, text=True)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: model: found 'lama3-8b'")
    assert "Traceback" not in finished.stderr


def test_an_unknown_option_exits_2_and_names_the_nearest(run: Run) -> None:
    result = run("plan", "llama3-8b", "--clster", "1x8xa100-80gb")
    assert result.exit_code == 2
    assert "--cluster" in result.output


@pytest.mark.slow
def test_explain_shows_the_plan_that_was_found(run: Run, planned: tuple[str, Path]) -> None:
    result = run("explain", planned[1])
    assert result.exit_code == 0, result.output
    assert "Best plan under a restriction" in result.output


@pytest.mark.slow
def test_explain_prices_a_plan_written_by_hand(run: Run, tmp_path: Path) -> None:
    by_hand = {
        "version": 1,
        "model": {"name": "llama3.2-1b"},
        "cluster": "1x4xa100-80gb",
        "seq_len": 2048,
        "global_batch": 16,
        "num_microbatches": 4,
        "precision": "bf16",
        "stages": [{"ranks": [0, 3], "runs": [{"layers": [0, 17], "parallel": "fsdp2-tp2", "sp": True}]}],
    }
    (tmp_path / "hand.json").write_text(json.dumps(by_hand))
    result = run("explain", tmp_path / "hand.json", "-o", tmp_path / "priced.json")
    assert result.exit_code == 0, result.output
    prediction = read_plan(tmp_path / "priced.json").prediction
    assert prediction is not None
    assert prediction.certificate == Certificate(status="priced")


@pytest.mark.slow
def test_a_searched_plan_is_no_slower_than_one_by_hand_for_the_same_job(
    run: Run, planned: tuple[str, Path], tmp_path: Path
) -> None:
    best = read_plan(planned[1])
    by_hand = best.model_dump(mode="json", exclude_none=True, exclude={"prediction"})
    by_hand |= {"num_microbatches": 2, "schedule": "1f1b"}
    by_hand["stages"] = [{"ranks": [0, 3], "runs": [{"layers": [0, 17], "parallel": "fsdp4"}]}]
    (tmp_path / "hand.json").write_text(json.dumps(by_hand))
    run("explain", tmp_path / "hand.json", "-o", tmp_path / "priced.json")
    priced = read_plan(tmp_path / "priced.json").prediction
    assert priced is not None
    assert best.prediction is not None
    assert best.prediction.step_time_s <= priced.step_time_s


@pytest.mark.slow
def test_models_and_devices_are_listed_with_sources(run: Run) -> None:
    for name in ("models", "devices", "links"):
        known = json.loads(run(name, "--json").output)
        assert known
        assert all(each["source"] for each in known)
        told = {row.split()[1] for row in run(name).output.splitlines() if row.startswith("│ ")}
        assert {each["name"] for each in known} <= told  # whole, though the console is narrow


@pytest.mark.slow
def test_a_saved_problem_is_solved_to_the_same_step_time_without_model_and_torch(run: Run, tmp_path: Path) -> None:
    run("plan", *SMALL, "--save-problem", tmp_path / "problem.json", "-o", tmp_path / "plan.json")
    solved = json.loads(run("solve", tmp_path / "problem.json", "--json").output)
    prediction = read_plan(tmp_path / "plan.json").prediction
    assert prediction is not None
    assert solved["status"] == "optimal"
    assert solved["step_s"] == pytest.approx(prediction.lower_bound_s)


@pytest.mark.slow
def test_an_unsolvable_problem_exits_1_with_the_missing_bytes(run: Run, tmp_path: Path) -> None:
    run("plan", *SMALL, "--save-problem", tmp_path / "problem.json")
    result = run("solve", tmp_path / "problem.json", "--memory", "2GiB")
    assert result.exit_code == 1
    assert "bytes) short" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["bmw", "memory-balanced", "even"])
def test_exact_is_no_slower_than_another_partition(run: Run, tmp_path: Path, partition: str) -> None:
    times = {}
    for name in ("exact", partition):
        run("plan", *SMALL, "--stages", 4, "--partition", name, "-o", tmp_path / f"{name}.json")
        prediction = read_plan(tmp_path / f"{name}.json").prediction
        assert prediction is not None
        times[name] = prediction.step_time_s
    assert times["exact"] <= times[partition] * 1.02  # the search ranks by the closed form, the report by the simulator


@pytest.mark.slow
def test_the_next_commands_are_printed(run: Run, tmp_path: Path) -> None:
    output = run("plan", *SMALL, "-o", tmp_path / "p.json").output.replace("\n", "")
    for command in ("steelyard explain", "steelyard report", "steelyard train"):
        assert f"{command} {tmp_path / 'p.json'}" in output
    assert "-o plan.json" in run("plan", *SMALL).output


def test_the_next_commands_keep_a_path_as_it_is(planned: tuple[str, Path]) -> None:
    output, path = planned
    assert f"  steelyard explain '{path}'\n" in output


def test_exit_codes_are_documented_where_help_is(run: Run) -> None:
    assert "Exit codes: 0 done; 1 nothing fits" in run("--help").output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "named", "reason"),
    [
        (["layers 0-3: tp=3"], "'layers 0-3: tp=3'", "tp 3 does not divide the"),
        (["tp=4", "blocks 0-3: tp=2"], "'tp=4', 'blocks 0-3: tp=2'", "leave one out"),
        (["blocks 0-1: fsdp4", "embedding: remat=selective"], "'embedding: remat=selective'", "embedding"),
    ],
)
def test_pins_that_nothing_meets_are_an_error_that_names_them(
    run: Run, pins: list[str], named: str, reason: str
) -> None:
    error = user_error(run("plan", *SMALL, *(word for pin in pins for word in ("--pin", pin))))
    assert error.field == "--pin"
    assert error.found == named
    assert reason in f"{error.expected}; {error.hint}"


def test_a_short_option_that_nothing_meets_is_named_as_it_was_written(run: Run) -> None:
    error = user_error(run("plan", *SMALL, "--tp", 3))
    assert (error.field, error.found) == ("--tp", "3")
    assert "tp 3 does not divide the" in error.expected


@pytest.mark.parametrize("beside", [("--global-batch", "max"), ("--objective", "devices"), ("--profile", "p.json")])
def test_the_longest_sequences_are_found_with_nothing_else_free(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(dump_json(measured_profile(chain())))
    error = user_error(run("plan", *SMALL, "--seq-len", "max", *beside))
    assert error.exit_code == 2
    assert f"max with {beside[0]}" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "recorded", "patches"),
    [pytest.param("16", 16, "4 × 4", marks=pytest.mark.nightly), ("16x24", [16, 24], "4 × 6")],
)
def test_a_plan_has_the_size_of_the_images_and_is_priced_again(
    run: Run, tmp_path: Path, size: str, recorded: object, patches: str
) -> None:
    config = split_config("qwen2_vl")
    config["vision_config"] = {key: each for key, each in config["vision_config"].items() if key != "image_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "plan.json"
    job = ("--cluster", "1x1xa100-80gb", "--seq-len", 16, "--global-batch", 4)
    result = run("plan", tmp_path, *job, "--image-size", size, "-o", path)
    assert result.exit_code == 0, result.output
    assert f"({patches} patches); 16 tokens" in " ".join(result.output.split())
    assert json.loads(path.read_text())["model"]["config"]["vision_config"]["image_size"] == recorded
    assert run("explain", path).exit_code == 0
    error = user_error(run("plan", tmp_path, *job))
    assert (error.field, error.found) == ("image_size", "none for qwen2_vl, which reads images of any size")


@pytest.mark.parametrize("name", ["advise", "explore", "frontier", "price"])
def test_other_commands_take_a_size_of_images_too(run: Run, tmp_path: Path, name: str) -> None:
    job = ("--cluster", "1x1xa100-80gb", "--global-batch", 1, "--seq-len", 128, "--image-size", "448x672")
    page = ("-o", tmp_path / "page.html") if name == "explore" else ()
    assert user_error(run(name, "llama-demo", *job, *page)).found == "448x672 for llama"


@pytest.mark.parametrize("size", ["0", "-28", "28x", "28x28x28", "28.0", "99999"])
def test_a_size_of_images_is_one_or_two_numbers(run: Run, size: str) -> None:
    job = ("--cluster", "1x2xa100-80gb", "--seq-len", 16, f"--image-size={size}")
    assert user_error(run("plan", "llama3-8b", *job)).field == "--image-size"


@pytest.mark.slow
def test_planning_imports_nothing_that_only_other_commands_and_options_need(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from steelyard.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, sep='\\n', file=sys.stderr)\n"
    )
    words = [sys.executable, "-c", script, "plan", *map(str, SMALL), "-o", str(tmp_path / "plan.json")]
    process = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = set(process.stderr.split())
    planning = {name.removeprefix("steelyard.planning.") for name in loaded if name.startswith("steelyard.planning.")}
    assert planning <= USED_BY_PLAN
    others = ("export", "processes.start", "profiles.record", "search.problem", "search.reasons", "search.tradeoff")
    assert loaded.isdisjoint({"torch", *(f"steelyard.{name}" for name in others)})


@pytest.mark.parametrize(
    ("precision", "words"),
    [("fp4", "nvfp4"), ("bf61", "did you mean bf16")],
)
def test_a_precision_that_is_not_run_says_why_and_what_to_take(run: Run, precision: str, words: str) -> None:
    error = user_error(run("plan", *SMALL, "--precision", precision))
    assert (error.field, error.expected) == ("--precision", "one of bf16, fp16, fp32, fp8, fp8-block, mxfp8, nvfp4")
    assert words in error.hint


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "instead"), [("native", "fp16"), ("megatron", "fp16"), ("automodel", "fp32")])
def test_bf16_on_a_v100_says_which_precision_plans_for_the_engine(run: Run, engine: str, instead: str) -> None:
    asked = ("plan", SMALL[0], "--cluster", "1x4xv100-32gb", *JOB[2:], "--engine", engine)
    error = user_error(run(*asked))
    assert error.hint == f"plan with --precision {instead}"
    assert run(*asked, "--precision", instead).exit_code == 0


@pytest.mark.parametrize(("float8", "is_exported"), [("tensorwise", False), ("rowwise", True)])
def test_a_plan_that_its_engine_cannot_read_says_so(run: Run, tmp_path: Path, float8: str, is_exported: bool) -> None:
    job = ("llama3.2-1b", "--cluster", "1x1xh100-80gb", *JOB[2:])
    asked = (*job, "--engine", "torchtitan", "--float8", float8)
    result = run("plan", *asked, "-o", tmp_path / "plan.json")
    assert ("export is not possible: torchtitan for a plan" in result.output) != is_exported
    assert ("--to torchtitan" in result.stdout) == is_exported


def test_an_engine_without_fp16_names_one_that_has_it(run: Run) -> None:
    error = user_error(run("plan", *SMALL, "--precision", "fp16", "--engine", "torchtitan"))
    assert (error.found, error.hint) == (
        "fp16 with the engine torchtitan",
        "plan for an engine that computes in it, as in --engine native",
    )
