"""Tests of faults during runs: each ends in time with a clear message, loses nothing, leaves no process."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Fallback, Plan
from steelyard.processes.failure import RankFailedError
from steelyard.processes.start import run_processes
from steelyard.profiles.record import RunRecord
from steelyard.runtime import launch as launching
from steelyard.runtime.checkpoint_folder import newest_intact
from steelyard.runtime.options import TrainOptions
from tests.processes.forking_agent import fork_ranks
from tests.processes.warm import HANG_LIMIT_S
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.test_launch import ROOT, assert_gone

pytestmark = pytest.mark.processes

NUM_STEPS = 8
CONFIG = {**CONFIGS["llama-tied"], "num_hidden_layers": 1}
Train = Callable[..., RunRecord]


def two_stages() -> Plan:
    return make_plan(CONFIG, "single", "single, single", num_devices=2, global_batch=4, num_microbatches=2)


def one_stage() -> Plan:
    return make_plan(CONFIG, "fsdp2, dp2, fsdp2", num_devices=2, global_batch=4, num_microbatches=2)


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return TrainOptions(
        steps=NUM_STEPS,
        lr=1e-2,
        warmup_steps=2,
        timeout_s=300,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=2,
        metrics=tmp_path / "metrics.jsonl",
    )


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train as `launch` does, with faults planted in the processes, those of the first launch first. However it ends,
    it does in time, and no process is left.

    However it ends, it does in time, and no process is left.
    """
    monkeypatch.chdir(ROOT)
    fork_ranks(monkeypatch)
    monkeypatch.setenv("PIDS", str(tmp_path))
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 250, 5_000).astype(np.uint16))

    def run(plan: Plan, options: TrainOptions, *faults: str, restarts: int = 0) -> RunRecord:
        left = list(faults)

        def run_faulty(_module: str, arguments: list[str], **how: Any) -> None:
            run_processes("tests.runtime.faulty_train", [left.pop(0) if left else "", *arguments], **how)

        monkeypatch.setattr(launching, "run_processes", run_faulty)
        write_plan(plan, tmp_path / "plan.json")
        started_s = time.monotonic()
        try:
            return launching.launch(tmp_path / "plan.json", tmp_path / "tokens.npy", options, restarts=restarts)
        finally:
            assert time.monotonic() - started_s < HANG_LIMIT_S
            assert_gone(tmp_path)

    return run


def newest_step(options: TrainOptions) -> str:
    """The newest whole checkpoint; none may be damaged."""
    assert options.checkpoint_dir is not None
    newest, faults = newest_intact(options.checkpoint_dir)
    assert faults == []
    assert newest is not None
    return newest.name


def losses(options: TrainOptions) -> list[tuple[int, float]]:
    assert options.metrics is not None
    lines = [json.loads(line) for line in options.metrics.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def test_a_run_that_is_killed_in_a_step_and_in_a_save_ends_with_the_losses_of_one_that_is_not(
    train: Train, options: TrainOptions, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(two_stages(), options)
    expected = losses(options)
    capfd.readouterr()
    options = replace(options, checkpoint_dir=tmp_path / "restarted", metrics=tmp_path / "restarted.jsonl")
    train(two_stages(), options, "0:kill-step:2,1:kill-save:6", restarts=2)
    assert losses(options) == expected
    assert len(expected) == NUM_STEPS
    assert newest_step(options) == f"step-{NUM_STEPS:08d}"
    printed = capfd.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("step")] == [
        "restarted (1): rank 1 was ended by SIGKILL (often: the machine ran out of memory)",
        "restarted (2): rank 1 was ended by SIGKILL (often: the machine ran out of memory)",
        f"resumed after step 4 from {tmp_path}/restarted/step-00000004",
    ]


def test_a_full_disk_is_a_clear_message_and_leaves_the_checkpoint_before_it(
    train: Train, options: TrainOptions
) -> None:
    with pytest.raises(UserError, match=r"step-00000004 could not be written to .* the disk is full") as raised:
        train(one_stage(), options, "0:full-disk:4")
    assert "space for --keep-last checkpoints plus one" in str(raised.value)
    assert newest_step(options) == "step-00000002"


def test_a_checkpoint_that_the_disk_has_changed_is_passed_over_and_the_run_goes_on_as_if_it_had_not_been(
    train: Train, options: TrainOptions, capfd: pytest.CaptureFixture[str]
) -> None:
    train(one_stage(), options)
    expected = losses(options)
    assert options.checkpoint_dir is not None
    damaged = options.checkpoint_dir / f"step-{NUM_STEPS:08d}" / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    capfd.readouterr()
    train(one_stage(), replace(options, resume="latest"))
    assert losses(options) == expected
    assert [line for line in capfd.readouterr().out.splitlines() if not line.startswith("step")] == [
        f"skipped a damaged checkpoint: {damaged}, whose content has changed since it was written",
        f"resumed after step {NUM_STEPS - 2} from {options.checkpoint_dir}/step-{NUM_STEPS - 2:08d}",
    ]


def test_a_rank_that_stands_still_is_named_after_the_time_that_the_others_wait(
    train: Train, options: TrainOptions
) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 hung: .*; rank 0 waited for it: ") as raised:
        train(one_stage(), replace(options, timeout_s=10, checkpoint_dir=None), "0:stop-step:3")
    assert [step for step, _ in losses(options)] == [1, 2]
    assert "ran out" not in str(raised.value)


def test_data_that_shrinks_is_a_clear_message_and_leaves_the_checkpoint_before_it(
    train: Train, options: TrainOptions, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="became shorter"):
        train(one_stage(), options, "0:shrink:3")
    assert newest_step(options) == "step-00000002"


def test_where_memory_runs_out_the_run_goes_on_with_the_next_fallback_and_says_so(
    train: Train, options: TrainOptions, capfd: pytest.CaptureFixture[str]
) -> None:
    smaller = two_stages()
    fallback = Fallback(num_microbatches=2, stages=smaller.stages)
    plan = one_stage().model_copy(update={"fallbacks": (fallback,)})
    record = train(plan, options, "0:memory:3")
    assert record.strategies == tuple(str(strategy) for strategy in smaller.strategies)
    assert [step.step for step in record.steps] == list(range(3, NUM_STEPS + 1))
    said = capfd.readouterr().err
    assert "memory ran out" in said
    assert "continuing with the next fallback of the plan" in said
