"""Tests that `transformers.Trainer` under any plan gives the results of plain Trainer in one process.

One of the plans goes on from a checkpoint of another.
"""

import math
from typing import Any

import pytest

from tests.integrations.trainer_worker import PLANS, STEPS
from tests.runtime.processes import run_module

TOLERANCE = 2e-5
COMPARED = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "total_flos")
PREDICTED = ("test_loss", "test_accuracy", "test_spread", "test_count")

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run_module(
        "tests.integrations.trainer_worker", result=tmp_path_factory.mktemp("trainer") / "result.json"
    )
    return result


def assert_same(history: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [(entry["step"], sorted(entry)) for entry in history] == [
        (entry["step"], sorted(entry)) for entry in expected
    ]
    for entry, wanted in zip(history, expected, strict=True):
        for name in (each for each in COMPARED if each in wanted):
            assert math.isclose(entry[name], wanted[name], rel_tol=TOLERANCE), (name, entry, wanted)


@pytest.mark.parametrize("name", PLANS)
def test_losses_learning_rates_and_evaluations_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    history, expected = found["planned"][name], found["alone"][name]
    if name == "seq2seq":  # Trainer leaves out a head that is tied to the embedding, which on a stage is a copy
        history, expected = ([{**entry, "total_flos": 0.0} for entry in each] for each in (history, expected))
    assert_same(history[:-1], expected[:-1])
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", PLANS)
def test_predictions_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    predicted, expected = found["planned"][name][-1], found["alone"][name][-1]
    assert (predicted["logits"], predicted["labels"]) == (expected["logits"], expected["labels"])
    assert predicted["test_spread"] > 0.1
    for metric in PREDICTED:
        assert math.isclose(predicted[metric], expected[metric], rel_tol=TOLERANCE), (metric, predicted, expected)


def test_layers_of_other_stages_take_no_memory(found: dict[str, Any]) -> None:
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in found["elsewhere"]} == {
        "model.layers",
        "model.norm",
        "lm_head.weight",
    }
    assert {name.split(".")[2] for name in found["elsewhere"] if "layers" in name} == {"0"}


def test_the_best_model_is_loaded_at_the_end(found: dict[str, Any]) -> None:
    evaluated = {entry["step"]: entry["eval_loss"] for entry in found["alone"]["tp+sp"] if "eval_loss" in entry}
    assert found["best step"] == 4
    assert found["best"] == pytest.approx(evaluated[4], rel=TOLERANCE)


def test_checkpoints_are_sharded_and_those_over_the_limit_go(found: dict[str, Any]) -> None:
    assert found["folder"] == ["checkpoint-4"]
    expected = ["scheduler.pt", "step-00000004", "trainer_state.json", *(f"rng_state_{rank}.pth" for rank in range(4))]
    assert found["checkpoint"] == sorted(expected)


def test_weights_are_exported_for_transformers_and_read_back(found: dict[str, Any]) -> None:
    assert found["loss of what was read"] == pytest.approx(found["loss of what was exported"], rel=TOLERANCE)


def test_adapters_alone_are_exported(found: dict[str, Any]) -> None:
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(found["adapters"])
    assert "model.safetensors" not in found["adapters"]


def test_a_signal_to_one_rank_saves_and_ends_all(found: dict[str, Any]) -> None:
    assert found["stopped"] == [3, "step-00000003"]


def test_damaged_checkpoints_and_those_of_another_model_are_refused(found: dict[str, Any]) -> None:
    assert "whose content has changed since it was written" in found["damaged"]["damaged"]
    assert "of test (config" in found["damaged"]["another model"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("routers", "model.config.output_router_logits: found True in the model"),
        ("own loss", "compute_loss_func: found builtin_function_or_method"),
        ("no arguments", "pass TrainingArguments"),
        ("no forward", "a rank has only a part of the model"),
    ],
)
def test_what_a_plan_leaves_no_place_for_is_refused(found: dict[str, Any], name: str, words: str) -> None:
    assert words in found["refused"][name]
