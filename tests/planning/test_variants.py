"""Tests of variants: a restriction is never faster than the free plan, and none beats the chosen plan."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.dimensions import FSDP
from steelyard.plan.prediction import ONE_STRATEGY
from steelyard.plan.strategy import Remat
from steelyard.planning import complete as complete_requests
from steelyard.planning.choose import PlanningResult, plan_request
from steelyard.planning.explain import SAME
from steelyard.planning.problem import stage_strategies
from steelyard.planning.request import PlanRequest
from steelyard.planning.variants import (
    FREE_CHOICE,
    Answer,
    Study,
    Variant,
    baselines,
    deciding,
    insisting,
    other_pipelines,
    within,
    without_techniques,
)
from steelyard.planning.why_not import widened, widened_text
from tests.cost.examples import cluster, job, plan
from tests.jobs import request_of

NOT_THERE = 1e-9
NO_FASTER = 1 - SAME
"""The search ranks by its sums, the simulator tells the seconds: they may order plans that take the same otherwise."""
TIGHT = 1_362_300_000
JOBS: dict[str, Job] = {
    "roomy": job(cluster(1, 4), global_batch=16),
    "tight": job(cluster(1, 4), global_batch=16).on(budget_bytes=TIGHT),
    "tied": job(cluster(1, 4), global_batch=8, tie_word_embeddings=True).on(budget_bytes=TIGHT),
    "slow links": job(cluster(2, 2, inter_bytes_per_s=1e8), global_batch=8),
}


class Bank:
    """A study of each job, and its free plan."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Study, Answer]] = {}

    def of(self, name: str) -> tuple[Study, Answer]:
        if name not in self._found:
            study = Study(request_of(JOBS[name], time_limit_s=None), JOBS[name])
            self._found[name] = study, study.answer(FREE_CHOICE)
        return self._found[name]


@pytest.fixture(scope="module")
def bank() -> Bank:
    return Bank()


def restricting(study: Study, free: Answer) -> list[Variant]:
    """All named variants of a request that leave less to choose from."""
    assert free.plan is not None
    budget = study.job.budget_bytes
    less = [within(f"{share:.1%} of the memory", int(share * budget)) for share in (0.999, 0.99, 0.5)]
    return [*baselines(), *without_techniques(free.plan), *other_pipelines(free.plan, study), *less]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_no_named_variant_that_restricts_is_faster(name: str, bank: Bank) -> None:
    study, free = bank.of(name)
    variants = restricting(study, free)
    assert len({each.name for each in variants}) == len(variants) > 6
    for variant in variants:
        answer = study.answer(variant)
        assert answer.step_s >= free.step_s * NO_FASTER, variant.name
        assert (answer.plan is None) == math.isinf(answer.step_s)


def test_without_a_dimension_no_layer_has_a_level_of_it_not_even_one_of_degree_1() -> None:
    of = job(cluster(1, 4))
    found = plan(of, ", ".join(["fsdp1-cp4"] * of.chain.num_layers), num_microbatches=1)
    without = {each.name: each for each in without_techniques(found)}
    assert list(without) == ["without cp", "without fsdp"]
    decisions = without["without fsdp"].change(request_of(of)).decisions
    offered = stage_strategies(of, 4, decisions)
    assert offered
    assert not any(FSDP in strategy.dimensions for strategy in offered)
    assert any(str(strategy) == "fsdp1-cp4" for strategy in stage_strategies(of, 4, Decisions()))


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "num_stages": st.sampled_from([1, 2, 4]),
        "num_microbatches": st.sampled_from([1, 2, 4, 8]),
        "schedules": st.sampled_from([("1f1b",), ("gpipe",), ("1f1b", "gpipe")]),
        "remats": st.sampled_from([(Remat.NONE,), (Remat.FULL,), (Remat.NONE, Remat.SELECTIVE)]),
        "modes": st.sampled_from([{"zero": (2,)}, {"zero": (3,)}, {"sp": (False,)}, {"sp": (True,), "zero": (3,)}]),
        "max_degrees": st.sampled_from([{"tp": 1}, {"tp": 2}, {"fsdp": 0}, {"fsdp": 2, "dp": 1}, {"dp": 1}]),
        "space": st.just("paper"),
        "uniform": st.just(True),
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tight", "slow links"])
def test_no_variant_at_random_that_restricts_is_faster(name: str, bank: Bank) -> None:
    study, free = bank.of(name)

    @given(CHOICES, CHOICES)
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def hold(mine: dict[str, Any], other: dict[str, Any]) -> None:
        first = study.answer(deciding("first", Decisions(**mine)))
        assert first.step_s >= free.step_s * NO_FASTER
        if {"num_stages", "num_microbatches"} & mine.keys() & other.keys():
            return  # together they may contradict each other
        both = study.answer(deciding("both", Decisions(**mine).with_also(Decisions(**other))))
        assert both.step_s >= first.step_s * NO_FASTER

    hold()


def test_what_is_already_decided_is_the_whole_request(bank: Bank) -> None:
    study, free = bank.of("tight")
    assert study.answer(deciding("nothing", FREE)).step_s == free.step_s


@pytest.mark.parametrize(
    ("decided", "asked"),
    [
        (Decisions(num_stages=2), Decisions(num_stages=4)),
        (Decisions(num_microbatches=2), Decisions(num_microbatches=4)),
        (Decisions(remats=(Remat.NONE,)), Decisions(remats=(Remat.FULL,))),
        (Decisions(schedules=("1f1b",), num_stages=2), Decisions(schedules=("gpipe",))),
        (FREE, Decisions(num_stages=3)),
        (FREE, Decisions(num_microbatches=5)),
    ],
)
def test_a_variant_that_contradicts_the_request_or_the_job_has_no_plan(decided: Decisions, asked: Decisions) -> None:
    of = JOBS["roomy"]
    answer = Study(request_of(of, decided), of).answer(deciding("other", asked))
    assert (answer.plan, answer.step_s, answer.missing_bytes) == (None, math.inf, None)
    beside = answer.beside(1.0)
    assert (beside.name, beside.step_time_s, beside.slowdown) == ("other", None, None)


@pytest.mark.slow
def test_a_pin_widens_by_what_the_free_search_leaves_out() -> None:
    """Hybrid sharding is searched with groups of one node, or of four."""
    of = job(cluster(4, 2), global_batch=8)
    study = Study(request_of(of, Decisions(num_stages=1, num_microbatches=1)), of)
    free = study.request.decisions
    beyond = widened(of, free, insisting("dp2-fsdp4").change(study.request).decisions)
    assert {strategy.parallel for strategy in beyond} == {"dp2-fsdp4"}
    assert "hybrid sharding is searched with groups of one node" in widened_text(beyond)
    assert study.answer(insisting("dp2-fsdp4")).plan is not None
    assert widened(of, free, insisting("dp4-fsdp2").change(study.request).decisions) == {}


def test_a_pin_of_tp_is_searched_with_states_sharded_over_cp_alone(bank: Bank) -> None:
    study, _ = bank.of("tight")
    beyond = widened(study.job, study.request.decisions, insisting("tp=2").change(study.request).decisions)
    assert {strategy.parallel for strategy in beyond} == {"fsdp1-cp2-tp2"}


@pytest.mark.parametrize("pin", ["tp=4", "blocks 0-1: remat=full", "stages=2"])
def test_a_pin_that_widens_nothing_is_no_faster(pin: str, bank: Bank) -> None:
    study, free = bank.of("tight")
    assert widened(study.job, study.request.decisions, insisting(pin).change(study.request).decisions) == {}
    assert study.answer(insisting(pin)).step_s >= free.step_s * NO_FASTER


def test_every_answer_gets_the_fastest_plan_that_it_allows(bank: Bank) -> None:
    study, free = bank.of("tight")
    slower = replace(free, name="slower", step_s=2 * free.step_s)
    assert free.plan is not None
    found = study.answer(deciding("as it is", Decisions(num_stages=free.plan.num_stages)))
    kept, mended = study.reconciled([found, replace(slower, request=found.request)])
    assert (kept, mended.step_s, mended.plan) == (found, found.step_s, found.plan)
    other = study.answer(deciding("without fsdp", Decisions(max_degrees={"fsdp": 0})))
    assert other.plan is None or study.reconciled([other, free])[0].step_s >= min(other.step_s, free.step_s)


def test_more_memory_is_no_slower(bank: Bank) -> None:
    study, free = bank.of("tight")
    assert study.answer(within("more", 2 * TIGHT)).step_s <= free.step_s * (1 + NOT_THERE)


def complete_with(monkeypatch: pytest.MonkeyPatch, of: Job, **asked: Any) -> PlanningResult:
    monkeypatch.setattr(complete_requests, "job_of", lambda _: of)
    return complete_requests.complete(request_of(of, num_next_best=0, num_fallbacks=0, **asked))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("time_limit_s", [0.0, None])
def test_no_baseline_is_faster_than_the_plan_that_is_chosen(
    name: str, time_limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = complete_with(monkeypatch, JOBS[name], time_limit_s=time_limit_s, simplify=0.0).plan
    assert plan is not None
    assert plan.prediction is not None
    assert [each.name for each in plan.prediction.baselines] == [each.name for each in baselines()]
    times = [each.step_time_s for each in plan.prediction.baselines if each.step_time_s is not None]
    assert plan.prediction.step_time_s <= min(times)
    assert plan.prediction.lower_bound_s <= plan.prediction.step_time_s * (1 + NOT_THERE)


def test_a_baseline_that_the_search_missed_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends early, at a plan in four stages that recomputes everything."""

    def ended_early(request: PlanRequest, of: Job, _: object) -> PlanningResult:
        whole = plan_request(request, of)
        assert whole.plan is not None
        slow = plan_request(replace(request, decisions=Decisions(num_stages=4, remats=(Remat.FULL,))), of).plan
        assert slow is not None
        return replace(whole, plan=slow.model_copy(update={"asked": None}))

    of = JOBS["roomy"]
    monkeypatch.setattr(complete_requests, "plan_request", ended_early)
    plan = complete_with(monkeypatch, of, simplify=0.0).plan
    assert plan is not None
    prediction = plan.prediction
    assert prediction is not None
    best = min(prediction.baselines, key=lambda each: each.step_time_s or math.inf)
    assert best.step_time_s == prediction.step_time_s
    assert plan.num_stages < 4
    assert prediction.certificate.status == "gap"
    assert prediction.certificate.gap == pytest.approx(1 - prediction.lower_bound_s / prediction.step_time_s)


def test_a_uniform_plan_is_the_baseline_of_that_name_and_has_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget has uniform plans of its own: the fallbacks are not taken from those that fit the whole memory."""
    of = JOBS["roomy"]
    monkeypatch.setattr(complete_requests, "job_of", lambda _: of)
    free, uniform = (
        complete_requests.complete(request_of(of, decisions, num_next_best=0, num_fallbacks=2)).plan
        for decisions in (FREE, Decisions(uniform=True))
    )
    assert free is not None
    assert free.prediction is not None
    assert uniform is not None
    assert uniform.prediction is not None
    named = {each.name: each.step_time_s for each in free.prediction.baselines}
    assert uniform.prediction.step_time_s == pytest.approx(named[ONE_STRATEGY])
    blocks = uniform.strategies[1:-1]
    assert len(set(blocks)) == 1
    assert uniform.fallbacks
    assert all(len(set(uniform.fallback_plan(place).strategies[1:-1])) == 1 for place in range(len(uniform.fallbacks)))


def test_a_uniform_plan_that_pins_leave_no_strategy_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of = JOBS["roomy"]
    monkeypatch.setattr(complete_requests, "job_of", lambda _: of)
    pinned = Decisions(uniform=True, pins=("blocks 0-0: tp=2", "blocks 1-1: tp=1"))
    with pytest.raises(UserError, match="--uniform: found no strategy"):
        complete_requests.complete(request_of(of, pinned))
