"""Tests of runs ended by signals: a message, a checkpoint if asked, no process and no file left.

Nobody reads the output of these runs.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from steelyard.plan.file import write_plan
from steelyard.processes.stop import EndedError, StopRequest, StopWatch
from steelyard.runtime.checkpoint_folder import read_info
from tests.processes.warm import HANG_LIMIT_S, WarmProcess
from tests.runtime.models import CONFIGS, make_plan

pytestmark = pytest.mark.processes

ENDS = {"SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 138}


class Training:
    """A training of two processes that does not end by itself: the command line in a fork with all imports."""

    def __init__(self, folder: Path, *, checkpoints: Path) -> None:
        self.folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir(parents=True)
        config = {**CONFIGS["llama-tied"], "num_hidden_layers": 1}
        plan = make_plan(config, "fsdp2, dp2, fsdp2", num_devices=2, global_batch=4, num_microbatches=2)
        write_plan(plan, folder / "plan.json")
        np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 250, 5_000).astype(np.uint16))
        words = ["train", "plan.json", "--data", "tokens.npy", "--steps", "1000000", "--metrics", "metrics.jsonl"]
        words += ["--checkpoint-dir", str(checkpoints)]
        environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),  # which torch makes for all runs, in $TMPDIR by default
        }
        self.metrics, self.checkpoints = folder / "metrics.jsonl", checkpoints
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "tests.processes.forked_command", *words]
        with (folder / "stderr").open("w") as stderr, chdir(folder):
            self.process = WarmProcess(command, env=environment, stdout=write, stderr=stderr.fileno())
        os.close(write)

    def num_steps(self) -> int:
        return len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def last_step(self) -> int:
        step: int = json.loads(self.metrics.read_text().splitlines()[-1])["step"]
        return step

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(timeout=HANG_LIMIT_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the training, which else takes the processors from what it waits for, and lets it go on.

        A signal that comes at once then may reach another thread of the command than the one that waits.
        """
        stopped = self.processes()
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in stopped:
                os.kill(process, signal.SIGCONT)

    def processes(self) -> list[int]:
        """Processes that live and work in this training's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):
                if path.readlink() == self.folder:
                    found.append(int(path.parent.name))
        return found


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Training]]:
    """Trainings by the signal that ended them: two at the same time, and one into a folder that was in use."""
    folder = tmp_path_factory.mktemp("trainings")
    found: dict[str, Training] = {}

    def start(name: str, *, checkpoints: str = "") -> Training:
        found[name] = Training(folder / name, checkpoints=folder / (checkpoints or name) / "checkpoints")
        limit_s = time.monotonic() + HANG_LIMIT_S
        while found[name].num_steps() < 2:
            assert found[name].process.poll() is None, found[name].said
            assert time.monotonic() < limit_s
            time.sleep(0.1)
        return found[name]

    try:
        with start("SIGTERM").paused():
            start("SIGHUP").end(signal.SIGHUP)
            second = found["second"] = Training(folder / "second", checkpoints=folder / "SIGTERM" / "checkpoints")
            second.process.wait(timeout=HANG_LIMIT_S)
        found["SIGTERM"].end(signal.SIGTERM)
        again = start("SIGUSR1", checkpoints="SIGTERM")
        for process in again.processes():  # as a scheduler does, to torchrun's agent and the ranks too
            os.kill(process, signal.SIGUSR1)
        again.process.wait(timeout=HANG_LIMIT_S)
        yield found
    finally:
        for training in found.values():
            training.process.kill()
            training.process.wait(timeout=HANG_LIMIT_S)


def test_a_signal_that_ends_leaves_a_message_and_its_code(trainings: dict[str, Training]) -> None:
    assert trainings["SIGHUP"].process.poll() == ENDS["SIGHUP"]
    assert trainings["SIGHUP"].said == "error: ended by SIGHUP\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_stop_signal_saves_the_step_that_runs_and_says_how_to_go_on(
    trainings: dict[str, Training], name: str
) -> None:
    stopped = trainings[name]
    saved = trainings["SIGTERM"].checkpoints / f"step-{stopped.last_step():08d}"
    assert stopped.process.poll() == ENDS[name]
    assert stopped.said.splitlines() == [
        f"{name}: saving a checkpoint after this step, within 600 s (--timeout-s); a second signal ends it at once",
        f"stopped by {name} after step {stopped.last_step()} of 1000000; saved in {saved}",
        "  to continue: run the same command again",
    ]
    assert read_info(saved).step == stopped.last_step()


def test_the_same_command_goes_on_from_the_step_that_was_saved(trainings: dict[str, Training]) -> None:
    first = json.loads(trainings["SIGUSR1"].metrics.read_text().splitlines()[0])
    assert first["step"] == trainings["SIGTERM"].last_step() + 1


@pytest.mark.parametrize("name", ENDS)
def test_it_leaves_no_process_and_no_temporary_file(trainings: dict[str, Training], name: str) -> None:
    assert trainings[name].processes() == []
    assert list(trainings[name].temporary.iterdir()) == []


def test_a_second_training_into_the_folder_of_one_that_runs_is_refused(trainings: dict[str, Training]) -> None:
    assert trainings["second"].process.poll() == 2
    assert "checkpoints, to which another run is writing (process " in trainings["second"].said
    assert trainings["second"].num_steps() == 0


def test_the_second_signal_ends_at_once_and_so_does_the_end_of_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("STEELYARD_FAILURES", str(tmp_path))
    watch, stop = StopWatch(), StopRequest(tmp_path, 60.0)
    assert not watch.is_asked()
    stop.check()
    stop(signal.SIGINT, None)
    assert watch.is_asked()
    assert watch.number == signal.SIGINT
    stop.check()
    with pytest.raises(EndedError, match="ended by SIGTERM, the second signal") as raised:
        stop(signal.SIGTERM, None)
    assert raised.value.exit_code == 143
    impatient = StopRequest(tmp_path, -1.0)
    impatient(signal.SIGUSR1, None)
    with pytest.raises(EndedError, match="ended by SIGUSR1; no checkpoint was complete within"):
        impatient.check()
    assert capsys.readouterr().err.startswith("SIGINT: saving a checkpoint")
