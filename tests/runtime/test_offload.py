"""Tests of runs with offload: equal to one process, bitwise equal without offload, resuming any run."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from tests.runtime.models import make_plan
from tests.runtime.processes import run_module
from tests.runtime.test_optimizers import CONFIG, DEVICES, EXACT_TOLERANCE, MIDDLE, RUN, write_tokens
from tests.runtime.test_optimizers import STAGES as PLAIN

STAGES = {
    **PLAIN,
    "remat": ("tp2, tp2+sp remat=full, fsdp2 remat=full, fsdp2 zero2",),
    "gathered": ("fsdp2, fsdp2 remat=full, fsdp2, fsdp2",),
}
MOVED = [
    *(("optimizer", name) for name in ("alone", "stages", "sharded", "mixed")),
    *(("activations", name) for name in ("replicated", "stages", "tokens", "remat")),
    ("optimizer+activations", "mixed"),
    *(("parameters", name) for name in ("stages", "gathered", "tensors")),
    ("parameters+activations", "alone"),
]
RESUMED = [
    ("optimizer", "sharded", "optimizer", "sharded"),
    ("optimizer", "sharded", "none", "mixed"),
    ("none", "sharded", "optimizer", "stages"),
    ("parameters", "gathered", "parameters", "gathered"),
    ("parameters", "gathered", "none", "stages"),
    ("none", "sharded", "parameters", "tensors"),
]
"""Offload and plan of a run, and of the run that resumes its checkpoint."""
NIGHTLY = {("optimizer", "alone"), ("optimizer", "mixed"), ("activations", "replicated")}
"""Runs of which both halves are in one: a rank with whole tensors on stages, all of a mixed plan under both words."""


@cache
def plan_of(word: str, name: str) -> Plan:
    return make_plan(
        CONFIG,
        *STAGES[name],
        num_microbatches=2,
        global_batch=8,
        num_devices=DEVICES.get(name, 2),
        levers={} if word == "none" else {"offload": word},
    )


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    asked = [item for item in request.session.items if item.path == request.path]
    moved = MOVED
    if not any(item.get_closest_marker("nightly") for item in asked):
        moved = [each for each in MOVED if each not in NIGHTLY]
    folder = tmp_path_factory.mktemp("offload")
    data, options = write_tokens(folder), replace(RUN, lr=0.01)

    def job(name: str, plan: Plan, **changes: Any) -> dict[str, Any]:
        path = folder / f"{name}.json"
        write_plan(plan, path)
        arguments = replace(options, **changes).arguments()
        return {
            "name": name,
            "plan": str(path),
            "data": str(data),
            "arguments": arguments,
            "processes": plan.num_devices,
        }

    written = {(word, name) for word, name, *_ in RESUMED}
    plain = dict.fromkeys(("alone", "sharded", *(name for word, name in moved if "parameters" not in word)))
    jobs = [
        job(
            f"{word} {name}",
            plan_of(word, name),
            checkpoint_dir=folder / f"{word} {name}" if (word, name) in written else None,
        )
        for word, name in [*(("none", name) for name in plain), *moved]
    ]
    for word, name, other, plan in RESUMED:
        middle = Path(folder) / f"{word} {name}" / f"step-{MIDDLE:08d}"
        jobs.append(job(f"{word} {name}, {other} {plan}", plan_of(other, plan), resume=str(middle)))
    (folder / "jobs.json").write_text(json.dumps(sorted(jobs, key=lambda job: job["processes"])))
    return run_module("tests.runtime.run_worker", folder / "jobs.json", result=folder / "result.json")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("word", "name"), [pytest.param(*each, marks=pytest.mark.nightly if each in NIGHTLY else ()) for each in MOVED]
)
def test_losses_are_those_without_offload_and_of_one_process(losses: dict[str, Any], word: str, name: str) -> None:
    if "parameters" not in word:  # where FSDP moves them, it also does what else a replica does
        assert losses[f"{word} {name}"] == losses[f"none {name}"]
    found, expected = ([loss for _, loss in losses[each]] for each in (f"{word} {name}", "none alone"))
    assert found == pytest.approx(expected, rel=EXACT_TOLERANCE)
    assert expected[-1] < 0.95 * expected[0]


@pytest.mark.processes
@pytest.mark.parametrize(("word", "name", "other", "plan"), RESUMED)
def test_a_run_goes_on_under_another_plan(losses: dict[str, Any], word: str, name: str, other: str, plan: str) -> None:
    found, expected = losses[f"{word} {name}, {other} {plan}"], losses[f"{word} {name}"][MIDDLE:]
    if (word, name) == (other, plan):
        assert found == expected
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=EXACT_TOLERANCE)
