"""Tests of the warning for sequences beyond a rotary model's length, in every view of the plan and in its file."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.choices import Explanation
from steelyard.plan.file import read_plan
from steelyard.report.explain_view import explain_view

LONG = ["--cluster", "2x8xh100-80gb", "--seq-len", "16384", "--global-batch", "16", "--time-limit", "5"]
WARNING = (
    "sequences of 16,384 tokens are longer than the 8,192 positions that llama3-8b was made for "
    "(max_position_embeddings)"
)


def output(*arguments: str) -> str:
    """Output of a command, in one line."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a plan for long sequences, and the output of planning it."""
    made = tmp_path_factory.mktemp("long")
    (made / "printed.txt").write_text(output("plan", "llama3-8b", *LONG, "-v", "-o", str(made / "plan.json")))
    return made


@pytest.mark.slow
def test_plan_warns(folder: Path) -> None:
    assert f"Warning: {WARNING}" in (folder / "printed.txt").read_text()


@pytest.mark.slow
def test_the_plan_file_keeps_the_warning(folder: Path) -> None:
    (warning,) = json.loads((folder / "plan.json").read_text())["prediction"]["warnings"]
    assert warning.startswith(WARNING)


@pytest.mark.slow
def test_explain_warns(folder: Path) -> None:
    console = Console(width=1000)
    with console.capture() as printed:
        console.print(explain_view(read_plan(folder / "plan.json"), Explanation(binds="")))
    assert f"Warning: {WARNING}" in printed.get()


@pytest.mark.slow
def test_the_report_warns(folder: Path) -> None:
    output("report", str(folder / "plan.json"), "-o", str(folder / "plan.html"), "--time-limit", "1")
    assert WARNING in (folder / "plan.html").read_text()


@pytest.mark.slow
def test_mfu_says_how_it_counts_attention(folder: Path) -> None:
    assert "counts causal attention" in (folder / "printed.txt").read_text()
    assert json.loads((folder / "plan.json").read_text())["prediction"]["mfu_attention"] == "causal"


@pytest.mark.slow
def test_a_sequence_of_131072_tokens_takes_context_parallelism_and_explain_says_what_it_gains(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    output("plan", "llama3.2-1b", "--seq-len", "131072", "--cluster", "1x8xh100-80gb", "-o", path)
    plan = read_plan(path)
    assert all("cp" in str(strategy) for strategy in plan.strategies[1:-1])
    baselines = json.loads(output("explain", path, "--json"))["explanation"]["rivals"]
    slowdown = next(baseline["slowdown"] for baseline in baselines if baseline["name"] == "without cp")
    assert slowdown > 0.1
