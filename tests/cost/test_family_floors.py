"""Bounds of the memory of real layers, traced: of no family is a walk below its floors or above the tables' bound."""

from dataclasses import replace
from itertools import pairwise

import pytest

from steelyard.cost.memory_floor import floor_tables
from steelyard.cost.setting import Setting
from steelyard.cost.working import working_bytes
from steelyard.hardware import parse_cluster
from steelyard.plan.plan import Precision
from steelyard.search.evaluate import evaluate
from tests.cost.test_checked_memory import MODELS, Case, job_of
from tests.cost.test_memory_floor import beside_bytes, drawn_plans, walked_bytes
from tests.oracles.working import stage_bytes
from tests.schedules.examples import pipeline

SETTINGS = [(1, 1), (1, 4), (2, 2), (2, 8), (4, 4), (4, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", MODELS)
def test_every_walk_is_between_its_floors_and_the_bound_of_the_tables(
    model: str, precision: Precision, setting: tuple[int, int]
) -> None:
    num_stages, count = setting
    traced = job_of(Case(stages=("",), devices=4, model=model, precision=precision))
    of = replace(traced, global_batch=4 * count, cluster=parse_cluster("1x4xa100-80gb"))
    where = Setting(job=of, pipeline=pipeline(num_stages, count))
    for drawn in drawn_plans(of, where, 10):
        walked, working = walked_bytes(drawn, of), working_bytes(drawn.tables, of)
        assert working is not None
        for stage, span in enumerate(pairwise(drawn.boundaries)):
            assert stage_bytes(drawn.tables, working, stage, span, drawn.strategies) <= walked[stage]
        for stage, cost in enumerate(evaluate(drawn.tables, drawn.boundaries, drawn.strategies).stages):
            assert walked[stage] <= cost.total_bytes + beside_bytes(drawn, of, stage)
        for floor in floor_tables(drawn.tables, of):
            for stage, cost in enumerate(evaluate(floor, drawn.boundaries, drawn.strategies).stages):
                assert cost.total_bytes <= walked[stage], f"stage {stage} of {drawn.plan.stages}"
