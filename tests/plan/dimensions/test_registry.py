"""Tests that every dimension answers all questions, round-trips as text, and has an implementation for layers."""

import importlib
import math
import pkgutil
from collections.abc import Iterator
from functools import cache

import pytest

from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.modules.dimensions import TWINS
from steelyard.plan.dimensions import DIMENSIONS, Dimension, dimension_named
from steelyard.plan.dimensions.dimension import Batch, Load, Placed, Value
from steelyard.plan.strategy import Remat, Strategy, parse_strategy
from steelyard.report.html.palette import HUES
from tests.cost.examples import chain
from tests.runtime.models import FAMILY_CONFIGS

EXAMPLES = {
    "dp": ("dp4", "dp2-fsdp2", "dp2-tp2"),
    "fsdp": ("fsdp4", "fsdp4 zero2", "fsdp2-tp2", "dp2-fsdp2 zero1"),
    "tp": ("tp4", "tp4+sp", "tp2-dp2"),
    "cp": ("cp4", "fsdp2-cp2", "cp2-tp2+ulysses"),
    "ep": ("dp4 ep4", "fsdp4 ep2", "dp2-cp2-tp2 ep2"),
}
"""Strategies that use each dimension; a dimension without any fails `test_every_dimension_has_examples`."""
BATCH = Batch(microbatch_samples=8, seq_len=64)


@cache
def sparse() -> ModelChain:
    return chain_from_config(FAMILY_CONFIGS["mixtral"], name="sparse")


@cache
def odd() -> ModelChain:
    return chain(hidden_size=72, num_attention_heads=9, num_key_value_heads=9, head_dim=8)


dimensions = pytest.mark.parametrize("dimension", DIMENSIONS.values(), ids=str)
uses = pytest.mark.parametrize(
    ("dimension", "text"), [(dimension_named(name), text) for name in EXAMPLES for text in EXAMPLES[name]]
)


def load(strategy: Strategy) -> Load:
    exchanging = ("forward", "backward", *(("recomputation",) if strategy.remat is Remat.FULL else ()))
    return Load(
        strategy=strategy,
        parameter_bytes=2e6,
        gradient_bytes=4e6,
        traced={"forward": (("all_reduce", 2, 1e6),), "backward": (("all_gather", 2, 1e6),)},
        exchanging=exchanging,
        key_value_bytes=3e5,
        attention_bytes=5e5,
        exchanged=dict.fromkeys(exchanging, (("all_to_all", 2, 700000.0),)),
    )


def values(dimension: Dimension, strategy: Strategy) -> Iterator[tuple[str, Value]]:
    """The modes of a dimension with every value that the levels of a strategy leave to choose from."""
    for mode in dimension.modes:
        for value in mode.choices(strategy.levels):
            yield mode.key, value


def test_every_dimension_has_a_twin_and_every_twin_a_dimension() -> None:
    assert set(TWINS) == set(DIMENSIONS)


LEAVE_MODULES = {"dp", "fsdp"}
"""Dimensions that divide only the input of a layer, so that their implementation does nothing."""


@pytest.mark.parametrize(
    ("package", "found"),
    [("plan", {*DIMENSIONS, "dimension"}), ("modules", set(DIMENSIONS) - LEAVE_MODULES)],
)
def test_every_dimension_has_a_file_of_its_name_in_both_packages(package: str, found: set[str]) -> None:
    home = importlib.import_module(f"steelyard.{package}.dimensions")
    assert {module.name for module in pkgutil.iter_modules(home.__path__)} == found


@dimensions
def test_a_dimension_and_its_twin_stand_in_the_files_of_its_name(dimension: Dimension) -> None:
    assert (
        getattr(importlib.import_module(f"steelyard.plan.dimensions.{dimension}"), dimension.name.upper()) is dimension
    )
    if dimension.name not in LEAVE_MODULES:
        home = importlib.import_module(f"steelyard.modules.dimensions.{dimension}")
        (applied,) = (name for name in TWINS[dimension.name].__code__.co_names if name.startswith("apply_"))
        assert getattr(home, applied).__module__ == home.__name__


def test_every_dimension_has_examples() -> None:
    assert set(EXAMPLES) == set(DIMENSIONS)


@dimensions
def test_a_dimension_is_found_by_its_name(dimension: Dimension) -> None:
    assert dimension_named(str(dimension)) is dimension


@uses
def test_a_strategy_reads_back_from_its_text(dimension: Dimension, text: str) -> None:
    strategy = parse_strategy(text)
    assert dimension in strategy.dimensions
    assert str(strategy) == text


@uses
def test_every_value_of_a_mode_reads_back_from_its_text(dimension: Dimension, text: str) -> None:
    levels = parse_strategy(text).levels
    for key, value in values(dimension, parse_strategy(text)):
        strategy = Strategy.of(levels, **{key: value})
        assert strategy.mode(key) == value
        assert parse_strategy(str(strategy)) == strategy


@dimensions
def test_every_text_of_a_mode_is_written_in_a_pin_too(dimension: Dimension) -> None:
    for mode in dimension.modes:
        assert set(mode.pin.values()) == set(mode.texts)
        assert all(mode.written(dimension, value) for value in mode.texts)


@uses
def test_a_dimension_says_what_its_ranks_do(dimension: Dimension, text: str) -> None:
    assert "ranks" in dimension.words(parse_strategy(text))


@uses
def test_a_dimension_takes_a_layer_that_it_divides(dimension: Dimension, text: str) -> None:
    assert dimension.illegal(sparse().layer_types[1], parse_strategy(text), BATCH) is None


@uses
def test_a_dimension_says_why_it_cannot_divide_a_layer(dimension: Dimension, text: str) -> None:
    assert dimension.illegal(odd().layer_types[1], parse_strategy(text), Batch(microbatch_samples=7, seq_len=63))


@uses
@pytest.mark.parametrize("remat", Remat)
def test_what_a_dimension_sends_has_a_size_and_a_number_of_calls(dimension: Dimension, text: str, remat: Remat) -> None:
    found = list(dimension.traffic(load(parse_strategy(f"{text} remat={remat}"))))
    assert all(math.isfinite(each.tensor_bytes) and each.tensor_bytes > 0 and each.num_calls >= 1 for each in found)


@uses
def test_a_dimension_that_divides_or_shards_sends_something(dimension: Dimension, text: str) -> None:
    assert list(dimension.traffic(load(parse_strategy(text))))


@uses
def test_a_dimension_says_where_the_hidden_state_lies(dimension: Dimension, text: str) -> None:
    assert dimension.placement(parse_strategy(text)) in Placed


@uses
def test_degrees_that_change_a_shape_are_those_of_the_strategy(dimension: Dimension, text: str) -> None:
    strategy = parse_strategy(text)
    assert set(dimension.shape(strategy).values()) <= {level.degree for level in strategy.levels}


@dimensions
def test_every_dimension_serves_a_model_with_experts(dimension: Dimension) -> None:
    assert dimension.serves(sparse()) == ""


@uses
def test_every_example_is_worth_a_search(dimension: Dimension, text: str) -> None:
    assert dimension.not_worth(parse_strategy(text).levels, None) == ""


@dimensions
def test_the_seconds_of_a_dimension_have_words_and_a_colour(dimension: Dimension) -> None:
    assert dimension.term
    assert dimension.hue in HUES


def test_no_two_dimensions_share_words_or_colours() -> None:
    assert (
        len({dimension.term for dimension in DIMENSIONS.values()})
        == len({dimension.hue for dimension in DIMENSIONS.values()})
        == len(DIMENSIONS)
    )
