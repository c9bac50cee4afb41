"""Tests that no user input causes a traceback, a long run or high memory: random damage and past findings."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.cli.schema import FILES
from steelyard.errors import InvalidPlanError, UserError
from steelyard.hardware.parse import pools_from_yaml
from steelyard.model.own import OwnSplit
from steelyard.model.split import ModelSplit
from steelyard.plan.file import parse_value
from steelyard.plan.plan import Plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.search.problem import parse_problem
from tests.damage.cases import make_case, whole_files
from tests.damage.corpus import kept
from tests.damage.documents import REAL_TYPES, SPLIT_TYPE, whole
from tests.damage.numbers import BEYOND, changed, places

CASES = 100
"""Examples are the same each time; `make fuzz` and `make nightly` try others."""


def _plan(content: Any) -> Plan:
    return parse_value(content, Plan, InvalidPlanError, what="plan")


READERS: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("plan", "other", "split", "own"), _plan),
    "profile": partial(parse_value, model=Profile, error_type=UserError, what="profile"),
    "record": partial(parse_value, model=RunRecord, error_type=UserError, what="record"),
    "problem": parse_problem,
    "cluster": lambda content: pools_from_yaml(yaml.safe_dump(content)),
}


@pytest.fixture(scope="module", name="documents")
def _documents() -> dict[str, Any]:
    return whole()


def refusal(read: Callable[[Any], object], content: Any) -> str:
    """Message of a reader that refuses content; empty if it accepts it."""
    try:
        read(content)
    except UserError as error:
        return str(error)
    return ""


def unbounded(schema: Any, place: str = "") -> Iterator[str]:
    """The places in a JSON schema of whole numbers without a least or a greatest value."""
    if isinstance(schema, dict):
        low, high = ({key, f"exclusive{key.title()}"} & {*schema} for key in ("minimum", "maximum"))
        if schema.get("type") == "integer" and not (low and high) and not {"const", "enum"} & {*schema}:
            yield place
    for key, inner in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(inner, dict | list):
            yield from unbounded(inner, f"{place}.{key}")


def numbers_of(schema: Any, inside: bool = False) -> Iterator[str]:
    """The names in a JSON schema of what holds whole numbers."""
    for key, inner in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(inner, dict | list):
            if inside and '"integer"' in json.dumps(inner):
                yield str(key)
            yield from numbers_of(inner, key == "properties")


def run_damage(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run cases in a separate process, which may be limited, and in which nothing imports torch."""
    command = [sys.executable, "-m", "tests.damage", *map(str, arguments)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True)


@pytest.mark.slow
def test_neither_generated_damage_nor_a_wrong_number_nor_what_once_ended_badly_does() -> None:
    finished = run_damage("--cases", CASES, "--numbers", 1, "--kept")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert int(re.search(r"^(\d+) cases", finished.stdout, re.MULTILINE)[1]) > CASES + len(kept()) + 300  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.nightly
def test_no_number_in_place_of_another_ends_badly() -> None:
    finished = run_damage("--cases", 0, "--numbers", 6)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
def test_no_number_of_a_split_ends_badly_where_layers_are_traced() -> None:
    finished = run_damage("--split", SPLIT_TYPE, "--every", 30)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", REAL_TYPES)
def test_no_number_of_any_split_ends_badly_where_layers_are_traced(model_type: str) -> None:
    finished = run_damage("--split", model_type)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sort", READERS)
def test_a_number_that_is_no_index_is_refused_where_it_is_read_and_its_place_named(
    documents: dict[str, Any], sort: str
) -> None:
    taken = []
    for place in places(documents[sort]):
        if "config" in place:  # of transformers: the reader takes from it what it knows
            continue
        for number in BEYOND[1:] if "streams" in place and "shape" in place else BEYOND:  # -1: a token more than read
            error = refusal(READERS[sort], changed(documents[sort], place, number))
            named = [key for key in place if isinstance(key, str)][-1]
            if named not in error and "layers" not in error:
                taken.append(f"{place} = {number}: {error}")
    assert not taken, "\n".join(taken)


@pytest.mark.parametrize("name", ["plan", "problem", "profile", "record", "cluster"])
def test_every_whole_number_of_a_file_has_bounds(name: str) -> None:
    assert not list(unbounded(FILES[name].model_json_schema()))


def test_a_case_is_the_same_for_the_same_seed() -> None:
    documents = whole()
    cases = [make_case(seed, documents) for seed in range(50)]
    assert cases == [make_case(seed, documents) for seed in range(50)]
    assert len({repr(case) for case in cases}) == 50


def test_a_case_damages_files_that_its_command_reads() -> None:
    documents = whole()
    names = set(whole_files(documents))
    assert all(set(make_case(seed, documents).files) <= names for seed in range(200))


def test_every_number_of_a_split_is_in_a_file_that_is_damaged(documents: dict[str, Any]) -> None:
    known = {key for sort in ("split", "own") for place in places(documents[sort]) for key in place}
    names = {name for model in (ModelSplit, OwnSplit) for name in numbers_of(model.model_json_schema())}
    assert names - known == set()
