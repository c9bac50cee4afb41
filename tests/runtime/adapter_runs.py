"""Runs of models with adapters, several per launch, and what these models compute."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.runtime.options import TrainOptions
from tests.runtime.processes import run_module


def run_all(folder: Path, runs: Iterable[tuple[str, Plan, TrainOptions]]) -> None:
    """Train by name on ``tokens.npy`` of a folder, and write ``losses.json`` there; runs of as many processes share one
    launch.
    """
    jobs = []
    for name, plan, options in runs:
        write_plan(plan, folder / f"{name}.json")
        data = None if options.dataset else str(folder / "tokens.npy")
        of = {"plan": str(folder / f"{name}.json"), "data": data, "processes": plan.num_devices}
        jobs.append({"name": name, "arguments": options.arguments(), **of})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_module("tests.runtime.run_worker", folder / "jobs.json", result=folder / "losses.json")


def logits_of(model: Any) -> Tensor:
    """The logits of two samples."""
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.arange(32).view(2, 16)).logits
    return logits
