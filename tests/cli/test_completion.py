"""Tests of shell completion: commands, models, devices, export targets and files with a schema."""

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.cli.options import complete_cluster, complete_model


def test_models_are_completed_by_their_beginning() -> None:
    assert complete_model("llama3-8") == ["llama3-8b"]
    assert complete_model("no-such") == []


def test_devices_are_completed_at_the_end_of_a_cluster() -> None:
    assert complete_cluster("1x8xa100-80") == ["1x8xa100-80gb"]
    assert "2x4xh100-80gb" in complete_cluster("2x4x")


@pytest.mark.parametrize("text", ["", "1x", "1x8", "axbxh100", "lab.yaml"])
def test_another_form_of_cluster_is_left_to_the_shell(text: str) -> None:
    assert complete_cluster(text) == []


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("steelyard plan llama3-8", ["llama3-8b"]),
        ("steelyard export plan.json --to torcht", ["torchtitan"]),
        ("steelyard export plan.json --to li", ["list"]),
        ("steelyard schema pro", ["problem", "profile"]),
    ],
)
def test_the_shell_asks_and_is_answered(typed: str, answer: list[str]) -> None:
    place = str(len(typed.split()) - 1)
    asked = {"_STEELYARD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": place}
    result = CliRunner().invoke(app, [], env=asked, prog_name="steelyard")
    assert result.output.split() == answer
