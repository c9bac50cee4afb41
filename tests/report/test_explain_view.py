"""Tests of the names of pipeline parts in `explain`."""

import pytest
from rich.console import Console

from steelyard.plan.choices import Explanation
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
