"""Tests of the best cuts with given strategies, against all cuts and numbers of recomputed blocks."""

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


def drawn(rng: np.random.Generator, leading: Leading, *, num_pairs: int = 1) -> tuple[CostTables, Choice]:
    """Random tables and one choice: strategy 0 for each type, and strategy 1 for those that are recomputed.

    With three pairs each stage has strategies 0 and 1, 0 and 2, or 1 and 2.
    """
    most = 4000 if num_pairs == 1 else 600  # of which each pair makes several
    tables = random_tables(rng, max_plans=most, frees=bool(rng.integers(2)), interleaved=bool(rng.integers(2)))
    columns = np.zeros(len(tables.layer_types), dtype=np.int64)
    recomputed = columns.copy()
    num_remats = min(len(tables.strategies), 3 if num_pairs == 3 else 2)
    if leading is not Leading.NONE and num_remats > 1:
        recomputed[rng.random(len(columns)) < 0.7] = 1
        if tables.last_types:
            recomputed = recomputed[list(tables.last_types)] if rng.random() < 0.5 else recomputed
            for row, last in enumerate(tables.last_types):
                recomputed[row] = recomputed[last]
        for more in range(1, num_remats):
            _only_recompute(tables, more)
    others = ()
    if num_pairs == 3 and num_remats == 3:
        others = ((columns, 2 * recomputed), (recomputed, 2 * recomputed))
    return tables, Choice(
        columns=columns, recomputed=recomputed, leading=leading, others=others, least_s=0.0, least_bytes=0.0
    )


def _only_recompute(tables: CostTables, more: int) -> None:
    """Make a strategy the one before it with more recomputation."""
    less = more - 1
    tables.time_s[:, more] = np.maximum(tables.time_s[:, less], tables.time_s[:, more])
    tables.activation_bytes[:, more] = np.minimum(tables.activation_bytes[:, less], tables.activation_bytes[:, more])
    tables.static_bytes[:, more] = tables.static_bytes[:, less]
    tables.transient_bytes[:, more] = tables.transient_bytes[:, less]
    for table in (tables.freed_bytes, *(() if tables.buffers is None else tables.buffers)):
        if table is not None:
            table[:, more] = table[:, less]
    tables.switch_s[:, more, :] = tables.switch_s[:, less, :]
    tables.switch_s[:, :, more] = tables.switch_s[:, :, less]
    if tables.received is not None:
        for table in (tables.received.hidden_bytes, tables.received.layouts):
            table[more] = table[less]
        tables.received.is_apart[more] = tables.received.is_apart[less]
        tables.received.is_apart[:, more] = tables.received.is_apart[:, less]


def every_plan(tables: CostTables, choice: Choice) -> Iterator[Solution]:
    """All plans of a choice that are legal, whatever they hold."""
    stages, length = tables.pipeline.num_stages, len(tables.layers)
    rows = list(tables.layers)
    pairs = ((choice.columns, choice.recomputed), *choice.others)
    is_block = [any(plain[row] != recomputed[row] for plain, recomputed in pairs) for row in rows]
    same = range(sum(is_block) + 1)
    counts = {Leading.NONE: [((0, 0),) * stages], Leading.SAME: [((0, n),) * stages for n in same]}
    for inner in itertools.combinations(range(1, length), stages - 1):
        bounds = (0, *inner, length)
        sizes = [sum(is_block[a:b]) for a, b in itertools.pairwise(bounds)]
        free = itertools.product(*(itertools.product(range(len(pairs)), range(size + 1)) for size in sizes))
        for given in counts.get(choice.leading, free):
            strategies = []
            for (start, end), (pair, count) in zip(itertools.pairwise(bounds), given, strict=True):
                own = [int(pairs[pair][0][row]) for row in rows[start:end]]
                for layer in [layer for layer in range(start, end) if is_block[layer]][:count]:
                    own[layer - start] = int(pairs[pair][1][rows[layer]])
                strategies += own
            try:
                yield evaluate(tables, bounds, strategies)
            except InvalidProblemError:
                continue


@pytest.mark.slow
@pytest.mark.parametrize(("leading", "num_pairs"), [*((each, 1) for each in Leading), (Leading.FREE, 3)])
def test_no_cuts_are_faster_than_the_best(leading: Leading, num_pairs: int) -> None:
    num_found = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        tables, choice = drawn(rng, leading, num_pairs=num_pairs)
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
