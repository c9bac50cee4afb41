"""What a stage holds as each of its layers works, by layers and their neighbours: never above the walk, mostly near."""

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from steelyard.cost.execution import ACCELERATE, TORCHTITAN, Execution
from steelyard.cost.pools import PooledFloors
from steelyard.cost.setting import Job, Setting
from steelyard.cost.working import WorkingBytes, working_bytes
from steelyard.plan.plan import Precision
from tests.cost.examples import cluster, job
from tests.cost.test_memory_floor import SETTINGS, Drawn, drawn_plans, walked_bytes
from tests.oracles.working import stage_bytes
from tests.schedules.examples import pipeline

Setup = tuple[int, int, str, int]


def shares(of: Job, setting: Setup, count: int) -> list[float]:
    """Of stages of random plans, by what part of the walk the bytes by layers are."""
    where = Setting(job=of, pipeline=pipeline(*setting))
    found: list[float] = []
    working: WorkingBytes | None = None
    for drawn in drawn_plans(of, where, count):
        working = working or working_bytes(drawn.tables, of)
        assert working is not None
        found += _shares(drawn, working, of)
    return found


def _shares(drawn: Drawn, working: WorkingBytes, of: Job) -> list[float]:
    walked = walked_bytes(drawn, of)
    spans = enumerate(pairwise(drawn.boundaries))
    return [stage_bytes(drawn.tables, working, stage, span, drawn.strategies) / walked[stage] for stage, span in spans]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_walk_is_below_the_bytes_of_layers_as_they_work(setting: Setup, precision: Precision) -> None:
    of = job(cluster(1, 8), global_batch=16 * setting[1], precision=precision, num_hidden_layers=16)
    assert max(shares(of, setting, 30)) <= 1


@pytest.mark.parametrize(
    ("setting", "execution"),
    [(each, TORCHTITAN if each[0] > 1 else ACCELERATE) for each in SETTINGS],
    ids=str,
)
def test_no_walk_of_another_framework_is_below_them(setting: Setup, execution: Execution) -> None:
    of = job(cluster(1, 8), global_batch=16 * setting[1], num_hidden_layers=16)
    assert max(shares(replace(of, execution=execution), setting, 10)) <= 1


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_of_one_stage_they_are_the_walk_of_most_plans(count: int) -> None:
    """Whose layers work with more than their neighbours and themselves only as the first ones of a pass begin."""
    of = job(cluster(1, 8), global_batch=16 * count, num_hidden_layers=16)
    assert median(shares(of, (1, count, "1f1b", 1), 30)) > 0.99999


def test_those_of_pools_are_those_of_each_pool_side_by_side() -> None:
    from steelyard.plan.decisions import Decisions
    from steelyard.planning.pool_space import PooledSpace
    from tests.planning.test_pools import pooled

    of = pooled("1x4xh100-80gb+1x4xa100-40gb")
    space = PooledSpace(of, Decisions())
    for setting in list(space.settings())[::7]:
        tables = space.tables(setting)
        assert tables.pools is not None
        found = PooledFloors(of).working(tables)
        assert found is not None
        for place, (pool, part) in enumerate(zip(tables.pools.order, tables.pools.parts, strict=True)):
            own = working_bytes(part, of.pools[pool])
            assert own is not None
            columns = tables.pools.of_strategies == place
            for name in ("static_bytes", "saved_bytes", "freed_bytes", "working_bytes", "reduced_bytes"):
                assert (getattr(found, name)[:, :, columns] == getattr(own, name)).all(), (setting, name)
