"""Tests of a user's own module on the command line: its builder is named there, and a plan file never runs code."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.model.own import OwnSplit
from steelyard.plan.file import read_plan, write_plan
from steelyard.profiles.profile import Profile
from tests.cli.conftest import Run, user_error
from tests.processes.forking_agent import fork_ranks
from tests.runtime.models import make_plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'diffusion.py'}:build_model"
JOB = ("--cluster", "1x4xa100-80gb", "--global-batch", 16)


def text_of(result: Result) -> str:
    return str(user_error(result))


@pytest.fixture(name="planned", scope="module")
def _planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The result of planning, which splits the module, and the file that it writes."""
    path = tmp_path_factory.mktemp("own") / "plan.json"
    result = CliRunner().invoke(app, [str(each) for each in ("plan", EXAMPLE, *JOB, "-o", path)])
    assert result.exit_code == 0, result.output
    return result, path


@pytest.fixture(name="plan_file", scope="module")
def _plan_file(planned: tuple[Result, Path]) -> Path:
    return planned[1]


def test_planning_says_that_the_file_is_run_and_how_to_go_on(planned: tuple[Result, Path]) -> None:
    result, _ = planned
    assert "diffusion.py to build the module" in result.stderr
    assert "--builder" in result.stdout


def test_the_plan_holds_the_split_and_no_config_and_no_path_of_the_file(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    assert plan.model.config is None
    assert isinstance(plan.model.split, OwnSplit)
    assert plan.model.split.blocks == tuple(f"blocks.{number}" for number in range(4))
    assert "diffusion.py" not in plan_file.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["explain", "diff", "report"])
def test_a_plan_is_read_without_the_module(
    run: Run, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no trace is kept
    more = {"diff": [plan_file], "report": ["-o", tmp_path / "plan.html"]}
    result = run(command, plan_file, *more.get(command, []))
    assert result.exit_code == 0, result.output


def test_check_fits_with_the_builder_within_what_was_predicted(run: Run, plan_file: Path) -> None:
    result = run("check", plan_file, "--builder", EXAMPLE, "--processes", 1, "--json")
    assert result.exit_code == 0, result.output
    ranks = json.loads(result.stdout)["ranks"]
    assert all(rank["peak_bytes"] <= rank["predicted_bytes"] for rank in ranks)


@pytest.mark.parametrize("command", [("check",), ("train", "--data", "synthetic")])
def test_a_plan_file_alone_runs_no_code(run: Run, plan_file: Path, command: tuple[str, ...]) -> None:
    error = text_of(run(command[0], plan_file, *command[1:]))
    assert "--builder: found nothing, but the plan is for diffusion.DiffusionTransformer" in error
    assert "code in a plan file is never executed" in error


def test_a_builder_for_a_plan_that_has_a_config_is_refused(run: Run, tmp_path: Path) -> None:
    plan = make_plan("llama-tied", "dp2, dp2, dp2, dp2", num_devices=2, num_microbatches=2)
    write_plan(plan, tmp_path / "plan.json")
    assert "leave --builder out" in text_of(run("check", tmp_path / "plan.json", "--builder", EXAMPLE))


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("", "build", "no function build"),
        ("def build(): return 1 / 0", "build", "build() raises ZeroDivisionError in line 1"),
        ("import nothing_of_that_name", "build", "raises ModuleNotFoundError in line 1"),
        ("from torch import nn\ndef build(): return nn.Linear(2, 2)", "build", "build() returns only a Linear"),
        ("def build(): return 1, 2", "build", "build() returns a int first"),
        ("from torch import nn\ndef build(): return nn.Linear(2, 2), 1, 2", "build", "returns a int as the loss"),
        ("def build(): return (1,)", "build", "returns a tuple of 1"),
    ],
)
def test_what_a_builder_lacks_is_told(run: Run, tmp_path: Path, content: str, name: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(content)
    error = text_of(run("plan", f"{tmp_path / 'mine.py'}:{name}", *JOB))
    assert words in error
    assert "expected" in error


def test_a_missing_file_is_told(run: Run, tmp_path: Path) -> None:
    assert "no file" in text_of(run("plan", f"{tmp_path / 'none.py'}:build", *JOB))


def test_another_length_than_that_of_the_sample_is_refused(run: Run) -> None:
    assert "16, the length of its sample" in text_of(run("plan", EXAMPLE, *JOB, "--seq-len", 32))


def test_a_model_with_a_config_needs_a_length(run: Run) -> None:
    assert "--seq-len: found nothing for llama3-8b" in text_of(run("plan", "llama3-8b", *JOB))


@pytest.mark.parametrize("command", [("export", "--to", "transformers"), ("parity",)])
def test_what_needs_a_config_refuses_a_module_of_ones_own(run: Run, plan_file: Path, command: tuple[str, ...]) -> None:
    assert "your own module" in text_of(run(command[0], plan_file, *command[1:]))


@pytest.mark.processes
def test_train_builds_the_module_in_every_process_and_resumes(
    run: Run,
    plan_file: Path,
    tmp_path: Path,
    save_samples: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_ranks(monkeypatch)
    own = read_plan(plan_file).model.split
    sizes = {"num_devices": 2, "global_batch": 16, "num_microbatches": 2, "seq_len": 16}
    write_plan(make_plan(None, "dp2, fsdp2, tp2, fsdp2 zero2, dp2, dp2", split=own, **sizes), tmp_path / "cpu.json")
    save_samples(tmp_path / "samples.safetensors")
    job = ("train", tmp_path / "cpu.json", "--builder", EXAMPLE, "--data", tmp_path / "samples.safetensors")
    first = run(*job, "--steps", 3, "--checkpoint-dir", tmp_path / "kept", "--json")
    assert first.exit_code == 0, first.output
    again = run(*job, "--steps", 4, "--checkpoint-dir", tmp_path / "kept", "--allow-change", "steps", "--json")
    assert again.exit_code == 0, again.output
    assert [step["step"] for step in json.loads(again.stdout)["steps"]] == [4]
    refused = run(*job, "--steps", 1, "--export-hf", tmp_path / "exported")
    assert "no Hugging Face folder" in text_of(refused)


@pytest.fixture(name="save_samples")
def _save_samples() -> Callable[[Path], None]:
    def save(path: Path) -> None:
        from safetensors.torch import save_file

        from tests.runtime.guide_worker import DIFFUSION

        inputs, noise = DIFFUSION.read(list(range(64)), 7)
        save_file({**{f"0.{name}": each.contiguous() for name, each in inputs.items()}, "1": noise}, path)

    return save


MODULE = """
import torch
from torch import nn
from torch.nn.functional import gelu, mse_loss


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, condition):
        return x + self.down(gelu(self.up(self.norm(x) + condition.unsqueeze(1))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, 32), nn.ModuleList(Block() for _ in range(3)), nn.Linear(32, 3)
        self.condition = nn.Linear(8, 32)

    def forward(self, x):
        condition, x = self.condition(x.mean(1)), self.stem(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Net(), (torch.randn(2, 4, 8), torch.randn(2, 4, 3)), mse_loss
"""


@pytest.mark.processes
def test_a_profile_of_a_module_plans_as_many_processes_and_fewer_by_the_command_that_it_prints(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    (tmp_path / "mine.py").write_text(MODULE)
    model, path = f"{tmp_path / 'mine.py'}:build", tmp_path / "profile.json"
    asked = ("--precision", "fp32", "-n", 2, "--samples", "1,2", "--budget", 1)
    measured = run("profile", model, *asked, "-o", path)
    assert measured.exit_code == 0, measured.output
    profile = Profile.model_validate_json(path.read_text())
    assert all(each.times for each in profile.layers)
    assert {frozenset(each.degrees.items()) for each in profile.layers if "block" in each.kind} == {
        frozenset(),
        frozenset({("tp", 2)}),
    }
    steelyard, *printed = shlex.split(measured.output.split("Next: ")[1].splitlines()[0])
    assert steelyard == "steelyard"
    for count, command in ((2, printed), (1, [each.replace("1x2xcpu", "1x1xcpu") for each in printed])):
        planned = run(*command, "-o", tmp_path / "plan.json")
        assert planned.exit_code == 0, planned.output
        plan = read_plan(tmp_path / "plan.json")
        assert plan.num_devices == count
