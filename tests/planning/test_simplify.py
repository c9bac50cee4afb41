"""Tests of the simplest plan within a share of the best: fewer groups of layers, within the slowdown, and it fits."""

from dataclasses import replace
from functools import cache

import pytest

from steelyard.errors import UserError
from steelyard.model.chain import LayerRole
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Prediction, simplicity_line
from steelyard.planning.complete import complete
from steelyard.planning.job import job_of
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import SIMPLIFY, PlanRequest, make_request
from steelyard.planning.simple import with_reasons


def request(**asked: object) -> PlanRequest:
    found = make_request("llama3-8b", "1x8xa100-80gb", global_batch=64, seq_len=8192)
    return replace(found, num_fallbacks=0, num_next_best=1, **asked)  # type: ignore[arg-type]


@cache
def planned(share: float) -> Plan:
    plan = complete(request(simplify=share)).plan
    assert plan is not None
    return plan


def prediction(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


@pytest.mark.slow
def test_a_larger_share_gives_a_simpler_plan_that_takes_no_more_than_the_share() -> None:
    plans = {share: planned(share) for share in (0.0, 0.01, 0.05)}
    best_s = prediction(plans[0.0]).step_time_s
    assert plans[0.05].num_groups <= plans[0.01].num_groups < plans[0.0].num_groups
    for share, plan in plans.items():
        assert best_s * (1 - 1e-9) <= prediction(plan).step_time_s <= best_s * (1 + share)
        assert peak_bytes(plan) <= prediction(plan).budget_bytes
    assert prediction(plans[0.0]).fastest is None


@pytest.mark.slow
def test_a_simple_plan_says_what_it_costs_and_claims_no_optimum() -> None:
    best, simple = planned(0.0), planned(SIMPLIFY)
    fastest, certificate = prediction(simple).fastest, prediction(simple).certificate
    assert fastest is not None
    assert fastest.step_time_s == pytest.approx(prediction(best).step_time_s)
    assert fastest.num_groups == best.num_groups
    slower = prediction(simple).step_time_s / fastest.step_time_s - 1
    assert f"3 groups of layers: {slower:.1%} slower than the fastest plan, of 4 groups" in str(simple)
    assert not certificate.is_optimal
    assert certificate.gap == pytest.approx(1 - 1 / (1 + slower), abs=1e-6)
    assert str(certificate).startswith("simplest found, gap")


@pytest.mark.slow
def test_a_simple_plan_that_the_search_of_mixes_missed_is_as_fast() -> None:
    simple = prediction(planned(SIMPLIFY))
    assert simple.fastest is not None
    missed = simple.fastest.model_copy(update={"step_time_s": simple.step_time_s * 1.001})
    told = simplicity_line(3, 1, simple.model_copy(update={"fastest": missed}))
    assert told == "3 groups of layers: as fast as the fastest plan, of 4 groups (choose it with --simplify 0)"
    assert simplicity_line(3, 1, simple.model_copy(update={"fastest": None})) == ""


@pytest.mark.slow
def test_the_fastest_plan_stays_at_hand_beside_the_simple_one() -> None:
    kept = planned(SIMPLIFY).next_best[0]
    assert kept.prediction is not None
    assert kept.prediction.step_time_s == pytest.approx(prediction(planned(0.0)).step_time_s)


@pytest.mark.slow
def test_one_sharding_for_all_layers_with_a_run_that_recomputes_is_enough() -> None:
    plan = planned(SIMPLIFY)
    assert len({strategy.without_remat() for strategy in plan.strategies}) == 1
    assert len(set(plan.strategies[1:-1])) == 2


@pytest.mark.slow
def test_every_strategy_that_is_not_that_of_most_blocks_has_its_reason() -> None:
    plan = planned(0.0)
    reasons, job = prediction(plan).reasons, job_of(request())
    assert len(reasons) == len(set(plan.strategies)) - 1 == 3
    assert any(each.startswith("embedding: fsdp2-tp4; ") for each in reasons)
    assert all(" slower)" in each or " GiB of " in each or "as fast" in each for each in reasons)
    (one,) = prediction(planned(SIMPLIFY)).reasons
    assert "no remat; selective remat would take" in one
    uniform = complete(request(decisions=Decisions(uniform=True))).plan
    assert uniform is not None
    assert prediction(with_reasons(uniform, job)).reasons == ()


@pytest.mark.slow
def test_ends_have_their_own_strategy_where_nothing_simple_is_fast_enough_otherwise() -> None:
    found = make_request("qwen3-8b", "1x8xa100-80gb", global_batch=64, seq_len=4096)
    plan = complete(replace(found, num_fallbacks=0, num_next_best=0)).plan
    assert plan is not None
    fastest = prediction(plan).fastest
    assert fastest is not None
    assert plan.num_groups < fastest.num_groups
    chain = plan.chain()
    roles = [chain.type_of(layer).role for layer in range(chain.num_layers)]
    blocks = {
        each.without_remat() for each, role in zip(plan.strategies, roles, strict=True) if role is LayerRole.BLOCK
    }
    assert len(blocks) == 1
    assert plan.strategies[0].without_remat() not in blocks
    for part in plan.parts:
        of_blocks = [run for run in part.runs if roles[run.layers[0]] is LayerRole.BLOCK]
        assert len({run.remat for run in of_blocks}) <= 2


@pytest.mark.slow
def test_a_group_that_may_as_well_have_the_strategy_of_most_blocks_has_it() -> None:
    """The fastest plan has its own strategy for the head, and nothing of one sharding for all blocks is as simple."""
    found = replace(make_request("gemma2-9b", "1x8xa100-80gb", global_batch=64, seq_len=4096), num_fallbacks=0)
    fastest, plan = (complete(replace(found, simplify=share)).plan for share in (0.0, SIMPLIFY))
    assert fastest is not None
    assert plan is not None
    assert plan.num_groups < fastest.num_groups
    assert prediction(fastest).step_time_s < prediction(plan).step_time_s
    assert peak_bytes(plan) <= prediction(plan).budget_bytes
    assert len(prediction(fastest).reasons) == 2
    assert all(" GiB of " in each for each in prediction(plan).reasons)


@pytest.mark.slow
def test_layers_with_another_strategy_of_the_plan_join_the_blocks_that_have_it() -> None:
    """The fastest plan recomputes the last block in part, and none of the two before it."""
    found = replace(make_request("qwen3-30b-a3b", "1x8xh100-80gb", global_batch=64, seq_len=4096), num_fallbacks=0)
    plan = complete(found).plan
    assert plan is not None
    remats = [each.remat for each in plan.strategies[1:-1]]
    assert remats == sorted(remats, key=("full", "selective", "none").index)
    fastest = prediction(plan).fastest
    assert fastest is not None
    assert plan.num_groups < fastest.num_groups
    assert fastest.step_time_s < prediction(plan).step_time_s <= fastest.step_time_s * (1 + SIMPLIFY)


@pytest.mark.slow
def test_what_was_decided_holds_for_a_simple_plan() -> None:
    pinned = complete(request(decisions=Decisions(pins=("blocks 0-3: tp=2",)))).plan
    assert pinned is not None
    assert all(strategy.tensor_degree == 2 for strategy in pinned.strategies[1:5])
    cut = complete(request(decisions=Decisions(partition="even", num_stages=2))).plan
    assert cut is not None
    assert prediction(cut).fastest is None


def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="fraction of a step"):
        request(simplify=2.0)


def test_no_other_share_is_asked_for_over_several_pools() -> None:
    asked = {"global_batch": 64, "seq_len": 4096}
    assert make_request("llama3-8b", "1x8xa100-80gb+1x8xh100-80gb", **asked).simplify_share == 0
    with pytest.raises(UserError, match="several device groups"):
        make_request("llama3-8b", "1x8xa100-80gb+1x8xh100-80gb", simplify=0.02, **asked)


@pytest.mark.slow
def test_blocks_of_many_ranges_are_counted_by_type() -> None:
    found = make_request("gpt-oss-20b", "1x8xh100-80gb", global_batch=64, seq_len=4096)
    plan = complete(replace(found, num_fallbacks=0, num_next_best=0, simplify=0.0)).plan
    assert plan is not None
    (one,) = [each for each in prediction(plan).reasons if ": no remat; " in each]
    named = {
        name: [layer for layer in range(plan.chain().num_layers) if plan.chain().layer_name(layer).startswith(name)]
        for name in ("full", "sliding")
    }
    kept = {name: sum(str(plan.strategies[layer].remat) == "none" for layer in named[name]) for name in named}
    assert all(f"{kept[name]} of {len(named[name])} {name} blocks" in one for name in named if kept[name])
