"""Tests of ``benchmarks/intervals.py``: error intervals by class, and the slowdown within which plans are ties."""

import random
import re
from dataclasses import replace

import intervals
import numpy as np
import pytest
from intervals import AsGood, Errors, Found, OfEngine, Timed, as_good, interval, of_engines, quantiles

from steelyard.cost.accuracy import EXPERTS
from tests.benchmarks.published_runs.examples import run_of
from tests.cost.examples import SPREADS

SPREAD = 0.2


def normal(seed: int, count: int = 400, middle: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(middle, SPREAD, count)


def alike(count: int = 8) -> Errors:
    return {str(seed): normal(seed) for seed in range(count)}


def timed(name: str, error: float, seconds: float = 1.0, **cells: str) -> Timed:
    return Timed(run=run_of("vtrain", id=name, step_time_s=str(seconds), **cells), log_error=error)


def test_of_sources_that_are_alike_the_interval_is_the_middle_nine_tenths() -> None:
    found = interval(alike())
    assert found.level <= 0.91
    assert np.log(found.high) == pytest.approx(1.645 * SPREAD, rel=0.1)
    assert np.log(found.low) == pytest.approx(-1.645 * SPREAD, rel=0.1)
    assert found.held_out >= 0.9


def test_sources_that_differ_need_a_wider_interval() -> None:
    unlike = {str(seed): normal(seed, middle=seed / 10) for seed in range(8)}
    assert interval(unlike).level > interval(alike()).level


def test_what_no_other_source_has_seen_counts_as_outside() -> None:
    found = interval({**alike(2), "odd": normal(9, middle=9.0)})
    assert found.inside["odd"] == 0
    assert found.held_out < 0.9


def test_sources_weigh_the_same_whatever_their_number_of_runs() -> None:
    few, many = np.full(20, 1.0), np.full(2000, -1.0)
    assert quantiles({"few": few, "many": many}, 0.98) == (-1.0, 1.0)


def test_a_source_of_few_runs_weighs_less() -> None:
    one = {"one": np.array([5.0])}
    assert quantiles({**alike(), **one}, 0.95)[1] < 1.0


def test_one_run_scales_the_others_of_its_model_and_device_alone() -> None:
    runs = [timed("a", 0.1), timed("b", 0.3), timed("c", 9.0, gpu="other")]
    assert sorted(intervals.scaled_by_one(runs)["vtrain"]) == pytest.approx([-0.2, 0.2])


def test_the_median_of_several_runs_scales_better_than_one() -> None:
    runs = [timed(str(index), error) for index, error in enumerate(normal(1, 60))]
    one, several = intervals.scaled_by_one(runs), intervals.scaled_by_several(runs, random.Random(0))
    assert np.std(several["vtrain"]) < np.std(one["vtrain"])


def test_pairs_of_a_job_have_the_plan_that_is_predicted_faster_first() -> None:
    pairs = intervals.pairs_of_jobs([timed("a", 0.0, 1.0), timed("b", np.log(4), 2.0), timed("c", 0.0, job="other")])
    assert pairs["vtrain"] == pytest.approx(np.array([[np.log(2), -np.log(2)]]))


def test_plans_are_as_good_up_to_the_slowdown_beyond_which_nine_in_ten_are_in_order() -> None:
    near = np.array([[0.05, 0.1 if index % 2 else -0.1] for index in range(40)])
    far = np.full((40, 2), 0.2)
    found = as_good({name: np.concatenate([near, far]) for name in "abc"})
    assert found.slowdown == pytest.approx(0.06)
    assert found.held_out == 1.0


def test_ratios_of_measured_profiles_are_read_where_they_stand() -> None:
    found = intervals.measured_profiles(intervals.RUNS.read_text(encoding="utf-8"))
    assert len(found) == 25
    assert found["dp4, 1 mb on 4"] == pytest.approx(np.log([1.42 / 1.52]))


def test_an_engine_has_an_interval_of_its_own_where_its_runs_hold_what_was_left_out() -> None:
    names = {"NeMo 25.02": 40, "torchtitan": 3}
    runs = [
        replace(timed(str(index), float(error)), run=run_of("vtrain", source_file=str(source), framework=name))
        for name, count in names.items()
        for source in range(3)
        for index, error in enumerate(normal(source, count))
    ]
    found = {}
    for far in (0.0, 1.0):
        each = [replace(run, log_error=run.log_error + far * int(run.run.source)) for run in runs]
        of_class = interval(intervals.by_source(each))
        found[far] = {line.engine: line.own for line in of_engines(EXPERTS, of_class, intervals.by_source(each), each)}
    assert found[0.0]["megatron-bridge"] is not None
    assert found[0.0]["torchtitan"] is None
    assert found[1.0] == {"megatron-bridge": None, "torchtitan": None}


def test_figures_are_written_into_the_table_of_the_cost_model_and_of_the_readme() -> None:
    figures = {"typical": 0.1234, "low": 0.5678, "high": 1.9876}
    one = Found(**figures, level=0.94, inside={"vtrain": 0.91}, num_runs=7, held_out=0.92)
    good = AsGood(slowdown=0.17, level=0.9, inside={"vtrain": 0.93}, num_pairs=9, held_out=0.95)
    found = [(spread.words, one) for spread in SPREADS]
    alone = OfEngine(spread=EXPERTS, engine="torchtitan", num_runs=21, num_sources=2, own=one, inside=0.92)
    engines = [alone, replace(alone, engine="megatron", own=None)]
    code = intervals.rewritten(intervals.TABLE_FILE.read_text(encoding="utf-8"), found, good, engines)
    own = '    ("experts", "torchtitan"): (0.123, 0.568, 1.988),\n    ("experts", "megatron"): None,\n}'
    assert re.search(r"^OF_ENGINES: .* = \{\n" + re.escape(own) + '\n"""', code, flags=re.MULTILINE)
    assert len(re.findall(r"typical=0.123, low=0.568, high=1.988\)$", code, flags=re.MULTILINE)) == len(SPREADS)
    assert "\nAS_GOOD = 0.17\n" in code
    tables = intervals.lines(found, good, engines)
    text = intervals.in_page(intervals.PAGE.read_text(encoding="utf-8"), tables)
    assert "| dense 16-bit | 7 | 0.123 | 0.568 | 1.988 | 0.94 | 92.0% |" in text
    assert "| vtrain | 91% |" in text
    assert "| experts, torchtitan | 21 | 2 | 0.123 | 0.568 | 1.988 | 92.0% |" in text
    assert "| experts, megatron | 21 | 2 | of the class | | | 92.0% |" in text
    assert intervals.in_page(text, tables) == text
