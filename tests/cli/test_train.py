"""Tests of the training command: its options are those of the processes that it starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.plan.file import write_plan
from steelyard.runtime import launch as launching
from steelyard.runtime.options import TrainOptions
from tests.cli.conftest import Run, user_error
from tests.runtime.models import make_plan

OPTIONS = TrainOptions(
    steps=7,
    lr=1e-5,
    warmup_steps=0,
    weight_decay=0.0,
    max_grad_norm=2.0,
    seed=3,
    tokenizer=Path("tokenizer.json"),
    dataset=("a.jsonl:0.7", "b.jsonl:0.3"),
    betas="0.8,0.9",
    text_key="body",
    max_data_bytes=1000,
    mask_token=4,
    checkpoint_dir=Path("checkpoints"),
    checkpoint_every=5,
    keep_last=3,
    resume="auto",
    init=Path("weights"),
    export_hf=Path("out"),
    timeout_s=20.0,
    slow_share=0.5,
    slow_steps=7,
    metrics=Path("m.jsonl"),
    tensorboard=Path("events"),
    record=Path("r.json"),
)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_plan(make_plan("llama-tied", "dp2, dp2, dp2, dp2", num_devices=2), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_command_takes_what_a_process_that_torchrun_starts_takes(
    run: Run, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def launch(*arguments: Any, **options: Any) -> None:
        found.update(options, arguments=arguments)
        raise SystemExit

    monkeypatch.setattr(launching, "launch", launch)
    words = OPTIONS.arguments()
    for name in ("--enforce-memory", "--elastic", "--merge", "--no-resume", "--keep-going", "--sft"):
        place = words.index(name)
        del words[place : place + 2]
    run("train", plan, "--restarts", 2, *words)
    assert found == {
        "arguments": (plan, None, OPTIONS),
        "restarts": 2,
        "elastic": None,
        "stdout_to_stderr": False,
    }
    run("train", plan, "--data", "text.txt", "--enforce-memory")
    assert found["arguments"] == (plan, Path("text.txt"), TrainOptions(enforce_memory=True))


def test_an_optimizer_that_is_not_the_plans_is_refused_before_any_process_starts(
    run: Run, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "run_processes", lambda *_arguments, **_options: pytest.fail("a process started"))
    error = user_error(run("train", plan, "--data", "synthetic", "--optimizer", "sgd"))
    assert error.field == "--optimizer"
    assert error.found == "sgd, but the plan is for adamw"
    unknown = user_error(run("train", plan, "--data", "synthetic", "--optimizer", "lion"))
    assert "did you mean muon" in unknown.hint


def test_elastic_says_which_option_of_plan_is_missing(run: Run, plan: Path) -> None:
    content = json.loads(plan.read_text())
    content.pop("prediction", None)
    content["cluster"] = "1x2xcpu"
    content.pop("hardware", None)
    by_hand = plan.parent / "by-hand.json"
    by_hand.write_text(json.dumps(content))
    error = user_error(run("train", by_hand, "--data", "synthetic", "--elastic"))
    assert (error.field, error.hint) == (
        "--elastic: --memory",
        "plan again with --memory: `train` reads it from the plan",
    )


def test_data_is_needed(run: Run, plan: Path) -> None:
    assert user_error(run("train", plan)).field == "--data"


@pytest.mark.parametrize("words", [["--record", "missing/r.json"], ["--metrics", "."], ["--export-hf", "plan.json/w"]])
def test_a_bad_place_is_found_before_any_process_starts(
    run: Run, plan: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(plan.parent)
    monkeypatch.setattr(launching, "run_processes", lambda *_arguments, **_options: pytest.fail("a process started"))
    Path("text.txt").write_text("to be or not to be " * 1000)
    assert user_error(run("train", plan, "--data", "text.txt", *words)).field == words[0]
