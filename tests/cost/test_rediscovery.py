"""Known answers from known inputs: plans of a model of a billion parameters as memory shrinks."""

from collections.abc import Callable
from functools import cache

import pytest

from steelyard.cost.job import Job
from steelyard.model.read import load_model
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat, Strategy, parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.problem import make_tables
from steelyard.tracer.cache import cached_trace
from steelyard.units import GIB
from tests.jobs import make_job

pytestmark = pytest.mark.slow

MODEL, SEQ_LEN = "llama3.2-1b", 1024
OPTIONS = Decisions(num_stages=1, num_microbatches=8)
"""Eight microbatches: sharded parameters are gathered in each, whole ones and their gradients are sent once."""


@pytest.fixture(scope="module")
def job() -> Job:
    profile = cached_trace(load_model(MODEL), seq_len=SEQ_LEN, precision="bf16", degrees=(1, 2, 4, 8))
    return make_job(
        MODEL, "1x8xa100-80gb", global_batch=64, seq_len=SEQ_LEN, precision="bf16", memory=None, profile=profile
    )


@pytest.fixture(scope="module")
def planned(job: Job) -> Callable[[float], Plan]:
    """The plan within so many GiB, searched once."""
    tables = make_tables(job, OPTIONS)

    @cache
    def plan(memory_gib: float) -> Plan:
        found = plan_job(job.on(budget_bytes=int(memory_gib * GIB)), OPTIONS, tables=tables).plan
        assert found is not None
        return found

    return plan


def blocks(plan: Plan) -> tuple[Strategy, ...]:
    return plan.strategies[1:-1]


def test_roomy_memory_shards_nothing_but_the_states_of_the_optimizer(planned: Callable[[float], Plan]) -> None:
    assert set(blocks(planned(70))) == {parse_strategy("fsdp8 zero1")}


def test_roomy_memory_gives_plain_data_parallel_where_layers_are_sharded_for_good_or_not_at_all(job: Job) -> None:
    found = plan_job(job, OPTIONS.with_also(Decisions(modes={"zero": (3,)}))).plan
    assert found is not None
    assert set(blocks(found)) == {parse_strategy("dp8")}


def test_less_memory_shards_the_states_of_every_block(planned: Callable[[float], Plan]) -> None:
    assert all(strategy.state_shards > 1 and strategy.remat is Remat.NONE for strategy in blocks(planned(10)))


def test_still_less_memory_recomputes_activations(planned: Callable[[float], Plan]) -> None:
    assert any(strategy.remat is Remat.FULL for strategy in blocks(planned(7)))


def test_far_too_little_memory_gives_the_bytes_that_are_missing(job: Job) -> None:
    result = plan_job(job.on(budget_bytes=2 * GIB), OPTIONS)
    assert result.plan is None
    assert "more: the nearest plan has" in result.miss_text


def test_more_memory_never_costs_time(planned: Callable[[float], Plan]) -> None:
    found = [planned(memory).prediction for memory in (7, 10, 12, 40, 70)]
    times = [prediction.step_time_s for prediction in found if prediction is not None]
    assert times == sorted(times, reverse=True)


def test_what_is_planned_fits_its_own_upper_bound(planned: Callable[[float], Plan]) -> None:
    for memory in (7, 12, 40):
        prediction = planned(memory).prediction
        assert prediction is not None
        assert max(stage.total_bytes for stage in prediction.stages) <= memory * GIB
