"""Tests of runs that lose devices and hosts permanently and regain them: real processes under torchrun."""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steelyard import find_plan
from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.processes import start
from steelyard.processes.failure import RankFailedError
from steelyard.processes.start import Elastic, run_processes
from steelyard.profiles.record import RunRecord
from steelyard.runtime.checkpoint_folder import complete_checkpoints
from steelyard.runtime.options import TrainOptions
from tests.processes.forking_agent import fork_ranks
from tests.processes.warm import HANG_LIMIT_S
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.test_launch import assert_gone

pytestmark = pytest.mark.processes

NUM_STEPS = 20
SAME_LOSS = 1e-4
"""Sums in another order, as under any other plan."""

LAST_CALL_S = 8.0
"""Instead of 20 s, because processes of these hosts end at once; time enough for the second host to start."""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a plan of four devices in one stage, with a batch that three do not divide."""
    folder = tmp_path_factory.mktemp("plan")
    config = {**CONFIGS["llama-tied"], "num_hidden_layers": 1}
    plan = find_plan(
        config, "1x4xh100-80gb", global_batch=4, seq_len=64, precision="fp32", decisions=Decisions(num_stages=1)
    )
    write_plan(plan, folder / "plan.json")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 250, 5_000).astype(np.uint16))
    return folder / "plan.json"


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainOptions:
    fork_ranks(monkeypatch)
    monkeypatch.setattr(start, "_LAST_CALL_S", LAST_CALL_S)
    monkeypatch.setenv("PIDS", str(tmp_path))
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    return TrainOptions(
        steps=NUM_STEPS,
        lr=1e-2,
        warmup_steps=2,
        timeout_s=300,
        device="cpu",
        elastic=True,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=2,
        metrics=tmp_path / "metrics.jsonl",
        record=tmp_path / "record.json",
    )


def train(
    plan_path: Path,
    options: TrainOptions,
    faults: str = "",
    *,
    num_processes: int = 4,
    elastic: Elastic | None = None,
    restarts: int = 0,
) -> None:
    data = str(plan_path.parent / "tokens.npy")
    arguments = [faults, str(plan_path), "--data", data, *options.arguments()]
    run_processes(
        "tests.runtime.faulty_train",
        arguments,
        num_processes=num_processes,
        restarts=restarts,
        elastic=elastic or Elastic(),
    )


class Hosts:
    """Launchers of two processes each, as on hosts that meet."""

    def __init__(self, plan_path: Path, options: TrainOptions) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        self.ended: list[str] = []
        self._plan_path, self._options = plan_path, options
        self._threads: list[threading.Thread] = []

    def start(self, name: str, faults: str = "", *, pool: str | None = None) -> None:
        meeting = Elastic(hosts=(1, 2), rendezvous=f"localhost:{self.port}")
        options = replace(self._options, pool=pool)

        def run() -> None:
            try:
                train(self._plan_path, options, faults, num_processes=2, elastic=meeting)
                self.ended.append(f"{name} is done")
            except RankFailedError:
                self.ended.append(f"{name} is lost")

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(HANG_LIMIT_S)


def losses(options: TrainOptions) -> list[float]:
    assert options.metrics is not None
    lines = [json.loads(line) for line in options.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(plan_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        patch.setenv("PIDS", str(folder))
        steps = TrainOptions(
            steps=NUM_STEPS, lr=1e-2, warmup_steps=2, device="cpu", metrics=folder / "metrics.jsonl", timeout_s=300
        )
        train(plan_path, steps)
    return losses(steps)


def num_ranks(options: TrainOptions) -> int:
    assert options.record is not None
    return len(RunRecord.model_validate_json(options.record.read_text()).ranks)


def test_a_device_that_is_lost_for_good_and_comes_back_changes_no_loss(
    plan_path: Path,
    options: TrainOptions,
    undisturbed: list[float],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BAD_RANK", "0")  # which is never spare
    monkeypatch.setenv("SLOW_BELOW", "4")  # else what is left is done before anything can come back
    train(plan_path, options, "0:kill-step:6,1:return:6")
    printed = capfd.readouterr().out
    assert losses(options) == pytest.approx(undisturbed, rel=SAME_LOSS)
    assert re.search(
        r"elastic: rank 0 was ended by SIGKILL .* continues with 3 processes\. When .*kill -USR2 \d", printed
    )
    fewer = re.search(r"elastic: 4 → ([12]) devices?, predicted .* a step \(.*\); idle .*: process .*2 of 3", printed)
    assert fewer is not None, printed
    resumed = re.search(r"resumed after step (\d) from .*; (\d) steps? lost and repeated", printed)
    assert resumed is not None, printed
    assert int(resumed[1]) + int(resumed[2]) == 5  # in the sixth it was killed
    assert "elastic: devices of this host back; they join at the next complete checkpoint" in printed
    assert "restarted (2): hosts or devices have come back" in printed
    assert read_plan(tmp_path / "checkpoints" / f"plan-{fewer[1]}.json").global_batch == 4
    assert num_ranks(options) == 4
    assert_gone(tmp_path)


def test_a_device_is_given_up_only_when_its_restarts_are_used_up(
    plan_path: Path, options: TrainOptions, undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    train(plan_path, options, "0:kill-step:6,1:kill-step:9", restarts=1)
    printed = capfd.readouterr().out
    assert printed.count("continues with 3 processes") == 1
    assert printed.index("restarted (1)") < printed.index("continues with 3 processes")
    assert losses(options) == pytest.approx(undisturbed, rel=SAME_LOSS)
    assert num_ranks(options) in (1, 2)


def test_an_error_of_the_program_is_no_lost_device(plan_path: Path, options: TrainOptions) -> None:
    with pytest.raises(RankFailedError, match="CUDA out of memory"):
        train(plan_path, options, "0:memory:3")
    assert complete_checkpoints(options.checkpoint_dir) != []  # type: ignore[arg-type]


def test_devices_too_few_for_any_plan_end_the_run_with_what_to_do(
    plan_path: Path, options: TrainOptions, tmp_path: Path
) -> None:
    plan = read_plan(plan_path)
    assert plan.prediction is not None
    no_room = {"budget_bytes": 1 << 20, "margin_bytes": 0}
    tight = plan.model_copy(update={"prediction": plan.prediction.model_copy(update=no_room)})
    write_plan(tight, tmp_path / "plan.json")
    (tmp_path / "tokens.npy").symlink_to(plan_path.parent / "tokens.npy")
    with pytest.raises(UserError, match="3 devices left, no part of which has a plan for a global batch of 4"):
        train(tmp_path / "plan.json", options, "0:kill-step:6")
    assert_gone(tmp_path)


@pytest.mark.nightly  # a host is lost in the test with pools, too; that of one host plans for a part of one cluster
def test_a_host_that_is_lost_and_comes_back_changes_no_loss(
    plan_path: Path,
    options: TrainOptions,
    undisturbed: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BAD_RANK", "3")
    monkeypatch.setenv("SLOW_BELOW", "4")
    hosts = Hosts(plan_path, options)
    hosts.start("first")
    wait_for(lambda: listens(hosts.port))
    hosts.start("second", "0:kill-agent:7")
    wait_for(lambda: list((tmp_path / "checkpoints").glob("plan-*.json")) != [])
    assert hosts.ended == ["second is lost"]
    hosts.start("third")
    hosts.join()
    assert sorted(hosts.ended[1:]) == ["first is done", "third is done"]
    assert "continues with" not in capfd.readouterr().out, "no device of the host that is left was lost"
    assert losses(options) == pytest.approx(undisturbed, rel=SAME_LOSS)
    assert num_ranks(options) == 4
    assert_gone(tmp_path, within_s=HANG_LIMIT_S)


POOLS = ("1x2xh100-80gb", "1x2xa100-80gb")


def test_a_pool_that_is_lost_and_comes_back_changes_no_loss(
    plan_path: Path,
    options: TrainOptions,
    undisturbed: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The host that the others meet on is of the pool that comes second in the pipeline."""
    config = {**CONFIGS["llama-tied"], "num_hidden_layers": 1}
    written = make_plan(config, "dp2, dp2", "dp2", sizes=(2, 2), num_microbatches=2, global_batch=4, seq_len=64)
    write_plan(written.model_copy(update={"cluster": "+".join(POOLS)}), tmp_path / "plan.json")
    (tmp_path / "tokens.npy").symlink_to(plan_path.parent / "tokens.npy")
    monkeypatch.setenv("BAD_RANK", "3")
    monkeypatch.setenv("SLOW_BELOW", "4")
    hosts = Hosts(tmp_path / "plan.json", options)
    hosts.start("second pool", pool=POOLS[1])
    wait_for(lambda: listens(hosts.port))
    hosts.start("first pool", "0:kill-agent:7", pool=POOLS[0])
    left = (tmp_path / "checkpoints").glob  # of so small a model one device may be as fast as two
    wait_for(lambda: [*left("plan-[12].json")] != [] or hosts.ended[1:] != [])
    assert hosts.ended == ["first pool is lost"]
    (written,) = (read_plan(path) for path in left("plan-[12].json"))
    assert written.machines().device.name == "a100-80gb"
    hosts.start("first pool", pool=POOLS[0])
    hosts.join()
    assert sorted(hosts.ended[1:]) == ["first pool is done", "second pool is done"]
    printed = capfd.readouterr().out
    assert f"elastic: 4 → {written.num_devices} device" in printed
    assert "continues with" not in printed, "no device of the host that is left was lost"
    assert losses(options) == pytest.approx(undisturbed, rel=SAME_LOSS)
    assert num_ranks(options) == 4
    assert_gone(tmp_path, within_s=HANG_LIMIT_S)


def wait_for(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + HANG_LIMIT_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0
