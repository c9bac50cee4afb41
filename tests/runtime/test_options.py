"""Tests of run options: limits, and their path through the command line."""

from pathlib import Path

import pytest

from steelyard.errors import UserError
from steelyard.runtime.options import TrainOptions
from tests.runtime.arguments import options_from


def test_options_survive_the_command_line() -> None:
    options = TrainOptions(steps=7, lr=1e-5, seed=3, record=Path("r.json"))
    assert options_from(options.arguments()) == options


def test_options_of_checkpoints_and_memory_survive_the_command_line() -> None:
    options = TrainOptions(
        checkpoint_dir=Path("c"), resume="auto", init=Path("w"), export_hf=Path("e"), keep_last=5, enforce_memory=True
    )
    assert options_from(options.arguments()) == options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", 0), ("lr", -1.0), ("lr", float("nan")), ("warmup_steps", -1), ("max_data_bytes", 0)),
        *(("lr", float("inf")), ("lr", 2e6), ("weight_decay", float("inf")), ("seed", 10**20), ("steps", 10**10)),
    ],
)
def test_an_option_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match="--" + name.replace("_", "-")):
        TrainOptions(**{name: value})
