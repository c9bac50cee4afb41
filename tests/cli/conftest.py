"""Fixtures for the command line."""

from collections.abc import Callable

import pytest
from click.testing import Result
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.errors import UserError

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs a command in this process and returns its result; a `UserError` is kept as the exception of the result."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


def user_error(result: Result) -> UserError:
    assert isinstance(result.exception, UserError), result.output
    return result.exception
