"""Refined plans: never slower, always accepted, and nothing that is left to gain in one step is left."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from steelyard.cost.predict import predict_memory
from steelyard.cost.tables import CostTables
from steelyard.plan.decisions import Decisions
from steelyard.planning import refine, walked_search
from steelyard.planning.acceptance import accept
from steelyard.planning.problem import make_tables
from steelyard.planning.refine import refined
from steelyard.search.evaluate import Solution, evaluate
from tests.jobs import make_job
from tests.problems.random_tables import random_tables


def drawn(seed: int, *, faster_takes_more: bool = False) -> tuple[CostTables, Solution, "Judge"]:
    """Tables with legal strategies, a choice of them, and a judge who accepts that choice.

    Where what is faster takes more, switches take no time.
    """
    rng = np.random.default_rng(seed)
    while True:
        tables = random_tables(rng, num_layers=6, num_stages=int(rng.integers(1, 3)), num_strategies=4)
        if tables.legal.any(axis=1).all():
            break
    num_bytes = rng.integers(1, 9, tables.legal.shape)
    if faster_takes_more:
        tables = replace(tables, switch_s=0 * tables.switch_s)
        num_bytes = (-tables.time_s).argsort(axis=1).argsort(axis=1) + 1
    cut = int(rng.integers(1, 6))
    boundaries = (0, cut, 6) if tables.pipeline.num_stages == 2 else (0, 6)
    chosen = [int(rng.choice(np.flatnonzero(tables.legal[kind]))) for kind in tables.layers]
    solution = evaluate(tables, boundaries, chosen)
    return tables, solution, Judge(num_bytes, tables, solution, spare=int(rng.integers(0, 60)))


class Judge:
    """Adds up what layers take, the more the further behind; has room for a little more than a first solution takes."""

    def __init__(self, num_bytes: NDArray[np.int64], tables: CostTables, first: Solution, *, spare: int) -> None:
        self._bytes, self._kinds = num_bytes, tables.layers
        self._room = self._taken(first) + spare
        self.num_asked = 0

    def __call__(self, solution: Solution) -> bool:
        """Whether it fits."""
        self.num_asked += 1
        return self._taken(solution) <= self._room

    def _taken(self, solution: Solution) -> int:
        pairs = zip(self._kinds, solution.strategies, strict=True)
        return sum((layer + 1) * int(self._bytes[pair]) for layer, pair in enumerate(pairs))


def test_a_refined_solution_is_accepted_and_never_slower() -> None:
    gained = 0
    for seed in range(200):
        tables, solution, judge = drawn(seed)
        found = refined(tables, solution, is_refused=lambda _: False, fits=judge, is_over=lambda: False)
        assert judge(found), seed
        assert found.boundaries == solution.boundaries
        assert found == evaluate(tables, found.boundaries, found.strategies), seed
        assert found.step_s <= solution.step_s, seed
        gained += found.step_s < solution.step_s
    assert gained > 100


def test_no_faster_strategy_is_left_for_the_first_layer_that_it_would_suit() -> None:
    for seed in range(200):
        tables, solution, judge = drawn(seed, faster_takes_more=True)
        found = refined(tables, solution, is_refused=lambda _: False, fits=judge, is_over=lambda: False)
        for first, end in itertools.pairwise(found.boundaries):
            for kind, strategy in np.argwhere(tables.legal).tolist():
                own = [layer for layer in range(first, end) if tables.layers[layer] == kind]
                slower = [
                    each for each in own if tables.time_s[kind, found.strategies[each]] > tables.time_s[kind, strategy]
                ]
                changed = [strategy if layer in slower[:1] else each for layer, each in enumerate(found.strategies)]
                better = evaluate(tables, found.boundaries, changed)
                assert not judge(better) or better.step_s >= found.step_s * (1 - 2 * refine.LEAST_GAIN), seed


def test_nothing_is_changed_when_the_time_is_over() -> None:
    tables, solution, judge = drawn(1)
    assert refined(tables, solution, is_refused=lambda _: False, fits=judge, is_over=lambda: True) is solution
    assert not judge.num_asked


@pytest.mark.slow
def test_a_plan_with_a_gap_is_refined_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(
        "llama3-70b",
        "8x8xh100-80gb",
        global_batch=512,
        seq_len=8192,
        precision="bf16",
        memory="40GiB",
        profile=None,
    )
    tables = make_tables(job, Decisions())
    found = accept(job, tables)
    best = found.ranked[0]
    assert all(sum(terms.values()) <= job.budget_bytes for terms in predict_memory(best.plan, job))
    monkeypatch.setattr(walked_search, "NUM_REFINED", 0)
    without = accept(job, tables)
    assert best.outcome.score_s < without.ranked[0].outcome.score_s
    assert found.search.gap < without.search.gap
