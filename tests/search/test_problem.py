"""Tests of problem files: round trip, and a clear error for every mistake."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProblemError
from steelyard.search import search
from steelyard.search.problem import Problem, load_problem, parse_problem, save_problem, solve_problem
from tests.problems.random_tables import random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_configs


def small() -> dict[str, Any]:
    """The example of the module's docstring."""
    text = (load_problem.__globals__["__doc__"]).split("```json")[1].split("```")[0]
    return json.loads(text)


def equal(one: CostTables, other: CostTables) -> bool:
    pairs = [(getattr(one, each.name), getattr(other, each.name)) for each in fields(CostTables)]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def test_tables_survive_the_file(tmp_path: Path) -> None:
    for seed in range(20):
        tables = random_tables(np.random.default_rng(seed))
        problem = Problem(name="x", budget_bytes=seed, configs=(tables,), samples=(seed + 1,))
        save_problem(tmp_path / "p.json", problem)
        again = load_problem(tmp_path / "p.json")
        assert equal(again.configs[0], tables)
        assert (again.name, again.budget_bytes, again.samples) == ("x", seed, (seed + 1,))


def test_a_saved_problem_gives_the_same_result(tmp_path: Path) -> None:
    configs = decoder_configs(LLAMA3_8B, num_devices=4, global_batch=16, most_stages=2, most_microbatches=16)
    budget = 60 * 10**9
    problem = Problem(name="llama", budget_bytes=budget, configs=tuple(configs), samples=(1,) * len(configs))
    save_problem(tmp_path / "p.json", problem)
    solved, direct = solve_problem(load_problem(tmp_path / "p.json")), search(configs, budget)
    assert [each.result for each in solved.configs] == [each.result for each in direct.configs]


def test_the_documented_example_is_solved() -> None:
    result = solve_problem(parse_problem(small()))
    assert result.best is not None
    assert result.best.samples == 32
    assert result.best.solution.peak_bytes <= 8 * 10**9


def put(content: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    place: Any = content
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    place[int(last) if last.isdigit() else last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("settings.0.transfers_s", 1.0, "transfer_s"),
        ("version", 3, "version"),
        ("settings", [], "settings"),
        ("settings.0.schedule", "2f2b", "1f1b"),
        ("settings.0.kinds.0.time_s.0", -1.0, "greater than or equal to 0"),
        ("settings.0.kinds.0.time_s.0", float("nan"), r"settings\[0\].kinds\[0\].time_s\[0\]"),
        ("settings.0.kinds.0.time_s", [1.0], "2, one for each strategy"),
        ("settings.0.kinds.0.static_bytes.1", 1.5, "int"),
        ("settings.0.switch_s.0.seconds", [[0, 0], [0]], "switch_s"),
        ("settings.0.switch_s", [], "each layer type once"),
        ("settings.0.layers.0.kind", "blok", "did you mean block"),
        ("settings.0.strategies.0", "dpp2", "strategies"),
        ("settings.0.num_stages", 0, "num_stages"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: object, message: str) -> None:
    content = small()
    put(content, path, value)
    with pytest.raises(InvalidProblemError, match=message):
        parse_problem(content)


@pytest.mark.parametrize("path", ["version", "settings.0.kinds.0.time_s", "settings.0.switch_s", "settings.0.layers"])
def test_missing_keys_are_errors(path: str) -> None:
    content = small()
    *parents, last = path.split(".")
    place: Any = content
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    del place[last]
    with pytest.raises(InvalidProblemError, match="required"):
        parse_problem(content)


def test_a_file_that_is_not_json_or_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(InvalidProblemError, match="JSON"):
        load_problem(tmp_path / "p.json")
    with pytest.raises(InvalidProblemError, match="no file"):
        load_problem(tmp_path / "none.json")


def test_a_problem_without_a_budget_needs_one() -> None:
    content = small()
    del content["budget_bytes"]
    with pytest.raises(InvalidProblemError, match="budget"):
        solve_problem(parse_problem(content))
    assert solve_problem(parse_problem(content), 10**10).best is not None
