"""Tests that no name, path or value of a plan is ever more than text in exported files."""

import ast
import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.cost.simulator import StageTimes, simulate
from steelyard.engines import TARGETS, target_of
from steelyard.engines.writing import Request, export_plan
from steelyard.hardware import parse_cluster
from steelyard.model import read
from steelyard.model.read import load_model
from steelyard.plan.plan import Plan
from steelyard.report.trace_events import trace_events
from tests.engines.examples import container_of, divided_experts, exported, mixed, uniform

HOSTILE = (
    "coding: utf-7 +AAo-open('made')+AAo- a'b\"c'''\n$(touch made)`touch made`\r\n#SBATCH --x\n"
    "\"\"\"; open('made','w') #\\ <script>alert(1)</script> ${X} %s {0} \u202e"
)
SAFE = set("abcdefghijklmnopqrstuvwxyz0123456789_.-")


def with_text(plan: Plan, text: str) -> Plan:
    """The plan with a text as the name of its model and cluster, and within its config."""
    config = dict(plan.chain().config) | {"_name_or_path": text, "task_specific_params": {text: [text]}}
    model = plan.model.model_copy(update={"name": text, "config": config, "config_hash": None})
    return plan.model_copy(update={"model": model, "cluster": text})


def files_of(plan: Plan, target: str, text: str, *given_up: str) -> tuple[tuple[str, str], ...]:
    """Return the export of the plan with this text in every possible place; without ``given_up`` it has two lines."""
    request = Request(
        plan=with_text(plan, text),
        headline=text,
        unsupported=(text,),
        kept=(text,),
        given_up=given_up,
        cluster=parse_cluster(plan.cluster),
        image=text,
    )
    return export_plan(target_of(target), request).files


def code_of_python(content: str) -> str:
    """The code of a module, decoded as Python would, names of its functions left out."""
    tree = ast.parse(content.encode())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.name = ""
    return ast.dump(tree)


def code_of_shell(content: str) -> list[str]:
    """The lines that are no comment."""
    return [line for line in content.splitlines() if not line.startswith(("# ", "#SBATCH --job-name=steelyard"))]


def values_of(content: Any) -> Any:
    """Content of a file, without entries that name the model or are the plan."""
    if isinstance(content, dict):
        named = ("_comment", "plan", "plan.json", "name", "image", "claimName")
        return {key: values_of(value) for key, value in content.items() if key not in named}
    return [values_of(each) for each in content] if isinstance(content, list) else content


READERS: dict[str, Callable[[str], Any]] = {
    ".py": code_of_python,
    ".sh": code_of_shell,
    ".sbatch": code_of_shell,
    ".json": lambda content: values_of(json.loads(content)),
    ".yaml": lambda content: values_of(list(yaml.safe_load_all(content))),
    ".toml": tomllib.loads,
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_exported_says_the_same_whatever_the_names(target: str) -> None:
    plan = mixed() if target == "pytorch" else uniform("fsdp8", devices=8)
    for (name, found), (_, plain) in zip(files_of(plan, target, HOSTILE), files_of(plan, target, "x"), strict=True):
        read = READERS[Path(name).suffix]
        assert read(found) == read(plain)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_names_of_files_are_plain_words(target: str) -> None:
    plan = mixed() if target == "pytorch" else uniform("fsdp8", devices=8)
    assert all(set(name) <= SAFE for name, _ in files_of(plan, target, HOSTILE))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_statement_stays_a_comment(target: str) -> None:
    plan = mixed() if target == "pytorch" else uniform("fsdp8", devices=8)
    for name, content in files_of(plan, target, HOSTILE, HOSTILE):
        if not name.endswith(".json") and "touch made" in content:
            lines = [line for line in content.splitlines() if "touch made" in line]
            assert target.startswith("kubeflow") or all(line.startswith("#") for line in lines)


@pytest.mark.slow
def test_what_a_container_runs_and_is_made_from_stay_apart() -> None:
    for target in ("kubeflow", "kubeflow-v1"):
        container = container_of(files_of(uniform("fsdp8", devices=8), target, HOSTILE)[0][1])
        assert container["image"] == HOSTILE
        assert not any("touch" in word for word in container["command"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torchrun", "slurm", "megatron", "megatron-fsdp", "ms-swift"])
def test_a_shell_runs_nothing_of_a_name(target: str, tmp_path: Path) -> None:
    name, content = files_of(uniform("fsdp8", devices=8), target, HOSTILE)[0]
    (tmp_path / name).write_text(content)
    for command in ("torchrun", "srun", "scontrol", "megatron"):
        (tmp_path / command).write_text("#!/bin/bash\n")
        (tmp_path / command).chmod(0o755)
    known = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "x"}
    known |= dict.fromkeys(("DATA", "MEGATRON", "MODEL"), "x")
    environment = known | {"SLURM_JOB_ID": "1"}
    finished = subprocess.run(
        ["bash", name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert not (tmp_path / "made").exists()


def test_a_value_of_a_config_is_one_argument_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that nobody checked."""
    plan = divided_experts("mixtral-8x22b", ep=8, num_layers=56, parallel="dp8")
    monkeypatch.setattr(read, "check_values", lambda _config: None)
    config = dict(plan.chain().config) | {"num_experts_per_tok": HOSTILE}
    model = plan.model.model_copy(update={"config": config, "config_hash": None, "split": plan.chain().split})
    hostile = plan.model_copy(update={"model": model})
    (tmp_path / "megatron.sh").write_text(exported(hostile, "megatron").files[0][1])
    (tmp_path / "torchrun").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MEGATRON": "x"}
    finished = subprocess.run(["bash", "megatron.sh"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    words = finished.stdout.decode().split("\0")
    assert words[words.index("--moe-router-topk") + 1] == HOSTILE
    assert not (tmp_path / "made").exists()


def test_a_timeline_is_json_whatever_the_names() -> None:
    plan = with_text(mixed(), HOSTILE)
    stage = StageTimes(forward_s=1.0, backward_s=2.0, once_s=0.0, transfer_s=0.0)
    timeline = simulate([stage] * plan.num_stages, plan.pipeline)
    events = trace_events(timeline, plan, num_shown=2)
    assert json.loads(json.dumps(events)) == events


@pytest.mark.slow
def test_no_code_of_a_models_folder_is_asked_for() -> None:
    import steelyard

    for path in Path(steelyard.__file__).parent.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        words = [word for call in calls for word in call.keywords if word.arg == "trust_remote_code"]
        assert [ast.literal_eval(word.value) for word in words] in ([], [False]), path


@pytest.mark.slow
def test_a_config_that_names_code_of_its_own_runs_none(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')\n")
    config = dict(load_model("llama3-8b").config) | {
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path / "config.json").num_layers == 34
    assert not (tmp_path / "made").exists()
