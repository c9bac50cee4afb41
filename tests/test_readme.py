"""What the README shows is true: its plan is valid, its commands exist, its Python runs."""

import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from typer.main import get_command

from steelyard.cli.app import app
from steelyard.errors import InvalidPlanError
from steelyard.plan.file import parse_value
from steelyard.plan.plan import Plan

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_plan_by_hand_is_valid() -> None:
    plan = parse_value(json.loads(blocks("json")[0]), Plan, InvalidPlanError, what="plan")
    assert plan.num_devices == 4


def test_every_command_and_option_shown_exists() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    shown = re.findall(r"^\$? ?steelyard (\w+)((?:[^\n]|\\\n)*)", README, flags=re.MULTILINE)
    assert {"plan", "profile", "train"} <= {name for name, _ in shown}
    for name, rest in shown:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= known, name


def test_make_targets_shown_exist() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.processes
def test_the_python_example_trains(tmp_path: Path) -> None:
    source = resources.files("steelyard.model") / "configs" / "llama-demo.json"
    config = json.loads(source.read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = blocks("python")[0]
    assert len(shown.strip().splitlines()) <= 14
    script = shown.replace(
        '"1x8xa100-80gb", global_batch=64, seq_len=4096', '"1x2xa100-80gb", global_batch=4, seq_len=32'
    )
    script = script.replace("loss = ", "tokens = torch.arange(4 * 33).reshape(4, 33) % 256\nloss = ")
    script += "assert 5 < loss.item() < 6, loss\nfor optimizer in optimizers:\n    optimizer.step()\n"
    script += "dist.destroy_process_group()\n"
    (tmp_path / "example.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "example.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr[-4000:]
