"""Tests of the example of a user's own loop: short, trains under a plan, resumes under another."""

import re
from pathlib import Path

import pytest

from steelyard.plan.file import write_plan
from tests.processes.warm import HANG_LIMIT_S, ROOT, run_warm
from tests.runtime.models import CONFIGS, make_plan

EXAMPLE = ROOT / "examples" / "own_loop.py"


def run_example(folder: Path, *stages: str) -> dict[int, float]:
    """The losses that two processes print, by their step."""
    plan = make_plan(CONFIGS["llama-tied"], *stages, num_devices=2, global_batch=16, num_microbatches=2)
    write_plan(plan, folder / "plan.json")
    words = ["--standalone", "--nproc-per-node=2", EXAMPLE, folder / "plan.json", folder / "checkpoint"]
    finished = run_warm("tests.processes.forking_agent", *words, timeout_s=HANG_LIMIT_S)
    assert finished.returncode == 0, finished.stderr[-4000:]
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", finished.stdout)}
    (evaluated,) = re.findall(r"evaluated: loss ([\d.]+)", finished.stdout)
    assert float(evaluated) < losses[max(losses)], "of the last batch after its step"
    return losses


@pytest.mark.processes
def test_the_example_trains_and_goes_on_from_its_checkpoint_under_another_plan(tmp_path: Path) -> None:
    first = run_example(tmp_path, "fsdp2, tp2+sp, dp2, tp2")
    assert list(first) == list(range(1, 11))
    assert first[10] < first[1] - 0.5
    second = run_example(tmp_path, "single, single", "single, single")
    assert list(second) == list(range(11, 21))
    assert second[11] == pytest.approx(first[10], abs=0.4)
    assert second[20] < first[10]


def test_the_example_has_about_thirty_lines() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
