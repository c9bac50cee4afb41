"""The best cuts with given strategies: the fastest of all cuts and numbers of recomputed blocks, one by one."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProblemError
from steelyard.search import evaluate, search
from steelyard.search.cuts import Choice, Leading, best_cuts
from steelyard.search.evaluate import Solution
from tests.problems.random_tables import random_tables


def drawn(rng: np.random.Generator, leading: Leading) -> tuple[CostTables, Choice]:
    """Random tables and one choice: strategy 0 for each type, and strategy 1 for those that are recomputed."""
    tables = random_tables(rng, max_plans=4000, frees=bool(rng.integers(2)), interleaved=bool(rng.integers(2)))
    columns = np.zeros(len(tables.layer_types), dtype=np.int64)
    recomputed = columns.copy()
    if leading is not Leading.NONE and len(tables.strategies) > 1:
        recomputed[rng.random(len(columns)) < 0.7] = 1
        if tables.last_types:
            recomputed = recomputed[list(tables.last_types)] if rng.random() < 0.5 else recomputed
            for row, last in enumerate(tables.last_types):
                recomputed[row] = recomputed[last]
        tables.time_s[:, 1] = np.maximum(tables.time_s[:, 0], tables.time_s[:, 1])
        tables.activation_bytes[:, 1] = np.minimum(tables.activation_bytes[:, 0], tables.activation_bytes[:, 1])
        tables.static_bytes[:, 1] = tables.static_bytes[:, 0]
        tables.transient_bytes[:, 1] = tables.transient_bytes[:, 0]
        for table in (tables.freed_bytes, *(() if tables.buffers is None else tables.buffers)):
            if table is not None:
                table[:, 1] = table[:, 0]
        tables.switch_s[:, 1, :], tables.switch_s[:, :, 1] = tables.switch_s[:, 0, :], tables.switch_s[:, :, 0]
        if tables.received is not None:
            for table in (tables.received.hidden_bytes, tables.received.layouts):
                table[1] = table[0]
            tables.received.is_apart[1], tables.received.is_apart[:, 1] = (
                tables.received.is_apart[0],
                tables.received.is_apart[:, 0],
            )
    return tables, Choice(columns=columns, recomputed=recomputed, leading=leading, least_s=0.0, least_bytes=0.0)


def every_plan(tables: CostTables, choice: Choice) -> Iterator[Solution]:
    """All plans of a choice that are legal, whatever they hold."""
    stages, length = tables.pipeline.num_stages, len(tables.layers)
    rows = list(tables.layers)
    is_block = [choice.columns[row] != choice.recomputed[row] for row in rows]
    counts = {Leading.NONE: [(0,) * stages], Leading.SAME: [(n,) * stages for n in range(sum(is_block) + 1)]}
    for inner in itertools.combinations(range(1, length), stages - 1):
        bounds = (0, *inner, length)
        sizes = [sum(is_block[a:b]) for a, b in itertools.pairwise(bounds)]
        free = itertools.product(*(range(size + 1) for size in sizes))
        for given in counts.get(choice.leading, free):
            strategies = [int(choice.columns[row]) for row in rows]
            for (start, end), count in zip(itertools.pairwise(bounds), given, strict=True):
                for layer in [layer for layer in range(start, end) if is_block[layer]][:count]:
                    strategies[layer] = int(choice.recomputed[rows[layer]])
            try:
                yield evaluate(tables, bounds, strategies)
            except InvalidProblemError:
                continue


@pytest.mark.parametrize("leading", list(Leading))
def test_no_cuts_are_faster_than_the_best(leading: Leading) -> None:
    num_found = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        tables, choice = drawn(rng, leading)
        if tables.cross_layer_inputs and leading is not Leading.NONE:
            continue
        plans = list(every_plan(tables, choice))
        peaks = sorted(each.peak_bytes for each in plans) or [10]
        budget = int(peaks[int(rng.integers(len(peaks)))])
        fitting = [each.step_s for each in plans if each.peak_bytes <= budget]
        found = best_cuts(tables, choice, budget)
        if not fitting:
            assert found is None, seed
            continue
        num_found += 1
        assert found is not None, seed
        assert found.peak_bytes <= budget, seed
        assert found.step_s == pytest.approx(min(fitting), rel=1e-9), seed
        assert found.step_s == 0 or best_cuts(tables, choice, budget, cutoff_s=found.step_s * 0.999) is None, seed
        assert best_cuts(tables, choice, budget, cutoff_s=found.step_s) is not None, seed
    assert num_found > 40


def test_a_search_of_choices_finds_the_best_of_them_and_what_none_fits_misses() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tables, choice = drawn(rng, Leading.NONE)
        plans = list(every_plan(tables, choice))
        if not plans:
            continue
        least = min(each.peak_bytes for each in plans)
        found = search([tables], least, choices=lambda _, choice=choice: [choice])
        assert found.best is not None
        fitting = [each.step_s for each in plans if each.peak_bytes <= least]
        assert found.best.score_s == pytest.approx(min(fitting), rel=1e-9), seed
        refused = search([tables], least - 1, choices=lambda _, choice=choice: [choice])
        assert refused.best is None
        assert refused.nearest_miss is not None, seed
