"""Tests of cost tables for only some layer types."""

import numpy as np
import pytest

from steelyard.errors import InvalidProblemError
from tests.problems.random_tables import random_tables

TABLES = random_tables(np.random.default_rng(0), num_layers=4, num_types=3, num_strategies=4, num_stages=1)
BY_PAIR = ("legal", "time_s", "static_bytes", "activation_bytes", "transient_bytes")


def test_a_layer_type_may_be_taken_twice() -> None:
    found = TABLES.select([1, 1, 0], layers=[2, 0, 1, 2])
    assert found.layer_types == (TABLES.layer_types[1], TABLES.layer_types[1], TABLES.layer_types[0])
    assert found.layers == (2, 0, 1, 2)
    for name in (*BY_PAIR, "switch_s"):
        assert np.array_equal(getattr(found, name), getattr(TABLES, name)[[1, 1, 0]])


def test_layers_of_a_type_that_is_left_out_are_an_error() -> None:
    with pytest.raises(InvalidProblemError, match="layers"):
        TABLES.select([0], layers=[0, 1, 0, 0])
