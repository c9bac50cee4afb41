"""Tests of planning without torch: commands run without it, or print how to install it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.cli.app import COMMANDS

pytestmark = pytest.mark.slow

JOB = ["--cluster", "1x4xa100-80gb", "--seq-len", "2048", "--global-batch", "16"]
SMALL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 128}
PLANNED = {
    "plan": ["plan", "llama3-8b", *JOB, "-o", "plan.json"],
    "plan by hub id, at an odd length": [
        *("plan", "Qwen/Qwen3-14B", "--cluster", "1x8xh100-80gb", "--seq-len", "3001", "--global-batch", "8"),
        *("--save-problem", "problem.json"),
    ],
    "plan of a model without a family": ["plan", "smollm3-3b", *JOB, "-o", "smollm3.json"],
    "plan for an engine": ["plan", "llama3-8b", *JOB, "--engine", "megatron", "--engines"],
    "price": ["price", "llama3-8b", *JOB, "--engine", "torchtitan", "--zero", "3"],
    "explain": ["explain", "plan.json"],
    "explain of a model without a family": ["explain", "smollm3.json"],
    "report": ["report", "plan.json", "-o", "plan.html", "--time-limit", "0"],
    "advise": ["advise", "llama3-8b", *JOB],
    "frontier": ["frontier", "llama3-8b", *JOB, "--points", "3", "--devices", "4"],
    "explore": ["explore", "llama3-8b", *JOB, "--devices", "4", "--time-limit", "1", "-o", "explore.html"],
    "diff": ["diff", "plan.json", "plan.json"],
    "timeline": ["timeline", "plan.json", "-o", "timeline.json"],
    "solve": ["solve", "problem.json"],
    "export": ["export", "plan.json", "--to", "torchtitan", "-o", "exported"],
    "models": ["models"],
    "devices": ["devices"],
    "links": ["links"],
    "schema": ["schema", "plan"],
    "schema of a command": ["schema", "check", "--json"],
    "mcp": ["mcp", "--help"],
}
NEED_TORCH = {
    "train": ["train", "plan.json", "--data", "data.txt"],
    "measure": ["measure", "plan.json"],
    "check": ["check", "plan.json"],
    "parity": ["parity", "plan.json"],
    "profile": ["profile", "llama3-8b", "--seq-len", "2048", "-n", "2", "-o", "profile.json"],
    "demo": ["demo"],
    "plan of another config": ["plan", "small.json", *JOB],
    "plan of another type": ["plan", "other.json", *JOB],
    "plan of one's own module": ["plan", "own.py:build", *JOB],
    "plan in another precision": ["plan", "llama3-8b", *JOB, "--precision", "fp32"],
}
RUN_ALL = """
import contextlib, io, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "tokenizers", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from steelyard.cli import main
found = {}
for name, arguments in json.load(sys.stdin).items():
    sys.argv = ["steelyard", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as end:
            found[name] = (end.code or 0, printed.getvalue())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of every command, by the names above."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "data.txt").write_text("text")
    (folder / "small.json").write_text(json.dumps(SMALL))
    (folder / "other.json").write_text(json.dumps(SMALL | {"model_type": "phi3"}))
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(PLANNED | NEED_TORCH),
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return {name: tuple(outcome) for name, outcome in json.loads(process.stdout).items()}


def test_every_command_is_tried() -> None:
    assert {arguments[0] for arguments in (PLANNED | NEED_TORCH).values()} == set(COMMANDS)


@pytest.mark.parametrize("name", PLANNED)
def test_planning_needs_no_torch(outcomes: dict[str, tuple[int, str]], name: str) -> None:
    code, output = outcomes[name]
    assert code == 0, output


@pytest.mark.parametrize("name", NEED_TORCH)
def test_what_needs_torch_says_how_to_install_it(outcomes: dict[str, tuple[int, str]], name: str) -> None:
    code, output = outcomes[name]
    assert code == 2, output
    assert output.count("error: ") == 1
    assert "torch, transformers: found not installed" in output
    assert 'pip install "steelyard[train]"' in output
    assert "whl/cpu" in output


def test_the_runtime_from_python_says_how_to_install_torch(tmp_path: Path) -> None:
    script = RUN_ALL.partition("from steelyard.cli")[0] + "import steelyard\nsteelyard.parallelize"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "NotInstalledError: torch, transformers: found not installed" in process.stderr
