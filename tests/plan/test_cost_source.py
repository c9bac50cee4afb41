"""Tests that the source of costs is a value."""

import pytest

from steelyard.errors import InvalidPlanError
from steelyard.plan.prediction import CatalogueRates, CostSource
from tests.plan.examples import COST_SOURCE, changed, read

TRACED = {**COST_SOURCE, "method": "traced", "device": "any", "torch": "2", "transformers": "5"}


@pytest.mark.parametrize(
    ("key", "value"), [("method", "guessed"), ("num_devices", "many"), ("time_factor", 0.0), ("time_factor", "0")]
)
def test_a_mistake_is_named(key: str, value: object) -> None:
    with pytest.raises(InvalidPlanError, match=r"prediction\.profile"):
        read(changed((["prediction", "profile"], {**COST_SOURCE, key: value})))


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidPlanError, match="did you mean num_devices"):
        read(changed((["prediction", "profile"], {**COST_SOURCE, "num_device": 4})))


def test_measured_costs_name_device_and_day() -> None:
    assert str(CostSource.model_validate(COST_SOURCE)) == "measured on cpu (2026-01-01)"


def test_traced_costs_name_what_counted_them_and_the_rates() -> None:
    rates = CatalogueRates(generation="hopper", is_assumed=False)
    found = str(CostSource.model_validate({**TRACED, "rates": rates, "time_factor": 1.5}))
    assert found == (
        "traced with torch 2, transformers 5; catalogue rates, fitted to published runs of hopper; "
        "all times × 1.500, calibrated by a measured run"
    )


def test_a_plan_that_never_said_which_rates_says_nothing_of_them() -> None:
    assert str(CostSource.model_validate(TRACED)).endswith("; catalogue rates")
