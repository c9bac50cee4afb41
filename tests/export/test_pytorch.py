"""The plain PyTorch script: what stands in it, and that it trains a mixed plan with steelyard's losses without it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from tests.export.examples import TINY, mixed, read, run, text_of, uniform

STEPS = 4
OPTIONS = ["--steps", str(STEPS), "--warmup-steps", "2", "--lr", "1e-2"]
LOSS_TOLERANCE = 5e-6
"""Of losses near 5.5, in fp32: sums are taken in another order."""


def script(plan: Plan) -> str:
    return text_of(plan, "pytorch", ".py")


def small(parallel: str, *, remat: str = "none", **changes: object) -> Plan:
    """One stage of two ranks of the tiny model."""
    runs = [run(0, 0, parallel), run(1, 6, parallel, remat=remat), run(7, 7, parallel)]
    content = mixed().model_dump(mode="json", exclude_none=True)
    content |= {"stages": [{"ranks": [0, 1], "runs": runs}], "cluster": "1x2xcpu"}
    return read(content | changes)


@pytest.mark.parametrize("plan", [mixed(), small("dp2"), small("fsdp2", remat="full"), small("tp2", remat="selective")])
def test_the_script_is_clean_python(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script(plan))
    checks = ["check", "--isolated", "--select", "E,F,W,B,I", "--ignore", "E501", "--target-version", "py311"]
    finished = subprocess.run(
        [sys.executable, "-m", "ruff", *checks, path], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout


def test_the_script_imports_nothing_but_stock_packages() -> None:
    tree = ast.parse(script(mixed()))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    stock = {"numpy", "torch", "transformers", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in names} <= stock


def test_the_script_uses_no_private_part_of_torch() -> None:
    tree = ast.parse(script(mixed()))
    modules = [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in modules if "._" in name] == []


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (small("dp2"), "PipelineStage"),
        (small("dp2"), "parallelize_module"),
        (small("dp2"), "checkpoint("),
        (small("dp2"), "redistribute"),
        (small("fsdp2", remat="full"), "create_selective_checkpoint_contexts"),
        (small("dp2"), "sum_tied_gradients"),
    ],
)
def test_what_a_plan_does_not_need_is_not_there(plan: Plan, word: str) -> None:
    assert word not in script(plan)
    tied = mixed(model={"name": "tiny", "config": TINY | {"tie_word_embeddings": True}})
    assert word in script(tied)


def test_every_layer_of_the_plan_is_in_the_table() -> None:
    table = re.search(r"^LAYERS = \[\n(.*?)^\]", script(mixed()), flags=re.MULTILINE | re.DOTALL)
    assert table is not None
    comments = re.findall(r"# (\d+) to (\d+): (.*)$", table.group(1), flags=re.MULTILINE)
    shown = [text for first, last, text in comments for _ in range(int(first), int(last) + 1)]
    assert shown == [str(strategy) for strategy in mixed().strategies]


def test_a_model_that_the_script_cannot_build_is_refused() -> None:
    plan = uniform("fsdp8", devices=8)
    family = plan.chain().family
    with pytest.raises(UserError, match="a model of gpt_neox, llama"):
        _refused(plan, family.model_type)


def _refused(plan: Plan, model_type: str) -> None:
    from steelyard.export import pytorch

    without = {name: modules for name, modules in pytorch._MODULES.items() if name != model_type}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytorch, "_MODULES", without)
        patch.setitem(without, "llama-like", pytorch._Modules())
        script(plan)


@pytest.mark.processes
def test_a_mixed_plan_trains_with_the_same_losses_without_steelyard(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 256, 32 * 60 + 1).astype(np.uint16))
    (tmp_path / "train.py").write_text(script(mixed()))
    (tmp_path / "steelyard.py").write_text("raise ImportError('the script must not need this package')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    words = [*torchrun, "train.py", "--data", "tokens.npy", "--metrics", "script.jsonl", *OPTIONS]
    finished = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=400
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found, expected = losses(tmp_path / "script.jsonl"), losses(steelyard_metrics(tmp_path))
    assert len(found) == STEPS
    assert found == pytest.approx(expected, abs=LOSS_TOLERANCE)


def steelyard_metrics(folder: Path) -> Path:
    """Metrics of steelyard training the same model on one process."""
    content = mixed().model_dump(mode="json", exclude_none=True)
    stages = [{"ranks": [0, 0], "runs": [run(0, 7, "single")]}]
    write_plan(read(content | {"stages": stages, "cluster": "1x1xcpu"}), folder / "plan.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    words = [
        *torchrun,
        "-m",
        "steelyard.train",
        "plan.json",
        "--data",
        "tokens.npy",
        "--metrics",
        "own.jsonl",
        *OPTIONS,
    ]
    (folder / "steelyard.py").unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, timeout=200)
    return folder / "own.jsonl"


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]
