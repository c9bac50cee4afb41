"""Tests of predicted against measured: one row per quantity, with the values that are known."""

import pytest

from steelyard.report.run_table import beside


@pytest.mark.parametrize(
    ("predicted", "measured", "row"),
    [
        (3.0, 2.0, ("work", "3 s", "2 s", "1.50")),
        (None, 2.0, ("work", "–", "2 s", "–")),
        (3.0, None, ("work", "3 s", "–", "–")),
        (3.0, 0.0, ("work", "3 s", "0 s", "–")),
    ],
)
def test_a_ratio_is_shown_where_both_are_known_and_there_is_something_to_divide_by(
    predicted: float | None, measured: float | None, row: tuple[str, ...]
) -> None:
    assert beside("work", predicted, measured, "{:.0f} s".format) == row
