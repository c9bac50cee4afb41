"""What stands around the tables of trade-offs."""

from rich.console import Console

from steelyard.hardware import parse_cluster
from steelyard.planning import PlanOptions, find_trade_offs
from steelyard.report.frontier_table import frontier_view
from tests.cost.examples import job


def test_a_frontier_of_assumed_rates_says_so() -> None:
    of = job(parse_cluster("1x2xmi300x"), global_batch=4)
    console = Console(record=True, width=200)
    console.print(frontier_view(find_trade_offs(of, PlanOptions(), max_searches=3, device_counts=(2,))))
    assert "assumed for amd" in console.export_text()
