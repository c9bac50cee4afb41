"""``steelyard schema``: of files, and of every command's JSON, against which the other tests here hold what is printed.

`tests.cli.conftest.check_printed` validates the output of every run with ``--json``; here are those that no other test
has.
"""

import inspect
import json
from importlib import import_module
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from steelyard.cli.app import COMMANDS
from steelyard.cli.schema import FILES, printed_schema, printed_types
from tests.cli.conftest import Run, check_printed, user_error

JOB = ("llama3.2-1b", "--cluster", "1x1xa100-40gb", "--global-batch", 2, "--seq-len", 4096)


@pytest.mark.parametrize("name", FILES)
def test_the_schema_of_a_file_is_printed(run: Run, name: str) -> None:
    schema = json.loads(run("schema", name).stdout)
    assert "version" in schema["properties"]
    assert schema["additionalProperties"] is False


def test_every_command_that_prints_json_says_of_which_type() -> None:
    functions = {name: getattr(import_module(f"steelyard.cli.{module}"), name) for name, module in COMMANDS.items()}
    with_json = {name for name, each in functions.items() if "as_json" in inspect.signature(each).parameters}
    assert with_json == set(printed_types()) >= {"plan", "check", "models"}


@pytest.mark.parametrize("name", printed_types())
def test_the_schema_of_what_a_command_prints_is_valid_and_names_all_keys(run: Run, name: str) -> None:
    schema = json.loads(run("schema", name, "--json").stdout)
    assert schema == printed_schema(name)
    Draft202012Validator.check_schema(schema)
    objects = [each for each in (schema, *schema.get("$defs", {}).values()) if "properties" in each]
    assert objects
    is_open = {each.get("title") for each in objects if each.get("additionalProperties") is not False}
    assert is_open <= {"LayerRun"}, "whose modes are keys of their own"


@pytest.mark.parametrize("words", [("models",), ("devices",), ("links",), ("export", "--to", "list")])
def test_lists_are_as_their_schemas_say(run: Run, words: tuple[str, ...]) -> None:
    assert len(json.loads(run(*words, "--json").stdout)) > 5


@pytest.mark.slow
def test_advice_and_the_largest_that_fits_are_as_their_schema_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.planning.advise.TOTAL_S", 0.5)
    monkeypatch.setattr("steelyard.planning.advise.LIMIT_S", 0.05)
    advice = json.loads(run("advise", *JOB, "--memory", "12GiB", "--json").stdout)
    assert advice["changes"]
    largest = json.loads(run("advise", *JOB, "--max", "batch", "--json").stdout)
    assert largest["size"] >= 2


def test_a_plan_where_nothing_fits_is_as_its_schema_says(run: Run) -> None:
    result = run("plan", *JOB, "--memory", "2GiB", "--stages", 1, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["status"] == "infeasible"


@pytest.mark.parametrize("content", [{"fits": True, "ranks": [], "more": 1}, {"fits": True}, {"fits": 1, "ranks": []}])
def test_another_key_a_missing_one_and_another_type_are_found(content: Any) -> None:
    check_printed("check", '{"fits": true, "ranks": []}')
    with pytest.raises(ValidationError):
        check_printed("check", json.dumps(content))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("plann",), "plan"),
        (("check",), "steelyard schema check --json"),
        (("cluster", "--json"), "steelyard schema cluster"),
        (("chekc", "--json"), "check"),
    ],
)
def test_an_unknown_schema_names_the_nearest(run: Run, words: tuple[str, ...], hint: str) -> None:
    assert hint in user_error(run("schema", *words)).hint
