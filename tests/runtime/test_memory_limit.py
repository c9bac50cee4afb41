"""Tests of the message when memory runs out, and of the budget that can be enforced."""

from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist

from steelyard.errors import InvalidPlanError
from steelyard.plan.plan import Plan
from steelyard.runtime.peak_memory import MemoryExceededError, MemoryLimit
from tests.plan import examples

FAR_TOO_MUCH = 2**50


@pytest.fixture(autouse=True)
def _last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)


def plan(**changes: object) -> Plan:
    return Plan.model_validate(examples.CONTENT | changes)


def test_a_peak_above_the_enforced_budget_names_what_was_predicted_for_the_stage() -> None:
    with pytest.raises(MemoryExceededError) as raised:
        MemoryLimit(plan(), enforce=True).check(1001)
    assert str(raised.value) == (
        "its tensors reached 1001 B in a step; predicted for stage 1: 30 B, of a budget of 1000 B"
    )


def test_a_peak_within_the_budget_passes() -> None:
    MemoryLimit(plan(), enforce=True).check(1000)


def test_no_peak_is_too_much_where_nothing_is_enforced() -> None:
    MemoryLimit(plan(), enforce=False).check(FAR_TOO_MUCH)


def test_a_plan_without_a_budget_cannot_enforce_one() -> None:
    with pytest.raises(InvalidPlanError, match="--enforce-memory"):
        MemoryLimit(plan(prediction=None), enforce=True)


def test_what_pytorch_raises_on_a_gpu_is_explained() -> None:
    with pytest.raises(MemoryExceededError, match="predicted for stage 1"), explained():
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_what_pytorch_raises_on_the_cpu_is_explained() -> None:
    with pytest.raises(MemoryExceededError, match="predicted for stage 1"), explained():
        torch.empty(FAR_TOO_MUCH, dtype=torch.int8)


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^another$"), explained():
        raise RuntimeError("another")


def test_memory_that_ran_out_would_run_out_again() -> None:
    assert MemoryExceededError.is_final


def explained() -> AbstractContextManager[None]:
    return MemoryLimit(plan(), enforce=False).explained()
