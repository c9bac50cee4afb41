"""Tests that users' own modules train as one process under all plans; checkpoints resume under other plans."""

from typing import Any

import pytest

from tests.runtime.processes import run_ranks

pytestmark = pytest.mark.processes

PAIRS = [
    *(f"{name} tensors" for name in ("nanogpt", "titan", "dit", "sequential", "stock")),
    *(f"{name} stages" for name in ("nanogpt", "sequential", "unet", "towers")),
    *("dit data", "unet data"),
]


@pytest.fixture(scope="module", name="facts")
def _facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks("tests.runtime.own_worker:everything", 4, tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("pair", PAIRS)
def test_losses_gradients_and_weights_are_those_of_one_process(facts: dict[str, Any], pair: str) -> None:
    found = facts[pair]
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["error"][0] < 1e-4, found["error"][1]


@pytest.mark.parametrize("pair", PAIRS)
def test_evaluation_is_that_of_one_process(facts: dict[str, Any], pair: str) -> None:
    assert facts[pair]["evaluated"] == pytest.approx(facts[pair]["expected_evaluated"], rel=1e-5)


def test_a_checkpoint_goes_on_under_another_plan(facts: dict[str, Any]) -> None:
    found = facts["resumed"]
    assert found["steps"] == 3
    assert found["found"] == pytest.approx(found["expected"], rel=1e-5)


def test_bf16_trains_near_fp32(facts: dict[str, Any]) -> None:
    assert facts["bf16"] == pytest.approx(facts["dit data"]["expected"], rel=0.02)
    assert facts["bf16"] != facts["dit data"]["losses"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("module", ("found NanoGPT without a block blocks.0", "DiT with it, as planned")),
        ("loss", ("found no loss function", "the loss function of the plan")),
        ("samples", ("found 0.x of float32 and shape [3, 3, 8, 8]", "shape [4, 3, 8, 8]")),
    ],
)
def test_what_is_not_the_plans_is_refused(facts: dict[str, Any], what: str, words: tuple[str, ...]) -> None:
    assert all(each in facts["refused"][what] for each in words)
