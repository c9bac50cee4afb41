"""Tests of what `explain` shows: names of pipeline parts, and the plan that other budgets are compared with."""

import pytest
from rich.console import Console

from steelyard.plan.choices import ANY_PLAN, ComparedBaseline, Explanation
from steelyard.planning.price import with_price
from steelyard.report.explain_view import explain_view
from steelyard.units import format_seconds
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


@pytest.mark.parametrize(("slowdown_with_less", "rows"), [(-0.005, ["this budget", "1 GiB"]), (0.01, ["1 GiB"])])
def test_a_faster_plan_with_less_memory_is_next_to_the_fastest_within_this_budget(slowdown_with_less, rows):
    of = job(cluster(1, 2))
    free, less = (
        ComparedBaseline(name=name, step_time_s=7.69, slowdown=slowdown, setting="1 stage", strategies="dp2")
        for name, slowdown in ((ANY_PLAN, -0.01), ("1 GiB less", slowdown_with_less))
    )
    console = Console(record=True, width=200)
    found = plan(of, ", ".join(["dp2"] * of.chain.num_layers), num_microbatches=1)
    console.print(explain_view(found, Explanation(binds="", rivals=(free,), budgets=(less,))))
    table = console.export_text().partition("another memory budget")[2]
    assert [" ".join(line.split()[:2]) for line in table.splitlines() if "stage:" in line] == rows


def test_the_time_of_a_microbatch_and_of_what_is_fixed_add_up_to_the_step():
    of = job(cluster(1, 2))
    found = with_price(plan(of, ", ".join(["dp2"] * of.chain.num_layers), num_microbatches=1), of)
    console = Console(record=True, width=200)
    console.print(explain_view(found, Explanation(binds="")))
    text, prediction = console.export_text(), found.prediction
    fixed_s = prediction.step_time_s - prediction.stages[0].total_time_s
    assert f"Time: {format_seconds(prediction.stages[0].total_time_s)} per microbatch" in text
    assert f"Fixed: {format_seconds(fixed_s)} of a step" in text
