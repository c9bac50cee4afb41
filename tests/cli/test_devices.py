"""Tests of ``steelyard devices``: the known values of each device, and whether its rates are fitted or assumed."""

import json

from tests.cli.conftest import Run


def test_every_device_says_its_type_its_backend_and_whether_its_rates_are_assumed(run: Run) -> None:
    known = {each["name"]: each for each in json.loads(run("devices", "--json").output)}
    assert (known["cpu"]["kind"], known["cpu"]["backend"], known["cpu"]["rates"]) == ("cpu", "gloo", None)
    assert (known["mi250x"]["kind"], known["mi250x"]["backend"]) == ("gpu", "nccl")
    assert known["mi250x"]["rates"]["is_assumed"]
    assert not known["h100-80gb"]["rates"]["is_assumed"]


def test_the_table_says_which_rates_are_fitted_and_which_assumed(run: Run) -> None:
    lines = run("devices").output.splitlines()
    fitted, assumed = (
        next(line for line in lines if line.startswith(f"│ {name} ")) for name in ("h100-80gb", "mi250x")
    )
    assert "fitted" in fitted
    assert "assumed" in assumed
