"""Tests of time and memory of the remat choices: the terms, and the order between the choices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.compute import launch_s, work_s
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer import KnownPasses, LayerCost, layer_cost, layer_costs
from steelyard.cost.layer_load import refusal
from steelyard.errors import InvalidProfileError
from steelyard.plan.decisions import Decisions
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning.problem import pipeline_configs, stage_strategies
from steelyard.profiles.profile import LayerProfile, MeasuredTime
from tests.cost.examples import SEQ_LEN, config, job
from tests.cost.layer_bytes import LayerBytes, layer_bytes
from tests.jobs import make_job
from tests.shapes import tp_shape

STRATEGIES = ("dp8", "fsdp8", "fsdp8 zero2", "tp8", "tp8+sp", "fsdp4-tp2", "dp2-tp4+sp", "tp2-fsdp4")
strategies = st.sampled_from(STRATEGIES)
HIDDEN_BYTES = 2 * SEQ_LEN * 64


def block(text: str, where: JobConfig | None = None) -> LayerCost[float]:
    where = where or config()
    return layer_cost(where.job.chain.layer_types[1], parse_strategy(text), where)


def held(text: str, where: JobConfig | None = None) -> LayerBytes:
    where = where or config()
    return layer_bytes(where.job.chain.layer_types[1], parse_strategy(text), where)


def profile_of(of: Job, tp: int = 1) -> LayerProfile:
    found = of.profile.layer("block", tp_shape(tp, False))
    assert found is not None
    return found


def measured_job(*times: MeasuredTime) -> Job:
    """The job with these times for every layer."""
    of = job()
    layers = tuple(layer.model_copy(update={"times": times}) for layer in of.profile.layers)
    return of.on(profile=of.profile.model_copy(update={"layers": layers}))


@given(strategies)
def test_less_is_kept_the_more_is_computed_again(text: str) -> None:
    none, selective, full = (block(text + remat) for remat in ("", " remat=selective", " remat=full"))
    assert none.microbatch_s < selective.microbatch_s < full.microbatch_s
    whole, some, least = (held(text + remat) for remat in ("", " remat=selective", " remat=full"))
    assert whole.activation_bytes > some.activation_bytes > least.activation_bytes
    assert whole.static_bytes == some.static_bytes == least.static_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_costs_of_choices_made_together_are_those_of_each_alone(model: str) -> None:
    of = make_job(model, "2x8xh100-80gb", global_batch=16, seq_len=4096, precision="bf16", memory=None, profile=None)
    where = next(iter(pipeline_configs(of, Decisions())))
    offered = stage_strategies(of, where.devices_per_stage, Decisions())
    for layer_type in of.chain.layer_types:
        known: KnownPasses = {}
        legal = [strategy for strategy in offered if refusal(layer_type, strategy, where) is None]
        assert {strategy.remat for strategy in legal} >= {Remat.NONE, Remat.FULL}
        for strategy in legal:
            assert layer_costs(layer_type, strategy, where, known) == layer_costs(layer_type, strategy, where, {})
        assert known


@given(strategies)
def test_the_forward_pass_takes_the_same_time_under_every_choice(text: str) -> None:
    none, selective, full = (block(text + remat) for remat in ("", " remat=selective", " remat=full"))
    assert none.forward_s == selective.forward_s == full.forward_s


def test_selective_keeps_what_the_profile_says() -> None:
    samples = 64 // 8
    assert held("dp8 remat=selective").activation_bytes == (10 + 1) / 2 * samples * HIDDEN_BYTES


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_the_repeated_work_is_priced_as_other_work(remat: str) -> None:
    of, samples = job(), 64 // 8
    again = profile_of(of).recomputation(remat)
    expected = max(work_s(again.work, samples, of), launch_s(again.work, again.collectives, of))
    assert block(f"dp8 remat={remat}", config(of)).backward_s["remat"] == pytest.approx(expected)


def test_selective_repeats_no_collective_of_tp_without_sp_and_full_does() -> None:
    busy = config(job(global_batch=4096))
    selective, full = (block(f"tp8 remat={remat}", busy).backward_s["remat"] for remat in ("selective", "full"))
    of, samples = busy.job, 4096
    layer = profile_of(of, 8)
    assert selective == pytest.approx(work_s(layer.recomputation("selective").work, samples, of))
    assert full > work_s(layer.recomputation("full").work, samples, of)


def test_what_a_choice_repeats_is_in_the_working_set() -> None:
    where = config(job(global_batch=4096))
    none, selective = held("fsdp8", where), held("fsdp8 remat=selective", where)
    kept_less = none.activation_bytes - selective.activation_bytes
    assert 0 < selective.transient_bytes - none.transient_bytes <= 1.5 * kept_less


def test_measured_seconds_are_taken_as_they_are() -> None:
    of = measured_job(MeasuredTime(samples=8, forward_s=1.0, backward_s=2.0, selective_s=0.25, full_s=0.75))
    assert block("dp8 remat=selective", config(of)).backward_s["remat"] == 0.25
    assert block("dp8 remat=full", config(of)).backward_s["remat"] == 0.75


def test_measured_seconds_lie_between_those_of_the_sizes() -> None:
    few, many = (
        MeasuredTime(samples=count, forward_s=1.0, backward_s=2.0, selective_s=count / 10, full_s=count / 2)
        for count in (4, 16)
    )
    assert block("dp8 remat=full", config(measured_job(few, many))).backward_s["remat"] == pytest.approx(4.0)


def test_a_choice_that_was_not_measured_is_an_error() -> None:
    of = measured_job(MeasuredTime(samples=8, forward_s=1.0, backward_s=2.0, full_s=0.75))
    with pytest.raises(InvalidProfileError, match="no seconds of remat selective"):
        block("dp8 remat=selective", config(of))


def test_a_choice_that_was_not_traced_is_an_error() -> None:
    of = job()
    bare = tuple(layer.model_copy(update={"recomputations": ()}) for layer in of.profile.layers)
    of = of.on(profile=of.profile.model_copy(update={"layers": bare}))
    with pytest.raises(InvalidProfileError, match="no entry for remat full"):
        block("dp8 remat=full", config(of))
