"""Tests that public values print themselves in a few lines: plan, model, profile, cost tables, run record."""

import pytest

from steelyard.cost.build import build_tables
from steelyard.plan.decisions import Decisions
from steelyard.planning.problem import stage_strategies
from tests.cost.examples import chain, cluster, config, job, measured_profile, plan, profile
from tests.profiles.test_record import RECORD


def test_a_plan_prints_its_decision_and_every_run_of_layers() -> None:
    of = job(cluster(1, 4))
    text = str(plan(of, "fsdp2, fsdp2, dp2", "dp2, dp2, dp2", num_microbatches=4))
    assert text.startswith("small on ")
    assert text.splitlines()[1:] == [
        "Plan: 2 stages of 2 devices (1f1b), 4 microbatches of 16 × 32 tokens (8 per rank), bf16",
        "stage 0, ranks 0–1: embedding, block 0: fsdp2",
        "stage 0, ranks 0–1: block 1: dp2",
        "stage 1, ranks 2–3: blocks 2–3, head: dp2",
    ]


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        (chain(), "1 × embedding, "),
        (profile(chain()), "traced: embedding, block, head"),
        (measured_profile(chain()), "measured on 4 × "),
        (RECORD, f"{len(RECORD.steps)} steps, "),
    ],
    ids=["chain", "traced", "measured", "record"],
)
def test_values_print_in_a_line(value: object, holds: str) -> None:
    assert holds in str(value)
    assert len(str(value).splitlines()) == 1


def test_tables_print_their_config_and_sizes() -> None:
    where = config()
    strategies = stage_strategies(where.job, where.devices_per_stage, Decisions())
    tables = build_tables(where, strategies)
    assert f"{len(tables.layers)} layers of 3 types (" in str(tables)
    assert f"{len(tables.strategies)} strategies" in str(tables)
