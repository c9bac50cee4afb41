"""What the search adds up against the walk through a plan's passes: floors are never above it, and bounds never below.

A bound is what the tables add up and, where not all layers are divided alike, what others leave beside the one at work.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import median

import numpy as np
import pytest

from steelyard.cost.build import build_tables, context_bytes
from steelyard.cost.execution import ACCELERATE, TORCHTITAN
from steelyard.cost.fold import unfold_layers, unfold_parts
from steelyard.cost.memory_floor import floor_tables
from steelyard.cost.predict import predict_memory
from steelyard.cost.setting import Job, Setting
from steelyard.cost.stage_memory import hidden_bytes, part_layers
from steelyard.cost.tables import CostTables
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan, Precision
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.planning.plan_from_search import assemble_plan
from steelyard.planning.problem import stage_strategies
from steelyard.schedules import PipelineConfig
from steelyard.search.evaluate import evaluate
from tests.cost.examples import cluster, job
from tests.schedules.examples import pipeline

SETTINGS: list[tuple[int, int, str, int]] = [
    (1, 1, "1f1b", 1),
    (1, 2, "1f1b", 1),
    (1, 4, "1f1b", 1),
    (2, 2, "1f1b", 1),
    (2, 8, "1f1b", 1),
    (4, 4, "1f1b", 1),
    (4, 16, "1f1b", 1),
    (4, 2, "gpipe", 1),
    (8, 1, "gpipe", 1),
    (2, 2, "interleaved-1f1b", 2),
    (2, 8, "interleaved-1f1b", 2),
    (2, 8, "interleaved-1f1b", 4),
    (4, 4, "interleaved-1f1b", 2),
    (4, 8, "interleaved-1f1b", 2),
]


def seed(pipeline: PipelineConfig) -> str:
    """The same for the same setting in every process."""
    return f"{pipeline.num_stages} {pipeline.num_microbatches} {pipeline.schedule} {pipeline.num_chunks}"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A plan drawn at random, as the search sees it and as a plan."""

    tables: CostTables
    boundaries: tuple[int, ...]
    strategies: tuple[int, ...]
    plan: Plan


def drawn_plans(of: Job, where: Setting, count: int) -> Iterator[Drawn]:
    """Plans of a setting: runs of equal layers of random length, or every layer for itself."""
    rng = random.Random(seed(where.pipeline))
    tables = build_tables(where, stage_strategies(of, where.devices_per_stage, Decisions()))
    for number in range(count):
        boundaries = _cuts(tables, rng)
        strategies: list[int] = []
        for kind in tables.layers:
            legal = [index for index, allowed in enumerate(tables.legal[kind]) if allowed]
            if not strategies or strategies[-1] not in legal or rng.random() < (0.1, 0.5, 1.0)[number % 3]:
                strategies.append(rng.choice(legal))
            else:
                strategies.append(strategies[-1])
        yield Drawn(
            tables=tables,
            boundaries=boundaries,
            strategies=tuple(strategies),
            plan=plan_of(of, tables, boundaries, strategies),
        )


def _cuts(tables: CostTables, rng: random.Random) -> tuple[int, ...]:
    while True:
        inner = sorted(rng.sample(range(1, len(tables.layers)), tables.pipeline.num_stages - 1))
        cuts = (0, *inner, len(tables.layers))
        sizes = [end - start for start, end in pairwise(cuts)]
        if all(size >= tables.least_layers(stage) for stage, size in enumerate(sizes)):
            return cuts


def plan_of(of: Job, tables: CostTables, boundaries: tuple[int, ...], chosen: Sequence[int]) -> Plan:
    """The plan of a choice, layer for layer."""
    strategies = unfold_layers([tables.strategies[index] for index in chosen], tables.pipeline.num_chunks)
    size = of.cluster.num_devices // tables.pipeline.num_stages
    stages = tuple(
        StagePart(ranks=(stage * size, stage * size + size - 1), runs=fold_runs(first, strategies[first:end]))
        for stage, first, end in unfold_parts(boundaries, tables.pipeline.num_chunks)
    )
    return assemble_plan(of, tables.pipeline, stages)


def walked_bytes(drawn: Drawn, of: Job) -> list[int]:
    """Bytes of each stage by the walk, without the allocator's slack."""
    return [
        sum(bytes_ for name, bytes_ in terms.items() if name != "allocator slack")
        for terms in predict_memory(drawn.plan, of)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_walk_is_below_a_floor_whatever_the_blocks_and_the_ends_are(count: int) -> None:
    of = job(cluster(1, 8), global_batch=16 * count, num_hidden_layers=4)
    where = Setting(job=of, pipeline=pipeline(1, count, "1f1b", 1))
    tables = build_tables(where, stage_strategies(of, where.devices_per_stage, Decisions()))
    floors, cuts = floor_tables(tables, of), (0, len(tables.layers))
    for block, end in product(*(np.flatnonzero(tables.legal[kind]).tolist() for kind in tables.layers[1:6:4])):
        chosen = (end, block, block, block, block, end)
        if tables.legal[tables.layers[0], end]:
            drawn = Drawn(tables=tables, boundaries=cuts, strategies=chosen, plan=plan_of(of, tables, cuts, chosen))
            most = max(evaluate(floor, cuts, chosen).peak_bytes for floor in floors)
            assert most <= walked_bytes(drawn, of)[0], f"{tables.strategies[block]}, ends {tables.strategies[end]}"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_walk_is_below_a_floor(setting: tuple[int, int, str, int], precision: Precision) -> None:
    num_stages, count, schedule, chunks = setting
    of = job(cluster(1, 8), global_batch=16 * count, precision=precision, num_hidden_layers=16)
    where = Setting(job=of, pipeline=pipeline(num_stages, count, schedule, chunks))
    floors: tuple[CostTables, ...] = ()
    for drawn in drawn_plans(of, where, 40):
        floors = floors or floor_tables(drawn.tables, of)
        walked = walked_bytes(drawn, of)
        for floor in floors:
            for stage, cost in enumerate(evaluate(floor, drawn.boundaries, drawn.strategies).stages):
                assert cost.total_bytes <= walked[stage], f"stage {stage} of {drawn.plan.stages}"


@pytest.mark.slow
@pytest.mark.parametrize("setting", [each for each in SETTINGS if each[0] > 1], ids=str)
def test_with_a_buffer_for_every_microbatch_floors_and_walks_keep_their_order(
    setting: tuple[int, int, str, int],
) -> None:
    """As torch's own stages have them: no walk is below a floor, and none below the walk without these buffers."""
    num_stages, count, schedule, chunks = setting
    of = job(cluster(1, 8), global_batch=16 * count, num_hidden_layers=16)
    theirs = replace(of, execution=TORCHTITAN)
    where = Setting(job=theirs, pipeline=pipeline(num_stages, count, schedule, chunks))
    floors: tuple[CostTables, ...] = ()
    for drawn in drawn_plans(theirs, where, 10):
        floors = floors or floor_tables(drawn.tables, theirs)
        walked, ours = walked_bytes(drawn, theirs), walked_bytes(drawn, of)
        for floor in floors:
            costs = evaluate(floor, drawn.boundaries, drawn.strategies).stages
            assert all(cost.total_bytes <= each for cost, each in zip(costs, walked, strict=True))
        if count > num_stages:
            assert all(own <= each for own, each in zip(ours, walked, strict=True))


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each[0] == 1], ids=str)
def test_with_gradients_that_stay_whole_floors_and_walks_keep_their_order(setting: tuple[int, int, str, int]) -> None:
    num_stages, count, schedule, chunks = setting
    of = job(cluster(1, 8), global_batch=16 * count, num_hidden_layers=4)
    theirs = replace(of, execution=ACCELERATE)
    where = Setting(job=theirs, pipeline=pipeline(num_stages, count, schedule, chunks))
    floors: tuple[CostTables, ...] = ()
    for drawn in drawn_plans(theirs, where, 20):
        floors = floors or floor_tables(drawn.tables, theirs)
        walked, ours = walked_bytes(drawn, theirs), walked_bytes(drawn, of)
        assert all(own <= each for own, each in zip(ours, walked, strict=True))
        for floor in floors:
            costs = evaluate(floor, drawn.boundaries, drawn.strategies).stages
            assert all(cost.total_bytes <= each for cost, each in zip(costs, walked, strict=True))


def alike_plans(of: Job, where: Setting) -> Iterator[Drawn]:
    """Plans of a setting with one parallelism in all layers, the rest of each layer's strategy drawn at random."""
    rng = random.Random(seed(where.pipeline))
    tables = build_tables(where, stage_strategies(of, where.devices_per_stage, Decisions()))
    for parallel in sorted({str(strategy.without_remat()) for strategy in tables.strategies}):
        own = [index for index, each in enumerate(tables.strategies) if str(each.without_remat()) == parallel]
        legal = [[index for index in own if tables.legal[kind, index]] for kind in tables.layers]
        for _ in range(3 if all(legal) else 0):
            cuts, chosen = _cuts(tables, rng), tuple(rng.choice(each) for each in legal)
            plan = plan_of(of, tables, cuts, chosen)
            yield Drawn(tables=tables, boundaries=cuts, strategies=chosen, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_where_all_layers_are_divided_alike_no_walk_is_above_the_tables(
    setting: tuple[int, int, str, int], precision: Precision
) -> None:
    num_stages, count, schedule, chunks = setting
    of = job(cluster(1, 8), global_batch=16 * count, precision=precision, num_hidden_layers=16)
    where = Setting(job=of, pipeline=pipeline(num_stages, count, schedule, chunks))
    for drawn in alike_plans(of, where):
        walked = walked_bytes(drawn, of)
        for stage, cost in enumerate(evaluate(drawn.tables, drawn.boundaries, drawn.strategies).stages):
            assert walked[stage] <= cost.total_bytes, f"stage {stage} of {drawn.plan.stages}"


def beside_bytes(drawn: Drawn, of: Job, stage: int) -> int:
    """What layers of a stage that are divided in other ways may leave beside the one at work; 0 where all are alike.

    The tables take what waits beside a layer to be as large as if it were the layer's own. By the terms of the walk it
    is larger by no more than

    - the buffer of another layer's reduction beyond the layer's own, for the chunk at work and each that pauses;
    - the parameters of another sharded layer beyond the layer's own, for the chunk at work and one that pauses;
    - what the stage before sent, for every pass in flight, where the first layer has it redistributed;
    - what stages send each other beyond a share of the layer's own layout.
    """
    plan, where = drawn.plan, Setting(job=of, pipeline=drawn.tables.pipeline)
    pipeline, places = where.pipeline, [part.layers for part in drawn.plan.parts]
    mine = range(stage, len(places), pipeline.num_stages)
    parts = [part_layers(places, plan.strategies, index, where) for index in mine]
    numbers = [number for index in mine for number in places[index]]
    layers = [layer for part in parts for layer in part.layers]
    ways = [plan.strategies[number].without_remat() for number in numbers]
    reduced = paused = gathered = 0
    for (one, way), (other, its) in product(zip(layers, ways, strict=True), repeat=2):
        if other.shards > 1 and its != way:
            own = 0 if one.holds_new else one.reduced  # an embedding or a head has a block's buffer beside it
            is_like_it = one.shards > 1 and not one.holds_new
            reduced = max(reduced, other.reduced - own)
            paused = max(paused, other.reduced - own * is_like_it)
            gathered = max(gathered, other.copy - one.copy * is_like_it)
    share = min(hidden_bytes(number, plan.strategies[number], where) for number in numbers)
    received, sent = (max(0, *(getattr(part, way) - share for part in parts)) for way in ("received", "sent"))
    in_flight, (ahead, ahead_back) = pipeline.in_flight(stage), pipeline.schedule.received_ahead(pipeline, stage)
    return (
        reduced
        + (pipeline.num_chunks - 1) * paused
        + min(pipeline.num_chunks, 2) * gathered
        + in_flight * max(0 if part.received_is_saved else part.received for part in parts)
        + (pipeline.num_chunks + ahead) * received
        + (in_flight + pipeline.num_chunks + ahead_back) * sent
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_walk_is_above_the_tables_with_what_unlike_layers_leave_beside_each_other(
    setting: tuple[int, int, str, int], precision: Precision
) -> None:
    """Context left out, the bound of most stages is less than half above the walk."""
    num_stages, count, schedule, chunks = setting
    of = job(cluster(1, 8), global_batch=16 * count, precision=precision, num_hidden_layers=16)
    where = Setting(job=of, pipeline=pipeline(num_stages, count, schedule, chunks))
    assert not any(beside_bytes(drawn, of, 0) for drawn in alike_plans(of, where))
    over: list[float] = []
    for drawn in drawn_plans(of, where, 40):
        walked = walked_bytes(drawn, of)
        for stage, cost in enumerate(evaluate(drawn.tables, drawn.boundaries, drawn.strategies).stages):
            bound = cost.total_bytes + beside_bytes(drawn, of, stage)
            assert walked[stage] <= bound, f"stage {stage} of {drawn.plan.stages}"
            over.append((bound - context_bytes(where)) / (walked[stage] - context_bytes(where)))
    assert median(over) < 1.5
