"""Tests of cluster parts by time and cost: the frontier is what nothing beats, checked on every pair."""

import pytest

from steelyard.errors import UserError
from steelyard.hardware import parse_pools
from steelyard.plan.choices import DevicePoint
from steelyard.plan.decisions import Decisions
from steelyard.planning.frontier import find_offers, parts_of
from steelyard.planning.request import PlanRequest, make_request
from steelyard.units import GIB

OPTIONS = Decisions(max_degrees={"tp": 2}, modes={"zero": (3,), "sp": (False,)}, num_microbatches=8)
MIXED = "1x2xh100-80gb+2x2xa100-80gb"
PRICES = {"h100-80gb": 2.5, "a100-80gb": 1.1}


def asking(cluster: str, decisions: Decisions = OPTIONS, *, batch: int = 16, memory: int | None = None) -> PlanRequest:
    return make_request("tinyllama-1.1b", cluster, global_batch=batch, seq_len=1024, memory=memory, decisions=decisions)


@pytest.fixture(scope="module")
def offers() -> tuple[DevicePoint, ...]:
    return find_offers(asking(MIXED), prices=PRICES)


def test_a_cluster_has_parts_of_1_2_4_and_all_of_its_nodes():
    parts = parts_of(parse_pools("6x8xh100-80gb"))
    assert [part.name for part in parts] == [f"{nodes}x8xh100-80gb" for nodes in (1, 2, 4, 6)]


def test_pools_have_parts_with_and_without_each():
    names = {part.name for part in parts_of(parse_pools(MIXED))}
    h100, a100 = "1x2xh100-80gb", ("1x2xa100-80gb", "2x2xa100-80gb")
    assert names == {h100, *a100, *(f"{h100}+{each}" for each in a100)}


@pytest.mark.slow
def test_an_offer_costs_what_its_devices_cost_for_as_long_as_the_tokens_take(offers):
    offer = next(each for each in offers if each.cluster == MIXED)
    assert offer.price_per_hour == pytest.approx(2 * 2.5 + 4 * 1.1)
    assert offer.tokens_per_s == pytest.approx(16 * 1024 / offer.step_time_s)
    assert offer.cost_per_billion_tokens == pytest.approx(offer.price_per_hour / 3600 * 1e9 / offer.tokens_per_s)


def test_no_offer_pays_for_a_pool_that_its_plan_leaves_out():
    prices = {"h100-80gb": 2.5, "l4": 0.5}
    found = find_offers(asking("1x4xh100-80gb+1x1xl4"), prices=prices)
    assert {each.cluster for each in found} == {"1x4xh100-80gb", "1x1xl4"}


@pytest.mark.slow
def test_worth_having_is_what_no_other_offer_beats(offers):
    for offer in offers:
        mine = offer.cost_per_billion_tokens, offer.step_time_s
        beaten = any(
            other.cost_per_billion_tokens <= mine[0]
            and other.step_time_s <= mine[1]
            and (other.cost_per_billion_tokens, other.step_time_s) != mine
            for other in offers
        )
        assert offer.is_worth_having == (not beaten)
    assert any(offer.is_worth_having for offer in offers)
    assert not all(offer.is_worth_having for offer in offers)


def test_the_cheapest_tokens_come_first_and_what_does_not_fit_last():
    found = find_offers(asking("4x1xa100-80gb", memory=9 * GIB), prices={"a100-80gb": 1})
    costs = [each.cost_per_billion_tokens for each in found]
    fitting = [cost for cost in costs if cost is not None]
    assert fitting == sorted(fitting) == costs[: len(fitting)]
    assert 0 < len(fitting) < len(costs)
    assert all(each.reason.startswith("does not fit") and not each.is_worth_having for each in found[len(fitting) :])


@pytest.mark.parametrize("prices", [{}, {"h100-80gb": 2.5}, {**PRICES, "l4": 0.3}])
def test_each_device_type_has_one_price(prices):
    with pytest.raises(UserError, match=r"--price: found .*\n  expected: a price for each of a100-80gb, h100-80gb"):
        find_offers(asking(MIXED), prices=prices)


def test_too_many_parts_are_an_error():
    with pytest.raises(UserError, match="at most 64"):
        find_offers(asking("8x8xh100-80gb+8x8xa100-80gb+8x8xl4"), prices=PRICES | {"l4": 0.3})


@pytest.mark.slow
def test_a_part_whose_devices_the_batch_cannot_be_divided_among_says_so():
    without_tp = Decisions(max_degrees={"tp": 1, "cp": 1}, modes={"zero": (3,)})
    found = find_offers(asking("4x8xh100-80gb+4x8xa100-80gb", without_tp, batch=1), prices=PRICES)
    largest = next(each for each in found if each.num_devices == 64)
    assert largest.step_time_s is None
    assert (
        largest.reason == "does not fit: a batch that some pipeline over these device groups can divide among its ranks"
    )
