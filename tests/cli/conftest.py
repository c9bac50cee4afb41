"""Fixtures for the command line: one cache of traces for all of its tests, so that a model is traced once."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.errors import UserError

Run = Callable[..., Result]


@pytest.fixture(scope="session", autouse=True)
def trace_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def run() -> Run:
    """Runs a command in this process and returns its result; a `UserError` is kept as the exception of the result."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


def user_error(result: Result) -> UserError:
    assert isinstance(result.exception, UserError), result.output
    return result.exception
