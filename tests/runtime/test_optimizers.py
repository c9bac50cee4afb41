"""Tests of plans' optimizers: every plan trains as one process, and resumes other plans or optimizers."""

import json
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.errors import InvalidCheckpointError
from steelyard.integrations.run import train
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.runtime.checkpoint_folder import plan_hash
from steelyard.runtime.options import TrainOptions
from tests.runtime.models import CONFIGS, make_plan
from tests.runtime.processes import one_process, run_module

STEPS, MIDDLE = 4, 2
RUN = TrainOptions(steps=STEPS, warmup_steps=0, checkpoint_every=MIDDLE)
WEIGHTS = "adamw, weights in bf16"
RATES = {"adamw": 0.01, "adamw-8bit": 0.01, "adamw-4bit": 0.01, "sgd": 1.0, "adafactor": 0.1, "muon": 0.01}
"""Learning rates with which a few steps change the loss by a tenth or more."""
CONFIG = {**CONFIGS["llama-tied"], "vocab_size": 250}
"""Tied matrix whose shards are no whole number of usual blocks; shards of other tensors are quantized or too small."""
STAGES: dict[str, tuple[str, ...]] = {
    "alone": ("single, single, single, single",),
    "replicated": ("dp2, dp2, dp2, dp2",),
    "stages": ("single, single", "single, single"),
    "sharded": ("fsdp2, fsdp2 zero2, fsdp2, fsdp2",),
    "tensors": ("tp2, tp2+sp, tp2, tp2",),
    "tokens": ("cp2, cp2, cp2, cp2",),
    "mixed": ("fsdp4, tp2-fsdp2, dp2-tp2, fsdp4",),
    "hybrid": ("fsdp4, dp2-fsdp2, fsdp2-cp2, dp4",),
}
DEVICES = {"alone": 1, "mixed": 4, "hybrid": 4}
"""2 of others."""
WORDS = {
    "adamw-8bit": ("alone", "replicated", "stages", "sharded", "tensors", "mixed"),
    "adamw-4bit": ("alone", "stages", "sharded"),  # as with 8 bits, but for the size of a block
    "sgd": ("alone", "stages", "mixed"),
    "adafactor": ("alone", "replicated", "stages"),
    "muon": ("alone", "replicated", "stages", "tokens", "sharded", "hybrid"),
    WEIGHTS: ("alone", "replicated", "stages", "sharded", "mixed"),
}
RUNS = [(word, name) for word, names in WORDS.items() for name in names if name != "alone"]
NIGHTLY = {
    *(("adamw-8bit", "replicated"), ("adamw-8bit", "tensors"), ("adamw-4bit", "sharded")),
    *(("adafactor", "replicated"), ("muon", "replicated"), (WEIGHTS, "replicated"), (WEIGHTS, "stages")),
    *(("adafactor", "stages", "adafactor", "stages"), ("muon", "stages", "muon", "replicated")),
    *(("muon", "stages", "muon", "stages"), (WEIGHTS, "sharded", WEIGHTS, "sharded")),
    *(("muon", "sharded", "muon", "replicated"), ("adamw-8bit", "sharded", "adamw-8bit", "mixed")),
}
"""Runs and resumes whose division is in a mixed or hybrid plan or in one of stages, or goes the other way there."""
EXACT_TOLERANCE = 1e-5
"""Relative tolerance of losses for sums in another order, also with quantized moments of whole tensors (`WHOLE`)."""
TOLERANCE = {"adamw-8bit": 2e-4, "adamw-4bit": 1e-2, "muon": 5e-5, WEIGHTS: 5e-3}
"""Tolerance with quantized moments whose blocks are divided differently, or in fp32 in shards of under 4,096
entries; of Muon, whose updates are products in bf16, which processors round differently."""
WHOLE = {"alone", "replicated", "stages", "tokens"}
RESUMED = [
    ("adamw-8bit", "sharded", "adamw-8bit", "sharded"),
    ("adamw-8bit", "sharded", "adamw-8bit", "mixed"),
    ("adamw-8bit", "sharded", "adamw", "tensors"),
    ("adamw-4bit", "stages", "adamw-4bit", "stages"),
    ("adafactor", "stages", "adafactor", "stages"),
    ("adafactor", "stages", "adafactor", "replicated"),
    ("sgd", "stages", "sgd", "mixed"),
    ("muon", "stages", "muon", "stages"),
    ("muon", "stages", "muon", "replicated"),
    ("muon", "stages", "muon", "hybrid"),
    ("muon", "sharded", "muon", "replicated"),
    (WEIGHTS, "sharded", WEIGHTS, "sharded"),
    (WEIGHTS, "sharded", WEIGHTS, "mixed"),
]
"""Optimizer and plan of a run, and of the one that goes on with its checkpoint."""


@cache
def plan_of(word: str, name: str) -> Plan:
    levers = {WEIGHTS: {"weights": "bf16"}, "adamw": {}}.get(word, {"optimizer": word})
    return make_plan(
        CONFIG,
        *STAGES[name],
        num_microbatches=2,
        global_batch=8,
        num_devices=DEVICES.get(name, 2),
        levers=levers,
        precision="bf16" if word == WEIGHTS else "fp32",
    )


def left_to_the_night(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    """The cases as parameters of a test, those of `NIGHTLY` marked."""
    return [pytest.param(*case, marks=pytest.mark.nightly if case in NIGHTLY else ()) for case in cases]


class Runs:
    """Losses of all runs, and their checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: dict[str, Any] = {}

    def job(self, name: str, plan: Plan, options: TrainOptions) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        write_plan(plan, path)
        rate = RATES[plan.levers.get("optimizer", "adamw")]
        data, arguments = str(self.folder / "tokens.npy"), replace(options, lr=rate).arguments()
        return {"name": name, "plan": str(path), "data": data, "arguments": arguments, "processes": plan.num_devices}

    def jobs(self, asked: Container[tuple[str, ...]]) -> list[dict[str, Any]]:
        """Jobs of the runs that tests ask for, of each optimizer in one process, and of those that go on with them."""
        resumed = [each for each in RESUMED if each in asked]
        written = {(word, name) for word, name, *_ in resumed}
        found = []
        for word, names in WORDS.items():
            for name in names:
                if not (name == "alone" or (word, name) in asked or (word, name) in written):
                    continue
                folder = self.folder / f"{word} {name}" if (word, name) in written else None
                found.append(self.job(f"{word} {name}", plan_of(word, name), replace(RUN, checkpoint_dir=folder)))
        for word, name, other, plan in resumed:
            middle = self.folder / f"{word} {name}" / f"step-{MIDDLE:08d}"
            options = replace(RUN, resume=str(middle))
            found.append(self.job(f"{word} {name}, {other} {plan}", plan_of(other, plan), options))
        return sorted(found, key=lambda job: job["processes"])


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("optimizers"))
    write_tokens(runs.folder)
    jobs, result = runs.folder / "jobs.json", runs.folder / "result.json"
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    jobs.write_text(json.dumps(runs.jobs({tuple(item.callspec.params.values()) for item in items})))
    runs.losses = run_module("tests.runtime.run_worker", jobs, result=result)
    return runs


def write_tokens(folder: Path) -> Path:
    np.save(folder / "tokens.npy", np.arange(20_000, dtype=np.uint16) % 250)
    return folder / "tokens.npy"


@pytest.mark.processes
@pytest.mark.parametrize(("word", "name"), left_to_the_night(RUNS))
def test_losses_equal_those_of_one_process(runs: Runs, word: str, name: str) -> None:
    found, expected = ([loss for _, loss in runs.losses[f"{word} {each}"]] for each in (name, "alone"))
    assert found == pytest.approx(expected, rel=tolerance(word, name))
    if word != WEIGHTS:
        assert found[:2] == pytest.approx(expected[:2], rel=EXACT_TOLERANCE)
    assert expected[-1] < 0.95 * expected[0]


def tolerance(word: str, *names: str) -> float:
    """Tolerance of losses under these plans."""
    is_exact = word not in ("muon", WEIGHTS) and WHOLE.issuperset(names)
    return EXACT_TOLERANCE if is_exact else TOLERANCE.get(word, EXACT_TOLERANCE)


@pytest.mark.processes
@pytest.mark.parametrize("word", WORDS)
def test_no_optimizer_trains_as_another(runs: Runs, word: str) -> None:
    last, *others = (runs.losses[f"{each} alone"][-1] for each in (word, *(each for each in WORDS if each != word)))
    assert last not in others


@pytest.mark.processes
@pytest.mark.parametrize(("word", "name", "other", "plan"), left_to_the_night(RESUMED))
def test_a_run_goes_on_under_another_plan(runs: Runs, word: str, name: str, other: str, plan: str) -> None:
    found = runs.losses[f"{word} {name}, {other} {plan}"]
    expected = runs.losses[f"{word} {name}"][MIDDLE:]
    if (word, name) == (other, plan):
        assert found == expected
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=tolerance(word, name, plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "other"), [("sgd", "adamw"), ("adafactor", "adamw-8bit"), ("adamw-8bit", "adafactor"), ("muon", "adamw")]
)
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path, word: str, other: str) -> None:
    data, options = write_tokens(tmp_path), replace(RUN, steps=1, warmup_steps=0, checkpoint_dir=tmp_path / "written")
    with one_process():
        train(plan_of(word, "alone"), data, options)
    again = replace(RUN, resume=str(tmp_path / "written"))
    with one_process(), pytest.raises(InvalidCheckpointError, match="of the same model and optimizer"):
        train(plan_of(other, "alone"), data, again)


def test_plans_with_unlike_optimizers_are_unlike() -> None:
    hashes = {plan_hash(plan_of(word, "alone")) for word in (*WORDS, "adamw")}
    assert len(hashes) == len(WORDS) + 1
