"""Tests of measured collectives against the cost model, and of the fit that both calibrations share."""

import numpy as np
from collectives import errors, measurements
from least_squares import least

from steelyard.cost.efficiency import efficiency_of
from steelyard.hardware.files import find_link


def test_a_third_of_the_measurements_is_withheld() -> None:
    held = [row.is_withheld for row in measurements()]
    assert 0.28 < sum(held) / len(held) < 0.38


def test_what_was_withheld_is_predicted_within_a_tenth_in_the_median() -> None:
    rows = [row for row in measurements() if row.link == "nvlink-4" and row.is_withheld]
    median = float(errors(rows, find_link("nvlink-4"), efficiency_of("h100-80gb", "").links).split("%")[0])
    assert median < 10


def test_outliers_do_not_move_a_robust_fit() -> None:
    places = np.arange(20.0)
    values = 3 + 2 * places
    values[7] = 500
    found = least(lambda x: x[0] + x[1] * places - values, np.zeros(2), np.full(2, -9.0), np.full(2, 9.0))
    assert np.allclose(found, [3, 2], atol=1e-3)


def test_a_fit_stays_within_its_bounds() -> None:
    places = np.arange(20.0)
    found = least(lambda x: x[0] * places - 2 * places, np.zeros(1), np.zeros(1), np.full(1, 1.5), scale=5.0)
    assert np.allclose(found, [1.5])
