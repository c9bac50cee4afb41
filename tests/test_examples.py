"""The examples that plan run as they are shown; tests/test_own_loop.py, tests/docs/test_own_model.py and
tests/integrations/test_lora_example.py run those that train."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.plan.file import read_plan

ROOT = Path(__file__).parents[1]
TRAINING = {
    "own_loop.py": "tests/test_own_loop.py",
    "diffusion.py": "tests/docs/test_own_model.py",
    "lora_sft.py": "tests/integrations/test_lora_example.py",
    "pretrain.py": "tests/integrations/test_pretrain_example.py",
}


def run_example(name: str, folder: Path, *arguments: str) -> str:
    """Output of an example that runs in a folder, with the `steelyard` of these tests."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "PATH": path}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


def test_every_example_is_run_by_a_test() -> None:
    here = set(re.findall(r'run_example\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert here | set(TRAINING) == {path.name for path in (ROOT / "examples").glob("*.py")}
    for name, test in TRAINING.items():
        assert name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_model_is_planned(tmp_path: Path) -> None:
    printed = run_example("plan_70b.py", tmp_path, "llama3-8b", "1x8xa100-80gb")
    plan = read_plan(tmp_path / "plan.json")
    assert plan.prediction is not None
    assert f"{plan.prediction.step_time_s:.2f} s a step" in printed
    assert printed.count("GiB") == 3 * plan.num_stages


@pytest.mark.slow
def test_costs_of_ones_own_are_searched_within_less_and_less(tmp_path: Path) -> None:
    printed = run_example("own_costs.py", tmp_path)
    assert json.loads((tmp_path / "problem.json").read_text())["settings"]
    steps = [float(each) for each in re.findall(r": (\d+) ms a step", printed)]
    assert len(steps) == 3
    assert steps == sorted(steps)
    assert "{'dp8': 24}" in printed.splitlines()[0]
    assert "tp8" in printed.splitlines()[-1]


@pytest.mark.slow
def test_a_frontier_is_read(tmp_path: Path) -> None:
    printed = run_example("read_frontier.py", tmp_path, "llama3.2-1b", "1x4xa100-80gb", "2")
    sizes = [float(each) for each in re.findall(r"^ *([\d.]+) GiB:", printed, flags=re.MULTILINE)]
    enough = float(re.search(r"([\d.]+) GiB per device are enough", printed)[1])  # type: ignore[index]
    assert len(sizes) >= 2
    assert min(sizes) <= enough <= max(sizes)
    assert re.search(r"cheapest tokens: (4|8|16) devices, \d+ dollars", printed)


@pytest.mark.processes
def test_a_machine_is_measured_and_planned_for(tmp_path: Path) -> None:
    printed = run_example("profile_and_plan.py", tmp_path)
    assert "by costs measured here: True" in printed
    assert (tmp_path / "profile.json").exists()
