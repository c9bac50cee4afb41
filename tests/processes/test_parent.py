"""Tests that no process outlives its parent, whatever it is doing."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.processes.warm import HANG_LIMIT_S
from tests.runtime.test_launch import assert_gone, started, wait_for

FORK = """
import os, sys, time
from steelyard.processes.rank import end_with_parent
if os.fork() == 0:
    end_with_parent()
    open(sys.argv[1] + f"/{os.getpid()}.pid", "w").close()
    {work}
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "work", ["time.sleep(600)", "import ctypes; ctypes.PyDLL(None).sleep(600)", "\n    while True: pass"]
)
def test_a_process_ends_with_its_parent(tmp_path: Path, work: str) -> None:
    with started(FORK.replace("{work}", work), str(tmp_path)) as parent:
        wait_for(tmp_path, "*.pid", 1)
        time.sleep(0.2)
        parent.kill()
        parent.wait()
        assert_gone(tmp_path, within_s=HANG_LIMIT_S)


@pytest.mark.processes
def test_ranks_end_with_torchrun_even_while_they_are_stuck_outside_python(tmp_path: Path) -> None:
    call = f"run_processes('tests.runtime.faulty', ['stuck', {str(tmp_path)!r}], num_processes=2)"
    script = f"from steelyard.processes.start import *\ntry: {call}\nexcept RankFailedError: pass"
    with started(script) as launcher:
        wait_for(tmp_path, "misbehaves", 1)
        rank = int(next(tmp_path.glob("*.pid")).stem)
        torchrun = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(torchrun, signal.SIGKILL)
        assert_gone(tmp_path, within_s=HANG_LIMIT_S)
        assert launcher.wait(timeout=HANG_LIMIT_S) == 0
