"""Galvatron's published tables, plans and predictions for BERT-Huge on 8 GPUs."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import galvatron_paper as paper

INPUTS = paper.bert_huge()


def per_strategy_rows() -> list[dict[str, str]]:
    with (paper.DATA / "cost_table_per_strategy_8gpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["model"] == "bert" and row["extra_overhead_ms"] == "0"]


def test_layer_times_and_memory_are_the_published_ones() -> None:
    rows = per_strategy_rows()
    assert len(rows) == 88
    for row in rows:
        stages, strategy = paper.parse_published(row["strategy"])
        batch = int(row["bsz"])
        seconds = paper.layer_s(INPUTS, strategy, batch, stages)
        assert seconds == pytest.approx(float(row["layer_time_s"]), rel=1e-6), (row["strategy"], batch)
        size = paper.layer_mb(INPUTS, strategy, batch)
        assert size == pytest.approx(float(row["layer_mem_MB"]), abs=0.002), (row["strategy"], batch)


@pytest.mark.parametrize(
    ("memory_gb", "step_s", "batch", "stages", "runs"),
    [(8, 0.8539, 8, 2, {"dp2-tp2": 15, "fsdp2-tp2": 1}), (12, 1.2088, 16, 1, {"dp4-tp2": 16, "fsdp4-tp2": 16})],
)
def test_the_printed_plans_come_out(
    memory_gb: int, step_s: float, batch: int, stages: int, runs: dict[str, int]
) -> None:
    found = paper.best(INPUTS, 32, memory_gb, "full", largest_batch=24).best
    assert found is not None
    names = [str(found.tables.strategies[index]) for index in found.solution.strategies]
    assert (found.samples, paper.pipeline_degree(found)) == (batch, stages)
    assert {name: names.count(name) for name in names} == runs
    assert found.solution.step_s == pytest.approx(step_s, abs=5.1e-5)


@pytest.mark.parametrize("row", paper.published_cells()[3:9], ids=lambda row: f"{row['mem_gb']}GB-{row['space']}")
def test_no_published_cell_is_faster_than_ours(row: dict[str, str]) -> None:
    found = paper.best(INPUTS, int(row["layers"]), int(row["mem_gb"]), row["space"], largest_batch=24).best
    assert found is not None
    assert 1 / found.score_s >= float(row["pred_throughput"]) - 0.005
