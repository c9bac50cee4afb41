"""Tests of partly frozen runs: saved and exported content, and resuming under another plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.modules.build import build_model
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from tests.runtime.frozen_cases import frozen_plan
from tests.runtime.processes import run_module
from tests.runtime.test_checkpoints import MIDDLE, RUN, STEPS, UNEVEN, load_folder, stored

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

FROZEN = ("model.embed_tokens", "model.layers.0", "model.layers.1.mlp")


def _plan(*stages: str, num_microbatches: int) -> Plan:
    sizes = {"global_batch": 8, "num_microbatches": num_microbatches, "num_devices": 4}
    return frozen_plan(FROZEN, UNEVEN, *stages, **sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of three runs: one, and two that resume from its middle, under the same plan and another."""
    folder = tmp_path_factory.mktemp("frozen")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 250, 20_000).astype(np.uint16))
    one = _plan("fsdp4 zero2, fsdp4, tp2-fsdp2+sp, fsdp4", num_microbatches=2)
    other = _plan("dp2, fsdp2", "tp2, dp2", num_microbatches=4)
    middle = str(folder / "whole" / f"step-{MIDDLE:08d}")
    jobs = []
    for name, plan, options in (
        ("whole", one, replace(RUN, checkpoint_dir=folder / "whole", export_hf=folder / "weights")),
        ("same", one, replace(RUN, checkpoint_dir=folder / "same", resume=middle)),
        ("other", other, replace(RUN, checkpoint_dir=folder / "other", resume=middle)),
    ):
        write_plan(plan, folder / f"{name}.json")
        of = {"plan": str(folder / f"{name}.json"), "data": str(folder / "tokens.npy"), "processes": 4}
        jobs.append({"name": name, "arguments": options.arguments(), **of})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_module("tests.runtime.run_worker", folder / "jobs.json", result=folder / "losses.json")
    return folder


def _losses(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "losses.json").read_text())
    return found


def _is_frozen(name: str) -> bool:
    return name.startswith(tuple(f"{each}." for each in FROZEN))


def test_a_run_goes_on_under_its_plan_and_another_as_if_it_had_not_stopped(folder: Path) -> None:
    losses = _losses(folder)
    assert losses["same"] == losses["whole"][MIDDLE:]
    assert [step for step, _ in losses["other"]] == list(range(MIDDLE + 1, STEPS + 1))
    assert [loss for _, loss in losses["other"]] == pytest.approx(
        [loss for _, loss in losses["whole"][MIDDLE:]], rel=1e-5
    )


def test_a_checkpoint_has_moments_of_what_is_trained_alone(folder: Path) -> None:
    for name in ("whole", "other"):
        tensors = stored(folder / name / f"step-{STEPS:08d}")
        with_moments = {each.split(".", 1)[1].rpartition(".")[0] for each in tensors if each.startswith("optimizer.")}
        parameters = {each.removeprefix("model.") for each in tensors if each.startswith("model.")}
        assert with_moments == {each for each in parameters if not _is_frozen(each)}


def test_what_is_frozen_is_exported_as_it_was_and_the_rest_as_it_became(folder: Path) -> None:
    first = build_model(_plan("dp4, dp4, dp4, dp4", num_microbatches=1).chain(), seed=RUN.seed)
    weights = load_folder(folder / "weights")
    for name, parameter in first.named_parameters():
        assert torch.equal(weights[name], parameter.detach()) == _is_frozen(name), name
