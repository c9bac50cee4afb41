"""Tests of whole runs as a user starts them: their training and files, and how they end on errors."""

import json
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import InvalidDataError, UserError
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.processes.failure import RankFailedError
from steelyard.processes.start import run_processes
from steelyard.profiles.record import RunRecord
from steelyard.runtime.checkpoint_folder import newest_intact, read_info
from steelyard.runtime.launch import launch
from steelyard.runtime.options import TrainOptions
from tests.processes.forking_agent import fork_ranks
from tests.processes.warm import HANG_LIMIT_S
from tests.runtime.models import CONFIGS, make_plan

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_an_export_over_a_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_plan(small_plan(), tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"--export-hf: found .*which already exists"):
        launch(tmp_path / "plan.json", tmp_path / "no data", TrainOptions(export_hf=tmp_path))


def small_plan(num_devices: int = 2) -> Plan:
    strategies = {2: "fsdp2, dp2 remat=full, tp2+sp, fsdp2 zero2", 4: "fsdp4, dp4, tp4, dp4"}[num_devices]
    config = {**CONFIGS["llama"], "num_hidden_layers": 2}
    return make_plan(config, strategies, global_batch=16, num_microbatches=2, seq_len=64, num_devices=num_devices)


def pipeline_plan() -> Plan:
    config = {**CONFIGS["llama-tied"], "num_hidden_layers": 2}
    return make_plan(config, "single, single", "single, single remat=full", num_devices=2)


def plan_file(folder: Path, plan: Plan) -> Path:
    write_plan(plan, folder / "plan.json")
    return folder / "plan.json"


@contextmanager
def started(script: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of Python that runs a script, which is ended whatever becomes of the test."""
    with subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(folder: Path, pattern: str, count: int) -> None:
    """Wait until the folder has as many files."""
    limit_s = time.monotonic() + HANG_LIMIT_S
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < limit_s, f"fewer than {count} files {pattern}"
        time.sleep(0.1)


def assert_gone(folder: Path, *, within_s: float = 0.0) -> None:
    """All processes that left their id in the folder have ended."""
    processes = [int(path.stem) for path in folder.glob("*.pid")]
    assert processes
    limit_s = time.monotonic() + within_s
    while any(is_running(process) for process in processes) and time.monotonic() < limit_s:
        time.sleep(0.2)
    assert not [process for process in processes if is_running(process)]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_on_two_processes_learns_and_writes_its_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = small_plan()
    text = Path(sysconfig.get_paths()["stdlib"]) / "email"
    held_out = tmp_path / "held_out.txt"
    held_out.write_bytes((text.parent / "json" / "decoder.py").read_bytes()[:4096])
    options = TrainOptions(
        steps=8,
        lr=1e-2,
        warmup_steps=2,
        record=tmp_path / "record.json",
        metrics=tmp_path / "metrics.jsonl",
        eval_data=held_out,
        eval_every=3,
    )
    record = launch(plan_file(tmp_path, plan), text, options)

    losses = [step.loss for step in record.steps]
    assert losses[0] == pytest.approx(np.log(256), rel=0.05)
    assert losses[-1] < losses[0] - 0.5
    assert record.strategies == tuple(str(strategy) for strategy in plan.strategies)
    assert RunRecord.model_validate_json((tmp_path / "record.json").read_text()) == record
    assert record.allocator == ""  # a CPU has none
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank in record.ranks:
        assert 16 * rank.num_params < rank.peak_bytes < 100 * 2**20
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in metrics] == losses
    evaluated = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
    assert list(evaluated) == [3, 6, 8]
    assert evaluated[8] < evaluated[6] < evaluated[3] < np.log(256)
    printed = capfd.readouterr()
    assert len([line for line in printed.out.splitlines() if line.startswith("step ")]) == 8
    assert printed.err == ""


def test_a_diverging_run_says_so_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 1000)
    options = TrainOptions(steps=5, lr=1e6, warmup_steps=0, checkpoint_dir=tmp_path / "kept", checkpoint_every=1)
    with pytest.raises(RankFailedError, match=r"the (loss|gradient norm) is (nan|inf)") as raised:
        launch(plan_file(tmp_path, pipeline_plan()), text, replace(options, keep_last=1))
    assert raised.value.exit_code == 1
    assert raised.value.failure is not None
    assert raised.value.failure.error_type == "DivergedError"
    stopped = re.match(r"rank [01] stopped: step ([2-5]): ", str(raised.value))
    assert stopped is not None
    assert "Traceback" not in str(raised.value)
    newest, _ = newest_intact(tmp_path / "kept")
    assert newest is not None
    assert read_info(newest).step == int(stopped[1]) - 1


def test_data_that_one_rank_alone_finds_wrong_ends_the_run_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    tokens = np.zeros(16 * 64 + 1, dtype=np.uint16)
    tokens[1::64] = 300
    tokens[1] = 0
    tokens[64 * 15 + 1] = 0
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(UserError, match="token id 300") as raised:
        launch(plan_file(tmp_path, small_plan()), tmp_path / "tokens.npy", TrainOptions(steps=2))
    assert raised.value.exit_code == 2


def test_missing_data_is_found_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match="nothing at"):
        launch(plan_file(tmp_path, small_plan()), tmp_path / "missing", TrainOptions(steps=1))
    with pytest.raises(InvalidDataError, match="nothing at"):
        launch(plan_file(tmp_path, small_plan()), "synthetic", TrainOptions(steps=1, eval_data=tmp_path / "missing"))


def test_a_wrong_world_size_is_one_message_and_exit_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    arguments = [str(plan_file(tmp_path, small_plan(4))), "--data", str(ROOT / "src")]
    with pytest.raises(UserError) as raised:
        run_processes("steelyard.train", arguments, num_processes=2)
    assert raised.value.exit_code == 2
    assert str(raised.value).splitlines() == [
        "stages.ranks: found a plan for 4 processes",
        "  expected: a plan for 2 processes, the number that was started",
        "  to fix: start 4 processes, or plan for 2 devices",
    ]
    assert capfd.readouterr() == ("", "")


def test_an_error_on_one_rank_ends_all_and_is_the_one_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    started_s = time.monotonic()
    with pytest.raises(RankFailedError) as raised:
        run_processes("tests.runtime.faulty", ["raise", str(tmp_path)], num_processes=2)
    assert time.monotonic() - started_s < HANG_LIMIT_S
    assert str(raised.value).startswith("rank 1 failed: ValueError: the planted error")
    assert "in misbehave" in str(raised.value)
    assert capfd.readouterr() == ("", "")
    assert_gone(tmp_path)


def test_a_rank_that_is_killed_ends_all_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    with pytest.raises(RankFailedError, match="rank 1 was ended by SIGKILL"):
        run_processes("tests.runtime.faulty", ["kill", str(tmp_path)], num_processes=2)
    assert_gone(tmp_path)


def test_no_process_stays_behind_when_the_launcher_is_killed(tmp_path: Path) -> None:
    call = f"run_processes('tests.runtime.faulty', ['sleep', {str(tmp_path)!r}], num_processes=2)"
    with started(f"from steelyard.processes.start import *; {call}") as launcher:
        wait_for(tmp_path, "*.pid", 2)
        launcher.kill()
        launcher.wait()
        assert_gone(tmp_path, within_s=HANG_LIMIT_S)
