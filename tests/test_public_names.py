"""Tests that ``dir``, ``help`` and ``--version`` show what ``import steelyard`` offers."""

import pydoc
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

import steelyard
from steelyard.cli.app import app


@pytest.mark.parametrize("name", [*steelyard.__all__, "__version__"])
def test_every_public_name_is_listed_before_it_is_loaded_and_can_be(name: str) -> None:
    assert name in dir(steelyard)
    assert getattr(steelyard, name) is not None


def test_nothing_else_is_listed() -> None:
    assert {name for name in dir(steelyard) if not name.startswith("__")} == set(steelyard.__all__)


def test_help_shows_the_functions() -> None:
    text = pydoc.render_doc(steelyard, renderer=pydoc.plaintext)
    assert "find_plan(" in text
    assert "Return the simplest plan to train a model on a cluster" in text


def test_the_command_says_its_version_and_ends() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"steelyard {version('steelyard')}\n"
