"""Tests that stages do not exceed the usual number unless they gain; the cost is reported, decisions kept."""

from dataclasses import replace
from functools import cache

import pytest

from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import simplicity_line
from steelyard.planning import simple
from steelyard.planning.complete import complete
from steelyard.planning.request import SIMPLIFY, make_request
from tests.cost.examples import CONFIG

DEEP = CONFIG | {
    **{"hidden_size": 1024, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"intermediate_size": 2816, "vocab_size": 8192, "max_position_embeddings": 2048},
}


def request(engine="native", **asked):
    """Sixteen devices that a slow network joins, so that many stages are fastest."""
    found = make_request(DEEP, "16x1xa100-80gb", global_batch=64, seq_len=2048, network="ethernet-10", engine=engine)
    return replace(found, num_fallbacks=0, num_next_best=0, **asked)


@cache
def fastest(engine: str) -> Plan:
    return complete(request(engine, simplify=0.0)).plan


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_a_plan_of_fewer_stages_stands_for_a_deeper_one_that_gains_little(engine, monkeypatch):
    deep = fastest(engine)
    monkeypatch.setattr(simple, "USUAL_STAGES", deep.num_stages // 2)
    monkeypatch.setattr(simple, "DEPTH_GAIN", 1.0)
    plan = complete(request(engine)).plan
    least = complete(request(engine, simplify=0.0, decisions=Decisions(most_stages=deep.num_stages // 2))).plan
    given_up = plan.prediction.fastest
    assert plan.num_stages <= deep.num_stages // 2
    assert given_up.num_stages == deep.num_stages
    assert given_up.step_time_s == pytest.approx(deep.prediction.step_time_s)
    within = least.prediction.step_time_s * (1 + SIMPLIFY) + 1e-9
    assert deep.prediction.step_time_s <= plan.prediction.step_time_s <= within
    slower = plan.prediction.step_time_s / deep.prediction.step_time_s - 1
    assert f"{slower:.1%} slower than the fastest plan, of {deep.num_stages} stages" in str(plan)
    assert not plan.prediction.certificate.is_optimal
    proven_s, of_usual_depth_s = (
        each.prediction.step_time_s * (1 - each.prediction.certificate.gap) for each in (plan, least)
    )
    assert proven_s == pytest.approx(of_usual_depth_s)
    for each in plan.prediction.baselines:  # compared within the same depths, so that none is faster by more
        assert (each.step_time_s or 1e9) >= least.prediction.step_time_s * (1 - 1e-9)


def test_a_deeper_plan_stays_where_it_gains_more(monkeypatch):
    deep = fastest("native")
    monkeypatch.setattr(simple, "USUAL_STAGES", 1)
    monkeypatch.setattr(simple, "DEPTH_GAIN", 0.0)
    plan = complete(request()).plan
    assert plan.num_stages == deep.num_stages


def test_what_was_decided_of_stages_holds(monkeypatch):
    monkeypatch.setattr(simple, "USUAL_STAGES", 1)
    monkeypatch.setattr(simple, "DEPTH_GAIN", 10.0)
    assert complete(request(decisions=Decisions(num_stages=8))).plan.num_stages == 8
    assert complete(request(decisions=Decisions(pins=("stages=4",)))).plan.num_stages == 4
    assert complete(request(simplify=0.0)).plan.num_stages == fastest("native").num_stages


def test_most_stages_is_a_decision_of_its_own():
    plan = complete(request(decisions=Decisions(most_stages=2))).plan
    assert plan.num_stages <= 2
    assert plan.asked == Decisions(most_stages=2)
    assert Decisions(most_stages=4).with_also(Decisions(most_stages=2), Decisions()).most_stages == 2
    assert list(Decisions(most_stages=4).one_by_one()) == ["--max-stages 4"]
    assert not Decisions(most_stages=4, num_stages=8).allows_stages(8)


def test_depth_follows_the_size_of_a_model():
    """Eight stages up to 120 billion parameters, as many as experts have beyond."""
    for billions, stages in {8: 8, 70: 8, 176: 11, 405: 27, 530: 35, 1008: 67}.items():
        assert max(simple.USUAL_STAGES, billions * 10**9 // simple.STAGE_PARAMS) == stages


def test_words_name_groups_and_stages_as_far_as_they_are_fewer():
    plan = fastest("native")
    given_up = {"step_time_s": plan.prediction.step_time_s / 1.028, "memory_bytes": 1, "setting": "", "strategies": ""}
    known = simple.FastestPlan(num_groups=plan.num_groups, num_stages=32, **given_up)
    told = plan.prediction.model_copy(update={"fastest": known})
    words = "8 stages: 2.8% slower than the fastest plan, of 32 stages (choose it with --simplify 0)"
    assert simplicity_line(plan.num_groups, 8, told) == words
    both = plan.prediction.model_copy(update={"fastest": known.model_copy(update={"num_groups": 40})})
    assert "3 groups of layers, 8 stages: 2.8% slower than the fastest plan, of 32 stages and 40 groups" in (
        simplicity_line(3, 8, both)
    )
