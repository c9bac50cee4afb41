"""Tests of what `explain` shows: names of pipeline parts, and the plan that other budgets are compared with."""

import pytest
from rich.console import Console

from steelyard.plan.choices import ANY_PLAN, ComparedBaseline, Explanation
from steelyard.report.explain_view import explain_view
from tests.cost.examples import cluster, job, plan

UNLIKE = "tp2, dp2, fsdp2, tp2, dp2, fsdp2"
"""Six layers of which no neighbours share a strategy; of four parts more rows than are shown."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "num_chunks", "devices", "words"),
    [
        ("1f1b", 1, 8, "Stages: 0: embedding, 5 blocks; 1–2: 6 blocks each; 3: 5 blocks, head"),
        ("interleaved-1f1b", 2, 4, "Stages: 0: embedding, 11 blocks; 1: 11 blocks, head"),
    ],
)
def test_layers_are_counted_by_stage_and_where_a_stage_has_several_parts_by_chunk(schedule, num_chunks, devices, words):
    of = job(cluster(1, devices), num_hidden_layers=22)
    found = plan(of, *[UNLIKE] * 4, num_microbatches=8, num_chunks=num_chunks, schedule=schedule)
    console = Console(record=True, width=200)
    console.print(explain_view(found, Explanation(binds="")))
    assert words in console.export_text()


@pytest.mark.parametrize("is_simplified", [True, False])
def test_other_budgets_are_next_to_the_fastest_plan_within_this_one(is_simplified: bool) -> None:
    of = job(cluster(1, 2))
    free = ComparedBaseline(name=ANY_PLAN, step_time_s=7.69, slowdown=-0.01, setting="1 stage", strategies="dp2")
    less = ComparedBaseline(name="1 GiB less", step_time_s=7.72, slowdown=-0.005, setting="1 stage", strategies="fsdp2")
    found = Explanation(binds="", rivals=(free,) * is_simplified, budgets=(less,))
    console = Console(record=True, width=200)
    console.print(explain_view(plan(of, ", ".join(["dp2"] * of.chain.num_layers), num_microbatches=1), found))
    table = console.export_text().partition("another memory budget")[2]
    rows = [line.split()[:2] for line in table.splitlines() if "stage:" in line]
    assert rows == [["this", "budget"]] * is_simplified + [["1", "GiB"]]
