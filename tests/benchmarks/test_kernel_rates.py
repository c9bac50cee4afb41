"""Tests of the cost model's formulas against measured kernels."""

import numpy as np
import pytest
from kernel_rates import FORMS, Rows, fit_shape, fitted, read_rows

from steelyard.cost.efficiency import efficiency_of


def median_error(rows: Rows, name: str, form_name: str) -> float:
    form, start = FORMS[name](rows)[form_name]
    return float(np.median(rows.errors(fitted(rows, form, start))))


@pytest.mark.parametrize(
    ("generation", "device"),
    [("ampere", "a100-80gb"), ("hopper", "h100-80gb"), ("ada", "l40s"), ("blackwell", "b200-180gb")],
)
def test_the_shape_of_attention_is_the_one_that_fits_the_rows_that_are_not_withheld(
    generation: str, device: str
) -> None:
    shape = efficiency_of(device, "").attention_shape
    assert fit_shape(generation) == pytest.approx((shape.head_dim, shape.keys, shape.blocks), rel=0.02, abs=1)


def test_on_withheld_shapes_attention_as_priced_is_nearer_than_one_fraction_wherever_head_dims_vary() -> None:
    for rows in read_rows("attention"):
        if rows.source == "aic" and rows.device not in ("l40s", "rtx-pro-6000-server"):
            assert median_error(rows, "attention", "as priced") < median_error(rows, "attention", "one fraction")


def test_on_withheld_shapes_of_short_runs_matmuls_as_priced_are_nearer_than_rounded_to_whole_tiles() -> None:
    for rows in read_rows("matmuls"):
        if rows.source == "aic" and "whole tiles" in FORMS["matmuls"](rows):
            assert median_error(rows, "matmuls", "as priced") < median_error(rows, "matmuls", "whole tiles")


def test_a_third_of_the_shapes_is_withheld_of_every_table() -> None:
    for name in FORMS:
        withheld = np.concatenate([rows.withheld for rows in read_rows(name)])
        assert 0.28 < withheld.mean() < 0.38
