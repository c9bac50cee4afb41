"""Cost tables of some strategies and layer types alone."""

import numpy as np
import pytest

from steelyard.cost.tables import CostTables, CrossLayerInput
from steelyard.errors import InvalidProblemError
from tests.problems.random_tables import random_tables

TABLES = random_tables(np.random.default_rng(0), num_layers=4, num_types=3, num_strategies=4, num_stages=1)
BY_PAIR = ("legal", "time_s", "static_bytes", "activation_bytes", "transient_bytes")


def test_strategies_are_taken_in_the_order_asked_for() -> None:
    found = TABLES.select(strategies=[2, 0])
    assert found.strategies == (TABLES.strategies[2], TABLES.strategies[0])
    for name in BY_PAIR:
        assert np.array_equal(getattr(found, name), getattr(TABLES, name)[:, [2, 0]])
    assert np.array_equal(found.switches, TABLES.switches[:, [2, 0]][:, :, [2, 0]])


def test_a_layer_type_may_be_taken_twice() -> None:
    found = TABLES.select(layer_types=[1, 1, 0], layers=[2, 0, 1, 2])
    assert found.layer_types == (TABLES.layer_types[1], TABLES.layer_types[1], TABLES.layer_types[0])
    assert found.layers == (2, 0, 1, 2)
    for name in (*BY_PAIR, "switch_s"):
        assert np.array_equal(getattr(found, name), getattr(TABLES, name)[[1, 1, 0]])


def test_cross_layer_inputs_keep_the_strategies_that_are_taken() -> None:
    seconds = np.arange(16.0).reshape(4, 4)
    side = CrossLayerInput(source=0, readers=(2,), seconds=seconds)
    tables = CostTables(**{name: getattr(TABLES, name) for name in TABLES.__slots__} | {"cross_layer_inputs": (side,)})
    assert np.array_equal(tables.select(strategies=[3, 1]).cross_layer_inputs[0].seconds, seconds[[3, 1]][:, [3, 1]])


def test_nothing_named_is_everything() -> None:
    found = TABLES.select()
    assert (found.layer_types, found.layers, found.strategies) == (TABLES.layer_types, TABLES.layers, TABLES.strategies)
    assert np.array_equal(found.time_s, TABLES.time_s)


def test_layers_of_a_type_that_is_left_out_are_an_error() -> None:
    with pytest.raises(InvalidProblemError, match="layers"):
        TABLES.select(layer_types=[0], layers=[0, 1, 0, 0])
