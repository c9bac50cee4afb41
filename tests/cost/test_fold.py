"""Folded tables: what they say of a plan is what the plan that they unfold to costs."""

from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.build import build_tables, usable_bytes
from steelyard.cost.fold import folded, unfold_layers, unfold_parts, why_not_folded
from steelyard.cost.job import JobConfig
from steelyard.cost.predict import predict
from steelyard.cost.simulator import StageTimes
from steelyard.errors import InvalidProblemError
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.price import grouped_plan
from steelyard.search import search
from tests.cost.examples import job, simulated
from tests.schedules.examples import pipeline

BLOCKS = (0, *[1] * 24, 2)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "reason"),
    [
        (BLOCKS, 4, 2, None),
        (BLOCKS, 4, 3, None),
        (BLOCKS, 4, 5, "24 blocks do not divide into 5 chunks"),
        (BLOCKS, 8, 4, "need 32 blocks or more"),
        (BLOCKS, 1, 2, "two stages"),
        ((0, 1, 1, 2, 2, 3), 2, 2, "are not alike"),
        ((0, 1, 2, 1, 2, 3), 2, 2, None),
    ],
)
def test_says_why_layers_do_not_come_in_chunks(layers, stages, chunks, reason):
    found = why_not_folded(layers, num_stages=stages, num_chunks=chunks)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_the_parts_cover_every_layer_once_in_order():
    rng = np.random.default_rng(0)
    for _ in range(200):
        stages, chunks = int(rng.integers(2, 5)), int(rng.integers(2, 5))
        period = int(rng.integers(stages, 9))
        cuts = np.sort(rng.choice(np.arange(2, period + 1), stages - 1, replace=False)).tolist()
        parts = list(unfold_parts((0, *cuts, period + 2), chunks))
        assert [stage for stage, _, _ in parts] == list(range(stages)) * chunks
        assert [first for _, first, _ in parts] == [0, *(end for _, _, end in parts[:-1])]
        assert parts[-1][2] == chunks * period + 2
        assert all(first < end for _, first, end in parts)


def test_one_chunk_is_cut_where_the_boundaries_are():
    assert list(unfold_parts((0, 3, 4, 9), 1)) == [(0, 0, 3), (1, 3, 4), (2, 4, 9)]
    assert list(unfold_parts((0, 1), 1)) == [(0, 0, 1)]


def test_the_fewest_layers_before_and_behind_add_up_stage_by_stage():
    for _, found in interleaved_outcomes():
        for tables in (found.best.tables, replace(found.best.tables, pipeline=pipeline(*shape(found)))):
            num_stages = tables.pipeline.num_stages
            fewest = [tables.least_layers(stage) for stage in range(num_stages)]
            for stage in range(num_stages):
                assert tables.least_layers_before(stage) == sum(fewest[:stage])
                assert tables.least_layers_behind(stage) == sum(fewest[stage + 1 :])
            assert tables.least_layers_before(num_stages) == sum(fewest)


def shape(found):
    """Stages and microbatches of what was found."""
    chosen = found.best.tables.pipeline
    return chosen.num_stages, chosen.num_microbatches


def test_layers_at_the_same_place_of_their_chunks_get_the_same():
    assert unfold_layers(["first", "a", "b", "last"], 2) == ("first", "a", "b", "a", "b", "last")


def test_the_closed_form_is_the_simulated_step_where_all_chunks_are_alike():
    for stages, chunks, rounds in ((2, 2, 1), (2, 3, 3), (4, 2, 2), (3, 4, 5)):
        microbatches = stages * rounds
        part = StageTimes(forward_s=1.0, backward_s=2.0)
        timeline = simulated([part] * (stages * chunks), microbatches, "interleaved-1f1b", num_chunks=chunks)
        assert timeline.step_time_s == pytest.approx(3.0 * (stages + microbatches * chunks - 1))


def interleaved_outcomes():
    """Best plans of a model of 8 blocks for every interleaved configuration, with the job."""
    of = job(global_batch=32, num_hidden_layers=8)
    strategies = tuple(
        parse_strategy(text) for text in ("dp4", "dp2", "fsdp2", "tp2+sp", "fsdp2 remat=full", "fsdp4", "tp4")
    )
    for stages, microbatches, chunks in ((2, 4, 2), (2, 8, 4), (4, 8, 2)):
        config = JobConfig(job=of, pipeline=pipeline(stages, microbatches, "interleaved-1f1b", chunks))
        fitting = tuple(strategy for strategy in strategies if strategy.num_devices == 8 // stages)
        yield of, search([build_tables(config, fitting)], usable_bytes(of))


def test_a_folded_solution_becomes_a_legal_plan_that_takes_no_more_memory_than_the_tables_say():
    for of, found in interleaved_outcomes():
        assert found.status == "optimal"
        plan = Plan.model_validate(grouped_plan(of, found.best).model_dump())
        assert (plan.schedule, plan.num_chunks) == ("interleaved-1f1b", found.best.tables.pipeline.num_chunks)
        cost = predict(plan, of)
        most = max(
            sum(stage.memory_bytes.values()) - stage.memory_bytes.get("allocator slack", 0) for stage in cost.stages
        )
        assert most <= found.best.solution.peak_bytes


def test_the_step_of_the_tables_is_near_the_simulated_one():
    for of, found in interleaved_outcomes():
        plan = grouped_plan(of, found.best)
        assert predict(plan, of).timeline.step_time_s == pytest.approx(found.best.solution.step_s, rel=0.15)


def test_only_one_schedule_has_chunks():
    _, found = next(interleaved_outcomes())
    with pytest.raises(InvalidProblemError, match="two or more chunks"):
        replace(found.best.tables, pipeline=pipeline(*shape(found), num_chunks=2))
    with pytest.raises(InvalidProblemError, match="two or more chunks"):
        replace(found.best.tables, pipeline=pipeline(*shape(found), "interleaved-1f1b"))


def test_folding_keeps_the_work_of_a_step():
    of = job(global_batch=32, num_hidden_layers=8)
    config = JobConfig(job=of, pipeline=pipeline(2, 4))
    plain = build_tables(config, (parse_strategy("dp4"),))
    both = folded(plain, pipeline(2, 4, "interleaved-1f1b", 2), round_trip_s=0.0)
    work = [
        sum(each.time_s[layer_type, 0] for layer_type in each.layers) * each.pipeline.num_passes
        for each in (plain, both)
    ]
    assert work[0] == pytest.approx(work[1])
    states = [sum(int(each.static_bytes[layer_type, 0]) for layer_type in each.layers) for each in (plain, both)]
    assert states[0] == states[1]
