"""Tests of the text around the trade-off tables."""

from rich.console import Console

from steelyard.hardware import parse_cluster
from steelyard.plan.choices import TradeOffs
from steelyard.planning.frontier import find_trade_offs
from steelyard.report.frontier_table import frontier_view
from tests.cost.examples import job
from tests.jobs import request_of


def test_a_frontier_of_assumed_rates_says_so() -> None:
    of = job(parse_cluster("1x2xmi250x"), global_batch=4)
    console = Console(record=True, width=200)
    console.print(frontier_view(find_trade_offs(request_of(of), of, max_searches=3, device_counts=(2,))))
    assert "assumed for amd" in console.export_text()


def shown(found: TradeOffs) -> str:
    console = Console(record=True, width=300)
    console.print(frontier_view(found))
    return " ".join(console.export_text().split())


def test_a_frontier_says_what_is_left_free_and_what_takes_of_it() -> None:
    whole = job(parse_cluster("1x2xa100-80gb"), global_batch=4)
    of = whole.within(whole.budget_bytes // 2, margin_bytes=whole.budget_bytes // 2)
    found = find_trade_offs(request_of(of), of, max_searches=3, device_counts=(2,))
    assert (found.budget_bytes, found.device_bytes) == (of.budget_bytes, of.budget_bytes + of.margin_bytes)
    chosen = next(point for point in found.points if point.is_chosen)
    between = replace_memory(found, of.budget_bytes + 1, is_chosen=False)
    assert "within 40.0 GiB per device, 50% of 80.0 GiB left free" in shown(found)
    assert chosen.memory_bytes <= of.budget_bytes
    assert "40.0 GiB* " in shown(between)
    assert "keep less than the reserved 40.0 GiB per device free" in shown(between)
    pressed = replace_memory(found, of.budget_bytes + 1, is_chosen=True)
    assert "within 80.0 GiB per device; no plan leaves the reserved 40.0 GiB free" in shown(pressed)


def replace_memory(found: TradeOffs, num_bytes: int, *, is_chosen: bool) -> TradeOffs:
    """Return the trade-offs with one point, of this memory."""
    point = found.points[0].model_copy(update={"memory_bytes": num_bytes, "is_chosen": is_chosen})
    return found.model_copy(update={"points": (point,)})


def test_a_frontier_without_a_margin_speaks_of_the_budget_alone() -> None:
    of = job(parse_cluster("1x2xa100-80gb"), global_batch=4).on(margin_bytes=0)
    text = shown(find_trade_offs(request_of(of), of, max_searches=3, device_counts=(2,)))
    assert "(▶ within 80.0 GiB per device)" in text
    assert "reserved" not in text
