"""Tests that fp16 trains as one fp32 process does, and that loss scaling changes only overflowing steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.integrations.run import train
from steelyard.plan.shrink import TOLERANCES
from steelyard.runtime import loss_scale
from steelyard.runtime.options import TrainOptions
from tests.runtime.models import make_plan
from tests.runtime.processes import one_process, run_parity, run_ranks
from tests.runtime.scale_cases import CASES, EXPERTS, SCALED, SHORT

pytestmark = pytest.mark.processes

LOSS_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES["fp16"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_parity("tests.runtime.scale_cases", tmp_path_factory.mktemp("fp16") / "result.json")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, worker = tmp_path_factory.mktemp("scale"), "tests.runtime.scale_worker"
    return run_ranks(f"{worker}:on_four", 4, folder) | run_ranks(f"{worker}:on_two", 2, folder)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_norms_in_fp16_are_near_fp32(trained: dict[str, dict[str, Any]], name: str) -> None:
    assert trained[name]["losses"] == pytest.approx(trained[name]["expected_losses"], rel=LOSS_TOLERANCE)
    assert trained[name]["norms"] == pytest.approx(trained[name]["expected_norms"], rel=1e-2)
    assert trained[name]["strategies"] == [str(strategy) for strategy in CASES[name].plan.strategies]


@pytest.mark.parametrize("name", [name for name in CASES if name != EXPERTS])
def test_gradients_in_fp16_are_near_fp32(trained: dict[str, dict[str, Any]], name: str) -> None:
    assert trained[name]["gradient_error"] < GRADIENT_TOLERANCE, trained[name]["gradient_tensor"]


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_that_doubles_in_each_step_changes_no_digit(found: dict[str, Any], name: str) -> None:
    ran = found[f"scaled {name}"]
    assert ran["found"]["losses"] == ran["expected"]["losses"]
    assert ran["found"]["norms"] == ran["expected"]["norms"]
    assert ran["difference"] == 0.0
    first, second = ran["found"]["scales"]
    assert second == 2 * first
    assert ran["same_scales"]


@pytest.mark.parametrize(("name", "num_ranks"), [("overflow", 2), ("overflow in a pipeline", 4)])
def test_all_ranks_skip_the_step_in_which_one_overflows(found: dict[str, Any], name: str, num_ranks: int) -> None:
    ran, before = found[name], found[name]["first"]["scales"][0]
    assert ran["skipped"] == [[True]] * num_ranks
    assert ran["changed"] == 0.0
    assert ran["scales"] == [[before, before / 2, before / 2]] * num_ranks


@pytest.mark.parametrize("name", ["overflow", "overflow in a pipeline"])
def test_a_run_goes_on_as_if_a_skipped_step_had_not_been(found: dict[str, Any], name: str) -> None:
    assert found[name]["difference"] == 0.0


def test_a_run_resumes_with_its_scale_under_another_plan(found: dict[str, Any]) -> None:
    ran = found["resumed"]
    assert ran["read"] == ran["saved"]
    assert ran["saved"][1] == 2  # steps since it was halved
    assert ran["after"]["scales"] == ran["expected"]["scales"]
    assert ran["after"]["losses"] == pytest.approx(ran["expected"]["losses"], rel=LOSS_TOLERANCE)


def test_a_checkpoint_before_any_update_can_be_resumed(found: dict[str, Any]) -> None:
    assert found["resumed"]["skipped"] == found["resumed"]["saved"][0]


def test_a_run_goes_on_in_bf16_and_back_with_a_new_scale(found: dict[str, Any]) -> None:
    assert found["resumed"]["of_bf16"] == 65536 * SHORT.plan.global_batch


def test_gradients_that_are_never_finite_end_the_run(found: dict[str, Any]) -> None:
    assert found["never ends"]["error"] == "DivergedError"
    assert found["never ends"]["count"] == 4  # halves 2^4 down to 1
    assert "loss scale" in found["never ends"]["message"]


def test_a_run_reports_the_steps_it_skips_and_resumes_with_its_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**32)
    plan = make_plan("llama-tied", "single, single, single, single", num_devices=1, precision="fp16", seq_len=16)
    folder, metrics = tmp_path / "checkpoints", tmp_path / "m.jsonl"
    options = TrainOptions(steps=1, checkpoint_dir=folder, metrics=metrics)
    with one_process():
        first = train(plan, "synthetic", options)  # its checkpoint has a scale, and optimizers that did nothing
        ran = train(plan, "synthetic", replace(options, steps=24, allow_change="steps"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    skipped = [line.get("skipped", False) for line in lines]
    count = skipped.index(False)
    assert count > 2
    assert skipped == [True] * count + [False] * (24 - count)
    assert [line["loss_scale"] for line in lines] == [2.0 ** (37 - min(number, count)) for number in range(24)]
    assert [line["grad_norm"] == 0 for line in lines] == skipped
    assert lines[-1]["memory_bytes"] == ran.ranks[0].peak_bytes
    states = 8 * ran.ranks[0].num_params
    assert ran.ranks[0].peak_bytes - first.ranks[0].peak_bytes > 0.9 * states


def test_gradients_of_several_batches_add_up(found: dict[str, Any]) -> None:
    assert found["accumulated"]["difference"] < 1e-6
