"""Tests that folded tables give the cost of the plan that they unfold to."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from steelyard.cost.build import build_tables, usable_bytes
from steelyard.cost.fold import folded, missing_blocks, unfold_layers, unfold_parts, why_not_folded
from steelyard.cost.job import JobConfig
from steelyard.cost.predict import predict
from steelyard.cost.simulator import StageTimes
from steelyard.engines.megatron import MEGATRON
from steelyard.errors import InvalidProblemError
from steelyard.model.read import chain_from_config, load_model
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.price import bare_plan
from steelyard.planning.request import make_request
from steelyard.planning.settings import Settings, price_settings
from steelyard.schedules import SCHEDULES, names_of
from steelyard.search import search
from steelyard.tracer.cache import packaged_trace
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
        ((0, 1, 1, 2, 2, 3), 2, 2, "the blocks of 2 chunks differ"),
        ((0, 1, 2, 1, 2, 3), 2, 2, None),
    ],
)
def test_says_why_layers_do_not_come_in_chunks(layers, stages, chunks, reason):
    found = why_not_folded(layers, num_stages=stages, num_chunks=chunks)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_ends_take_the_place_of_one_block_or_two_where_that_is_allowed():
    for num_blocks, chunks, missing in ((24, 4, (0, 0)), (23, 4, (0, 1)), (22, 4, (1, 1)), (21, 4, (1, 2))):
        layers = (0, *[1] * num_blocks, 2)
        assert missing_blocks(num_blocks, chunks) == missing
        found = why_not_folded(layers, num_stages=4, num_chunks=chunks, ends_replace_blocks=True)
        assert (found is None) == (sum(missing) <= 2)
        assert (why_not_folded(layers, num_stages=4, num_chunks=chunks) is None) == (sum(missing) == 0)
    alternating = (0, *[1, 2] * 7, 3)  # the first block of the second chunk is the eighth
    assert "blocks of 2 chunks differ" in why_not_folded(
        alternating, num_stages=2, num_chunks=2, ends_replace_blocks=True
    )
    assert why_not_folded(alternating, num_stages=2, num_chunks=4, ends_replace_blocks=True) is None


def test_the_parts_cover_every_layer_once_in_order():
    rng = np.random.default_rng(0)
    for _ in range(200):
        stages, chunks, missing = int(rng.integers(2, 5)), int(rng.integers(2, 5)), int(rng.integers(0, 3))
        period = int(rng.integers(stages, 9))
        missing %= chunks
        num_layers = chunks * period - missing + 2
        cuts = np.sort(rng.choice(np.arange(2, period + 1), stages - 1, replace=False)).tolist()
        parts = list(unfold_parts((0, *cuts, period + 2), chunks, num_layers))
        assert [stage for stage, _, _ in parts] == list(range(stages)) * chunks
        assert [first for _, first, _ in parts] == [0, *(end for _, _, end in parts[:-1])]
        assert parts[-1][2] == num_layers
        assert all(first < end for _, first, end in parts)
        assert len(unfold_layers(range(period + 2), chunks, num_layers)) == num_layers
        sizes = np.array([end - first for _, first, end in parts]).reshape(chunks, stages)
        assert (sizes[1:-1] == sizes[1:2]).all()


def test_one_chunk_is_cut_where_the_boundaries_are():
    assert list(unfold_parts((0, 3, 4, 9), 1, 9)) == [(0, 0, 3), (1, 3, 4), (2, 4, 9)]
    assert list(unfold_parts((0, 1), 1, 1)) == [(0, 0, 1)]


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
    folded_layers = ["first", "a", "b", "last"]
    assert unfold_layers(folded_layers, 2, 6) == ("first", "a", "b", "a", "b", "last")
    assert unfold_layers(folded_layers, 3, 7) == ("first", "a", "b", "a", "b", "a", "last")
    assert unfold_layers(folded_layers, 3, 6) == ("first", "b", "a", "b", "a", "last")


def test_the_closed_form_is_the_simulated_step_where_all_chunks_are_alike():
    for stages, chunks, rounds in ((2, 2, 1), (2, 3, 3), (4, 2, 2), (3, 4, 5)):
        microbatches = stages * rounds
        part = StageTimes(forward_s=1.0, backward_s=2.0)
        timeline = simulated([part] * (stages * chunks), microbatches, "interleaved-1f1b", num_chunks=chunks)
        assert timeline.step_time_s == pytest.approx(3.0 * (stages + microbatches * chunks - 1))


def interleaved_outcomes(schedule="interleaved-1f1b"):
    """Best plans of a model of 8 blocks for every interleaved configuration, with the job."""
    of = job(global_batch=32, num_hidden_layers=8)
    strategies = tuple(
        parse_strategy(text) for text in ("dp4", "dp2", "fsdp2", "tp2+sp", "fsdp2 remat=full", "fsdp4", "tp4")
    )
    for stages, microbatches, chunks in ((2, 4, 2), (2, 8, 4), (4, 8, 2)):
        if chunks not in SCHEDULES[schedule].chunk_counts:
            continue
        config = JobConfig(job=of, pipeline=pipeline(stages, microbatches, schedule, chunks))
        fitting = tuple(strategy for strategy in strategies if strategy.num_devices == 8 // stages)
        yield of, search([build_tables(config, fitting)], usable_bytes(of))


@pytest.mark.parametrize("schedule", names_of(with_chunks=True))
def test_a_folded_solution_becomes_a_legal_plan_that_takes_no_more_memory_than_the_tables_say(schedule):
    for of, found in interleaved_outcomes(schedule):
        assert found.status == "optimal"
        plan = Plan.model_validate(bare_plan(of, found.best.tables, found.best.solution).model_dump())
        assert (plan.schedule, plan.num_chunks) == (schedule, found.best.tables.pipeline.num_chunks)
        cost = predict(plan, of)
        most = max(
            sum(stage.memory_bytes.values()) - stage.memory_bytes.get("allocator slack", 0) for stage in cost.stages
        )
        assert most <= found.best.solution.peak_bytes


@pytest.mark.parametrize(
    ("schedule", "rel"),
    [("interleaved-1f1b", 0.15), ("interleaved-zero-bubble", 0.2), ("zb-v", 0.2), ("dualpipe-v", 0.2)],
)
def test_the_step_of_the_tables_is_near_the_simulated_one(schedule, rel):
    """Tables of schedules with weight passes use the smallest bubble of any strategy."""
    for of, found in interleaved_outcomes(schedule):
        plan = bare_plan(of, found.best.tables, found.best.solution)
        assert predict(plan, of).timeline.step_time_s == pytest.approx(found.best.solution.step_s, rel=rel)


def test_the_parts_of_a_v_mirror_each_other():
    for cuts in itertools.combinations(range(3, 8), 2):  # 5 blocks in each half, the ends before them
        boundaries = (0, *cuts, 7) if cuts[-1] < 7 else None
        if boundaries is None:
            continue
        parts = list(unfold_parts(boundaries, 2, 12, is_v=True))
        assert [stage for stage, _, _ in parts] == [0, 1, 2, 2, 1, 0]
        assert [first for _, first, _ in parts] == [0, *(end for _, _, end in parts[:-1])]
        assert parts[-1][2] == 12
        assert all(first < end for _, first, end in parts)
        assert [end - first for _, first, end in parts] == [end - first for _, first, end in parts[::-1]]
    folded_layers = ("first", "last", "a", "b")
    assert unfold_layers(folded_layers, 2, 6, is_v=True) == ("first", "a", "b", "b", "a", "last")


def test_blocks_of_a_v_are_the_same_in_both_directions():
    options = {"num_stages": 2, "num_chunks": 2, "is_v": True}
    assert why_not_folded((0, 1, 2, 2, 1, 3), **options) is None
    for layers in ((0, 1, 2, 1, 2, 3), (0, 1, 1, 1, 1, 1, 3)):
        assert "do not divide" in (found := why_not_folded(layers, **options)) or "differ" in found


def test_a_v_has_both_ends_and_a_block_on_its_first_stage():
    of = job(num_hidden_layers=8)
    config = JobConfig(job=of, pipeline=pipeline(4, 8, "zb-v", 2))
    tables = build_tables(config, (parse_strategy("dp2"),))
    assert [tables.least_layers(stage) for stage in range(4)] == [3, 1, 1, 1]
    assert (tables.least_layers_before(4), tables.least_layers_behind(0)) == (6, 3)
    assert [tables.layer_types[each] for each in tables.layers[:2]] == ["embedding", "head"]


def test_only_one_schedule_has_chunks():
    _, found = next(interleaved_outcomes())
    with pytest.raises(InvalidProblemError, match="two or more chunks"):
        replace(found.best.tables, pipeline=pipeline(*shape(found), num_chunks=2))
    with pytest.raises(InvalidProblemError, match="two or more chunks"):
        replace(found.best.tables, pipeline=pipeline(*shape(found), "interleaved-1f1b"))


@pytest.mark.parametrize(("num_blocks", "chunks"), [(8, 2), (11, 3), (14, 4), (7, 3), (10, 3)])
def test_folding_keeps_the_work_of_a_step(num_blocks, chunks):
    of = job(global_batch=32, num_hidden_layers=num_blocks)
    config = JobConfig(job=of, pipeline=pipeline(2, 4))
    plain = build_tables(config, (parse_strategy("dp4"),))
    both = folded(plain, pipeline(2, 4, "interleaved-1f1b", chunks), round_trip_s=0.0)
    work = [
        sum(each.time_s[layer_type, 0] for layer_type in each.layers) * each.pipeline.num_passes
        for each in (plain, both)
    ]
    assert work[0] == pytest.approx(work[1])
    states = [sum(int(each.static_bytes[layer_type, 0]) for layer_type in each.layers) for each in (plain, both)]
    assert states[0] == states[1]


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [14, 15])
def test_the_free_plan_of_an_engine_is_no_slower_than_one_with_ends_in_the_place_of_blocks(num_blocks):
    packaged = load_model("tinyllama-1.1b")
    chain = chain_from_config({**packaged.config, "num_hidden_layers": num_blocks}, name="test")
    traced = packaged_trace(packaged, seq_len=2048, precision="bf16", degrees=(1, 2, 4, 8))
    identity = traced.identity.model_copy(update={"config_hash": chain.config_hash})  # layers are the same
    request = make_request(
        chain,
        "1x8xa100-80gb",
        global_batch=16,
        seq_len=2048,
        profile=traced.model_copy(update={"identity": identity}),
    )
    theirs, under = price_settings(request, MEGATRON, "bf16", Settings(tp=2, pp=2, vpp=4))
    found = plan_job(under, Decisions(num_stages=2, num_microbatches=theirs.num_microbatches), top=1)
    assert [len(part.strategies) for part in theirs.parts] == [2 + (num_blocks == 15), *[2] * 6, 2]
    assert found.plan.prediction.step_time_s <= theirs.prediction.step_time_s
    chunks = [each for each in found.tables if each.pipeline.num_chunks == 4]
    assert chunks, "four chunks are searched"
