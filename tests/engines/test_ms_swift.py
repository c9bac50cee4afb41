"""Tests of the script for ms-swift: Megatron's arguments with underscores, and settings that ms-swift would lose."""

import itertools
import subprocess
from pathlib import Path

import pytest

from steelyard.engines import ENGINE_OF_TARGET
from steelyard.errors import UserError
from steelyard.model.read import load_model
from steelyard.plan.plan import Plan, PlanModel
from tests.engines.examples import divided_experts, exported, text_of, uneven_pipeline, uniform
from tests.engines.known import known_names


def run_script(plan: Plan, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The exported script with a `megatron` that prints its arguments and how many processes it would start."""
    (folder / "megatron").write_text('#!/bin/bash\nprintf \'%s\\n\' "$@" "$NNODES x $NPROC_PER_NODE"\n')
    (folder / "megatron").chmod(0o755)
    (folder / "swift.sh").write_text(text_of(plan, "ms-swift", ".sh"))
    known = {"PATH": f"{folder}:/usr/bin:/bin", "MODEL": "a model"}
    return subprocess.run(
        ["bash", "swift.sh", "--lr", "1e-4"],
        cwd=folder,
        env=known | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def arguments_of(plan: Plan, folder: Path) -> dict[str, str]:
    words = run_script(plan, folder).stdout.splitlines()
    return {key: value for key, value in itertools.pairwise(words) if key.startswith("--")}


def test_megatron_runs_it() -> None:
    assert ENGINE_OF_TARGET["ms-swift"].name == "megatron"


def test_its_arguments_are_the_plan(tmp_path: Path) -> None:
    given = arguments_of(uneven_pipeline(first_recomputed=3, parallel="dp2-tp2"), tmp_path)
    wanted = {
        "--model": "a model",
        "--tensor_model_parallel_size": "2",
        "--sequence_parallel": "true",
        "--pipeline_model_parallel_size": "2",
        "--pipeline_model_parallel_layout": "Et*12|t*20L",
        "--recompute_granularity": "full",
        "--recompute_num_layers": "3",
        "--micro_batch_size": "4",
        "--global_batch_size": "64",
        "--max_length": "4096",
        "--bf16": "true",
        "--lr": "1e-4",
    }
    assert wanted.items() <= given.items()


def test_nothing_is_recomputed_where_the_plan_does_not(tmp_path: Path) -> None:
    assert arguments_of(uniform("dp8", devices=8), tmp_path)["--recompute_granularity"] == "none"


def test_experts_are_divided_and_balanced_as_the_config_says(tmp_path: Path) -> None:
    given = arguments_of(divided_experts("mixtral-8x22b", ep=8, num_layers=56, parallel="dp8"), tmp_path)
    assert (given["--expert_model_parallel_size"], given["--moe_router_load_balancing_type"]) == ("8", "none")


def test_options_of_the_engine_are_arguments(tmp_path: Path) -> None:
    plan = uniform("dp4-tp2", devices=8, sp=True)
    options = {"cross_entropy_loss_fusion": "true", "tp_comm_overlap": "true"}
    given = arguments_of(plan.model_copy(update={"engine": "megatron+fused-loss+tp-overlap"}), tmp_path)
    assert {name: given[f"--{name}"] for name in options} == options
    assert {name.removeprefix("--") for name in given} <= known_names("ms-swift-4.6.0.txt")
    plain = arguments_of(plan, tmp_path)
    assert plain["--cross_entropy_loss_fusion"] == "false"  # ms-swift fuses it otherwise
    assert "--tp_comm_overlap" not in plain


def test_it_starts_on_all_hosts_and_asks_each_for_its_number(tmp_path: Path) -> None:
    plan = uniform("dp16", devices=16, cluster="2x8xa100-80gb")
    assert "set NODE_RANK to" in run_script(plan, tmp_path).stderr
    ran = run_script(plan, tmp_path, NODE_RANK="1", MASTER_ADDR="first")
    assert ran.stdout.splitlines()[-1] == "2 x 8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "entries", "found"),
    [
        ("mistral-7b", {"sliding_window": 1024}, "sliding_window"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, "blocks without experts"),
    ],
)
def test_what_it_would_lose_is_refused(model: str, entries: dict[str, object], found: str) -> None:
    config = dict(load_model(model).config) | entries
    plan = uniform("dp4-tp2", devices=8, model=model).model_copy(update={"model": PlanModel(name="x", config=config)})
    with pytest.raises(UserError, match=found):
        exported(plan, "ms-swift")


def test_names_are_those_of_its_arguments(tmp_path: Path) -> None:
    plans = (
        uneven_pipeline(first_recomputed=3, parallel="dp2-tp2"),
        uniform("dp2-cp2-tp2", devices=8, sp=True),
        divided_experts("mixtral-8x22b", ep=8, num_layers=56, parallel="dp8"),
    )
    for plan in plans:
        used = {name.removeprefix("--") for name in arguments_of(plan, tmp_path)}
        assert used <= known_names("ms-swift-4.6.0.txt")
