"""The simplest plan within a share of the best: fewer groups of layers, no slower than allowed, and it fits."""

from dataclasses import replace

import pytest

from steelyard.errors import UserError
from steelyard.plan.plan import Plan
from steelyard.planning.complete import complete
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import PlanRequest, make_request


def request(**asked: object) -> PlanRequest:
    found = make_request("llama3-8b", "1x8xa100-80gb", global_batch=64, seq_len=4096)
    return replace(found, num_fallbacks=0, num_next_best=0, **asked)  # type: ignore[arg-type]


def groups(plan: Plan) -> int:
    return sum(len(part.runs) for part in plan.parts)


def planned(share: float) -> Plan:
    plan = complete(request(simplify=share)).plan
    assert plan is not None
    return plan


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@pytest.mark.slow
def test_a_larger_share_gives_a_simpler_plan_that_takes_no_more_than_the_share() -> None:
    plans = {share: planned(share) for share in (0.0, 0.01, 0.05)}
    best_s = step_s(plans[0.0])
    assert groups(plans[0.05]) <= groups(plans[0.01]) < groups(plans[0.0])
    for share, plan in plans.items():
        assert step_s(plan) <= best_s * (1 + share)
        assert plan.prediction is not None
        assert peak_bytes(plan) <= plan.prediction.budget_bytes
    simple = plans[0.01].prediction
    assert simple is not None
    assert simple.certificate.status == "gap"
    assert simple.alternatives[0].step_time_s == pytest.approx(best_s)
    assert "groups of layers" in simple.alternatives[0].description


@pytest.mark.slow
def test_one_sharding_for_all_blocks_with_a_run_that_recomputes_is_enough() -> None:
    plan = planned(0.01)
    blocks = plan.strategies[1:-1]
    assert len({strategy.without_remat() for strategy in blocks}) == 1
    assert len(set(blocks)) <= 2


def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="fraction of a step"):
        request(simplify=2.0)
