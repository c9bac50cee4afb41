"""Tests that docs/how-to/problem-files.md is true: its example, its table of choices, its keys."""

import json
import re
from pathlib import Path

import pytest

from steelyard.search.problem import ConfigCosts, ProblemFile, parse_problem, solve_problem

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "problem-files.md").read_text()
EXAMPLE = json.loads(re.findall(r"```json\n(.*?)```", TEXT, flags=re.DOTALL)[0])
ROW = re.compile(r"^\| `(\w+)`, `(\w+)` +\|.*= (\d+) ms +\|.*= ([\d.]+) GB +\|$", flags=re.MULTILINE)


def test_the_choices_come_out_with_the_times_and_bytes_shown() -> None:
    shown = ROW.findall(TEXT)
    assert len(shown) == 3
    problem = parse_problem(EXAMPLE)
    for budget, (first, second, milliseconds, gigabytes) in zip((None, 7 * 10**9, 6 * 10**9), shown, strict=True):
        best = solve_problem(problem, budget).best
        assert best is not None
        names = [str(best.tables.strategies[index]) for index in best.solution.strategies]
        assert sorted(names) == sorted([first, second])
        assert best.solution.step_s == pytest.approx(float(milliseconds) / 1000)
        assert best.solution.peak_bytes == pytest.approx(float(gigabytes) * 1e9)


def test_the_missing_bytes_are_those_shown() -> None:
    miss = solve_problem(parse_problem(EXAMPLE), 4 * 10**9).nearest_miss
    assert miss is not None
    assert f"{miss.miss_bytes} bytes are missing" in TEXT


def test_every_key_of_the_schema_is_explained() -> None:
    explained = set(re.findall(r"^\| `(\w+)` ", TEXT, flags=re.MULTILINE))
    assert set(ProblemFile.model_fields) | set(ConfigCosts.model_fields) <= explained
