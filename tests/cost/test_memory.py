"""Tests that the search's sum of terms is the prediction for the plan, term by term."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from steelyard.cost.build import build_tables
from steelyard.cost.context import slack_fraction
from steelyard.cost.fold import unfold_layers, unfold_parts
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.predict import predict_memory
from steelyard.cost.tables import CostTables
from steelyard.engines.accelerate import ACCELERATE
from steelyard.engines.engine import Engine
from steelyard.engines.megatron import MEGATRON
from steelyard.engines.torchtitan import TORCHTITAN
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.price import assemble_plan
from steelyard.planning.problem import stage_strategies
from steelyard.precision import Precision
from steelyard.schedules import PipelineConfig
from steelyard.search.evaluate import evaluate
from tests.cost.examples import cluster, config, job
from tests.cost.layer_bytes import layer_bytes
from tests.schedules.examples import pipeline

CONFIGS: list[tuple[int, int, str, int]] = [
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
    """Seed that is the same for the same configuration in every process."""
    return f"{pipeline.num_stages} {pipeline.num_microbatches} {pipeline.schedule} {pipeline.num_chunks}"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A plan drawn at random, as the search sees it and as a plan."""

    tables: CostTables
    boundaries: tuple[int, ...]
    strategies: tuple[int, ...]
    plan: Plan


def drawn_plans(of: Job, where: JobConfig, count: int) -> Iterator[Drawn]:
    """Plans of a configuration: runs of equal layers of random length, or every layer for itself."""
    rng = random.Random(seed(where.pipeline))
    tables = build_tables(where, stage_strategies(of, where.devices_per_stage, Decisions()))
    for number in range(count):
        boundaries = _cuts(tables, rng)
        strategies: list[int] = []
        for layer_type in tables.layers:
            legal = [index for index, allowed in enumerate(tables.legal[layer_type]) if allowed]
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
    folded = [tables.strategies[index] for index in chosen]
    strategies = unfold_layers(folded, tables.pipeline.num_chunks, of.chain.num_layers)
    size = of.cluster.num_devices // tables.pipeline.num_stages
    stages = tuple(
        StagePart(ranks=(stage * size, stage * size + size - 1), runs=fold_runs(first, strategies[first:end]))
        for stage, first, end in unfold_parts(boundaries, tables.pipeline.num_chunks, of.chain.num_layers)
    )
    return assemble_plan(of, tables.pipeline, stages)


def tensor_bytes(plan: Plan, of: Job) -> list[int]:
    """Bytes of each stage as predicted, without the allocator's slack."""
    return [
        sum(bytes_ for name, bytes_ in terms.items() if name != "allocator slack") for terms in predict_memory(plan, of)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_plan_takes_what_the_search_adds_up(config: tuple[int, int, str, int], precision: Precision) -> None:
    num_stages, count, schedule, chunks = config
    of = job(cluster(1, 8), global_batch=16 * count, precision=precision, num_hidden_layers=16)
    where = JobConfig(job=of, pipeline=pipeline(num_stages, count, schedule, chunks))
    for drawn in drawn_plans(of, where, 12):
        found = evaluate(drawn.tables, drawn.boundaries, drawn.strategies).stages
        rounded = [(chunks > 1) * where.pipeline.in_flight(stage) for stage in range(num_stages)]
        for each, num_bytes, most in zip(found, tensor_bytes(drawn.plan, of), rounded, strict=True):
            assert 0 <= each.total_bytes - num_bytes <= most


@pytest.mark.parametrize(("num_blocks", "chunks"), [(15, 2), (14, 2), (14, 4)])
def test_chunks_with_fewer_blocks_at_the_ends_take_what_the_search_adds_up(num_blocks: int, chunks: int) -> None:
    of = job(cluster(1, 8), global_batch=128, num_hidden_layers=num_blocks)
    where = JobConfig(job=of, pipeline=pipeline(2, 8, "interleaved-1f1b", chunks))
    for drawn in drawn_plans(of, where, 4):
        found = evaluate(drawn.tables, drawn.boundaries, drawn.strategies).stages
        assert [each.total_bytes for each in found] == pytest.approx(tensor_bytes(drawn.plan, of), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [TORCHTITAN, ACCELERATE, MEGATRON], ids=["torch", "whole", "own"])
@pytest.mark.parametrize("config", [(1, 4, "1f1b", 1), (2, 8, "1f1b", 1), (4, 2, "gpipe", 1)], ids=str)
def test_a_plan_of_a_framework_takes_what_the_search_adds_up(config: tuple[int, int, str, int], engine: Engine) -> None:
    num_stages, count, schedule, chunks = config
    of = replace(job(cluster(1, 8), global_batch=16 * count, num_hidden_layers=8), engine=engine)
    where = JobConfig(job=of, pipeline=pipeline(num_stages, count, schedule, chunks))
    for drawn in drawn_plans(of, where, 6):
        found = evaluate(drawn.tables, drawn.boundaries, drawn.strategies).stages
        predicted = [sum(terms.values()) for terms in predict_memory(drawn.plan, of)]
        gaps = [
            each.total_bytes * (1 + slack_fraction(of)) - bytes_ for each, bytes_ in zip(found, predicted, strict=True)
        ]
        assert 0 <= min(gaps) <= max(gaps) < 100  # bytes: bytes of the engine's own buffers are counted rounded up


def test_layers_behind_the_one_that_works_have_freed_what_they_saved() -> None:
    """Layers that recompute all work with more, which counts less the more those behind them have saved."""
    of, where = job(), config(num_microbatches=4)
    recomputing, saving = parse_strategy("fsdp8 remat=full"), parse_strategy("fsdp8")
    tables = build_tables(where, (recomputing, saving))
    first, last = (0, 0, 1, 1, 1), (1, 1, 1, 0, 0)
    layers = len(tables.layers)
    inner = [[1, *each[: layers - 2], 1] for each in (first, last)]
    early, late = (evaluate(tables, (0, layers), each).peak_bytes for each in inner)
    assert early <= late
    layer_type = of.chain.layer_types[tables.layers[1]]
    full, none = (layer_bytes(layer_type, each, where) for each in (recomputing, saving))
    assert full.transient_bytes > none.transient_bytes
    assert full.activation_bytes < none.activation_bytes
