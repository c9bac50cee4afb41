"""Which rates are fitted and which are assumed, and that both are said."""

from dataclasses import replace

import pytest

from steelyard.cost.efficiency import STAND_IN, catalogue_rates, efficiency_of
from steelyard.hardware import devices
from tests.cost.examples import job


@pytest.mark.parametrize("device", [each for each in devices() if not each.needs_profile], ids=lambda each: each.name)
def test_every_device_of_the_catalogue_with_rates_has_a_generation(device) -> None:
    assert not catalogue_rates(device.name).is_stand_in


@pytest.mark.parametrize(
    ("device", "generation", "is_assumed"),
    [
        ("a100-80gb", "ampere", False),
        ("h100-80gb", "hopper", False),
        ("H100-80GB", "hopper", False),
        ("v100-16gb", "volta", True),
        ("b200-180gb", "blackwell", True),
        ("mi300x", "amd", True),
        ("rtx-4090", "ada", True),
    ],
)
def test_a_generation_is_fitted_or_assumed(device: str, generation: str, is_assumed: bool) -> None:
    found = catalogue_rates(device)
    assert (found.generation, found.is_assumed, found.is_stand_in) == (generation, is_assumed, False)
    assert str(found).startswith("assumed" if is_assumed else "fitted")
    assert found.brief == f"{'assumed' if is_assumed else 'fitted'} ({generation})"


@pytest.mark.parametrize("device", ["round", "a1000", "l40", "h1", ""])
def test_the_rates_of_an_unknown_device_are_assumed_and_the_entry_is_named(device: str) -> None:
    found = catalogue_rates(device)
    assert (found.generation, found.is_assumed, found.is_stand_in) == (STAND_IN, True, True)
    assert "no known generation" in str(found)
    assert repr(STAND_IN) in str(found)
    assert efficiency_of(device, "") == efficiency_of("unheard-of", "")


def test_a_traced_job_says_which_rates_its_times_rest_on() -> None:
    assert job().cost_source().rates == catalogue_rates("round")
    assert "assumed" in str(job().cost_source())


def test_a_job_with_rates_of_its_own_names_no_entry() -> None:
    assert replace(job(), rates=efficiency_of("h100-80gb", "")).cost_source().rates is None
