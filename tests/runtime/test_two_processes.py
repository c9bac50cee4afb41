"""Tests that need two ranks: dropout on different and identical shares, microbatch sync, precision."""

from typing import Any

import pytest

from tests.runtime.processes import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", name="facts")
def _facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks("tests.runtime.two_process_worker:everything", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "tp2+sp"])
def test_dropout_is_the_same_in_two_runs_of_a_plan(facts: dict[str, Any], strategy: str) -> None:
    first, second = facts[f"dropout {strategy}"]["runs"]
    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "tp2+sp"])
def test_replicated_parameters_get_the_same_gradients_under_dropout(facts: dict[str, Any], strategy: str) -> None:
    assert facts[f"dropout {strategy}"]["replicas_differ"] == 0


def test_data_parallel_ranks_drop_other_entries(facts: dict[str, Any]) -> None:
    first, second = facts["dropout dp2"]["own"]
    assert first != second


def test_tensor_parallel_ranks_compute_the_same_loss_under_dropout(facts: dict[str, Any]) -> None:
    first, second = facts["dropout tp2"]["own"]
    assert first == second


def test_replicated_layers_synchronise_once_a_step_however_many_microbatches(facts: dict[str, Any]) -> None:
    assert facts["collectives dp2 4"] == facts["collectives dp2 1"]
    assert sum(facts["collectives dp2 1"].values()) > 0


def test_sharded_layers_reduce_their_gradients_in_every_microbatch_to_keep_them_sharded(facts: dict[str, Any]) -> None:
    one, four = (facts[f"collectives fsdp2 {count}"]["c10d::_reduce_scatter_base_"] for count in (1, 4))
    assert (one, four) == (4, 16)


def test_zero_2_gathers_half_as_often_as_zero_3(facts: dict[str, Any]) -> None:
    kept, freed = (facts[f"collectives {name} 1"]["c10d::_allgather_base_"] for name in ("fsdp2 zero2", "fsdp2"))
    assert (kept, freed) == (4, 8)


def test_zero_1_gathers_and_reduces_once_a_step_however_many_microbatches(facts: dict[str, Any]) -> None:
    """The head is an exception: FSDP gathers it once more as a step of several ends (`tests.cost.test_sent_bytes`)."""
    one, four = (facts[f"collectives fsdp2 zero1 {count}"] for count in (1, 4))
    assert [each["c10d::_reduce_scatter_base_"] for each in (one, four)] == [4, 4]
    assert [each["c10d::_allgather_base_"] for each in (one, four)] == [4, 5]


@pytest.mark.parametrize("strategy", ["dp2", "fsdp2", "tp2"])
def test_bf16_computes_in_bf16_and_keeps_and_reduces_in_fp32(facts: dict[str, Any], strategy: str) -> None:
    assert facts[f"precision {strategy}"] == {
        "parameters": "torch.float32",
        "gradients": "torch.float32",
        "states": "torch.float32",
        "computed": "torch.bfloat16",
        "reduced": "torch.float32",
    }
