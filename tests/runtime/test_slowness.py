"""Tests of ranks that compute longer than others: named during the run and in its record."""

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.processes.start import run_processes
from steelyard.profiles.record import RunRecord
from steelyard.runtime.options import TrainOptions
from tests.processes.forking_agent import fork_ranks
from tests.processes.warm import HANG_LIMIT_S
from tests.runtime.models import CONFIGS, make_plan

pytestmark = pytest.mark.processes
SMALL = {**CONFIGS["llama-tied"], "num_hidden_layers": 2}


def run(folder: Path, patch: pytest.MonkeyPatch, faults: str, plan: Plan | None = None, **more: Any) -> RunRecord:
    """Layers whose ranks wait for each other in every way: for gathered parameters and for parts of activations."""
    fork_ranks(patch)
    patch.setenv("PIDS", str(folder))
    if plan is None:
        plan = make_plan(SMALL, "fsdp2, fsdp2, tp2, fsdp2", num_devices=2, global_batch=4, num_microbatches=2)
    write_plan(plan, folder / "plan.json")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 250, 5_000).astype(np.uint16))
    options = TrainOptions(
        steps=8, slow_share=3.0, slow_steps=4, record=folder / "record.json", timeout_s=HANG_LIMIT_S, **more
    )
    arguments = [faults, str(folder / "plan.json"), "--data", str(folder / "tokens.npy"), *options.arguments()]
    run_processes("tests.runtime.faulty_train", arguments, num_processes=plan.num_devices)
    return RunRecord.model_validate_json((folder / "record.json").read_text())


def test_a_rank_that_computes_slowly_is_named_and_the_one_that_waits_for_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    record = run(tmp_path, monkeypatch, "0:slow:1")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 8
    assert f"slow: rank 1 (stage 0) on {socket.gethostname()} computes " in lines[-1]
    assert "rank 0" not in lines[-1]
    waiting, slow = record.ranks
    assert waiting.own_s is not None
    assert slow.own_s is not None
    assert waiting.busy_s is not None
    assert slow.own_s > 2 * waiting.own_s
    assert waiting.busy_s > 2 * waiting.own_s
    assert slow.host == os.uname().nodename


def test_an_even_run_names_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, "")
    assert "slow:" not in capfd.readouterr().out


def test_over_pools_of_devices_the_pool_of_a_slow_rank_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ranks of a stage on the second pool compute, one of them slowly."""
    written = make_plan(SMALL, "single, single", "dp2, dp2", sizes=(1, 2), global_batch=4, num_microbatches=2)
    pooled = written.model_copy(update={"cluster": "1x1xh100-80gb+1x2xl40s"})
    run(tmp_path, monkeypatch, "0:slow:1", plan=pooled, device="cpu")
    (*_, last) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert f"slow: rank 1 (stage 1 in 1x2xl40s) on {socket.gethostname()} computes " in last
    assert "rank 2" not in last
