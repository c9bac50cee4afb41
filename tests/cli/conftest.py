"""Fixtures for the command line."""

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from click.testing import Result
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from steelyard.cli import diff, explain, plan
from steelyard.cli.app import app
from steelyard.cli.schema import printed_schema
from steelyard.errors import UserError
from steelyard.planning import explain as explaining

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run a command in this process and return its result; a `UserError` is kept as the exception of the result.

    JSON that a command prints has the keys of its schema, whichever test runs it.
    """

    def call(*arguments: object) -> Result:
        words = [str(argument) for argument in arguments]
        result = CliRunner().invoke(app, words)
        if "--json" in words and words[0] != "schema" and result.stdout:
            check_printed(words[0], result.stdout)
        return result

    return call


def check_printed(command: str, text: str) -> None:
    """Raise unless a text is JSON of the schema that ``steelyard schema COMMAND --json`` prints."""
    _validator(command).validate(json.loads(text))


@cache
def _validator(command: str) -> Draft202012Validator:
    return Draft202012Validator(printed_schema(command))


@pytest.fixture(scope="module", autouse=True)
def _searched_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Search a plan and its baselines once per module, however often they are shown: as text, JSON or page.

    The line on other engines is left out of the text, except in modules with ``SHOWS_ENGINES``: it takes a second of
    search for each engine.
    """
    shows_engines = getattr(request.module, "SHOWS_ENGINES", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "complete", _once(plan.complete, lambda request, progress: request))
        others = _once(plan.engine_answers, lambda request, result, progress, limit_s=None: (request, limit_s is None))

        def answers(*given: Any, limit_s: float | None = None, **named: Any) -> Any:
            return others(*given, limit_s=limit_s, **named) if shows_engines or limit_s is None else ()

        patch.setattr(plan, "engine_answers", answers)
        patch.setattr(diff, "_by_engine", _once(diff._by_engine, lambda one, path, engine, show: (one, engine)))
        searched = _once(
            explaining.what_was_searched,
            lambda study, plan, deadline=math.inf, progress=None: (study.request, plan, deadline),
        )
        patch.setattr(explaining, "what_was_searched", searched)
        of_record = _once(explain.slow_nodes, lambda plan, request, _job, path: (plan, request, path.read_text()))
        patch.setattr(explain, "slow_nodes", of_record)
        yield


def _once(function: Callable[..., Any], key: Callable[..., object]) -> Callable[..., Any]:
    """The function, which answers from what it has found where the key is equal; errors are found again."""
    known: list[tuple[object, Any]] = []

    def answer(*given: Any, **named: Any) -> Any:
        asked = key(*given, **named)
        found = [result for other, result in known if other == asked]
        if not found:
            found = [function(*given, **named)]
            known.append((asked, found[0]))
        return found[0]

    return answer


def user_error(result: Result) -> UserError:
    assert isinstance(result.exception, UserError), result.output
    return result.exception
