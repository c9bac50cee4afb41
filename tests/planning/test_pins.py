"""Tests of pins: their text, their effect on the cost tables, and their cost."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.pins import Pin, parse_pin, pinned
from steelyard.planning.problem import no_pipeline, pipeline_configs
from steelyard.schedules import SCHEDULES
from steelyard.search import search
from tests.cost.examples import job
from tests.oracles import exhaustive
from tests.problems.random_tables import random_tables
from tests.schedules.examples import pipeline


def pin(text: str) -> Pin:
    return parse_pin(text, option="--pin", num_layers=10)


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        ("tp=4", "fsdp2-tp4+sp remat=full", "fsdp4-tp2"),
        ("remat=full", "dp8 remat=full", "dp8"),
        ("fsdp8", "fsdp8 zero2 remat=full", "dp8"),
        ("fsdp4-tp2+sp", "fsdp4-tp2+sp", "fsdp4-tp2"),
        ("tp=2, remat=none", "dp4-tp2", "dp4-tp2 remat=full"),
        ("zero=2", "fsdp8 zero2", "fsdp8"),
        ("zero=3", "fsdp8", "dp8"),
        ("cp_method=gather", "dp4-cp2", "dp8"),
        ("ep=1", "dp8", "fsdp8 ep4"),
        ("sp=off", "dp8", "tp8+sp"),
        ("sp=off", "tp8", "tp8+sp"),
        ("single", "single", "dp2"),
        ("fsdp", "fsdp2-tp4 zero2 remat=full", "dp2-tp4"),
        ("ep, remat=none", "fsdp8 ep4", "fsdp8"),
    ],
)
def test_a_pin_allows_what_it_says(text: str, allowed: str, refused: str) -> None:
    assert pin(text).allows(parse_strategy(allowed))
    assert not pin(text).allows(parse_strategy(refused))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("layers 0-3: tp=4", [0, 1, 2, 3]),
        ("layer 5: tp=4", [5]),
        ("blocks 0-1: tp=4", [1, 2]),
        ("embedding: tp=4", [0]),
        ("head: tp=4", [9]),
        ("blocks: tp=4", list(range(1, 9))),
        ("tp=4", list(range(10))),
        ("tp", list(range(1, 9))),
        ("layers 0-9: tp", list(range(10))),
    ],
)
def test_a_pin_covers_the_layers_that_it_names(text: str, layers: list[int]) -> None:
    assert [layer for layer in range(10) if pin(text).covers(layer)] == layers


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("layers 0-10: tp=4", "layers 0-9"),
        ("layers 3-1: tp=4", "layers 0-9"),
        ("some: tp=4", "embedding or head"),
        ("tq=4", "did you mean"),
        ("tp=many", "whole number"),
        ("remat=some", "none|selective|full"),
        ("tq8", "fsdp4-tp2"),
        ("tp2+pp", "tp2+sp"),
        ("", "requirements"),
        ("tp=0", "--pin tp=2"),
        ("schedule=zbv", "did you mean zb-v"),
    ],
)
def test_a_mistake_in_a_pin_says_what_was_expected(text: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        pin(text)
    assert caught.value.field == "--pin"
    assert hint in str(caught.value)


def test_configs_of_the_pipeline_are_pinned() -> None:
    assert pin("stages=4").takes(pipeline(4, 8))
    assert not pin("stages=4").takes(pipeline(2, 8))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pinned_schedule_is_tried_as_if_it_alone_were_allowed(name: str) -> None:
    decisions = (Decisions(pins=(f"schedule={name}, stages=2",)), Decisions(schedules=(name,), num_stages=2))
    found, allowed = ([each.pipeline for each in pipeline_configs(job(), asked)] for asked in decisions)
    assert found == allowed
    assert {each.schedule.name for each in found} == {name}


def test_a_pinned_schedule_that_is_not_allowed_has_no_configuration() -> None:
    decisions = Decisions(pins=("schedule=zb-v",), schedules=("gpipe",))
    assert not pipeline_configs(job(), decisions)
    assert "--schedule gpipe" in str(no_pipeline(job(), decisions))


@pytest.mark.slow
def test_a_pinned_search_finds_the_best_of_all_plans_that_obey_the_pin() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, num_stages=int(rng.integers(1, 3)), num_strategies=3, max_plans=200)
        last = int(rng.integers(0, len(tables.layers)))
        first = int(rng.integers(0, last + 1))
        wanted = str(tables.strategies[int(rng.integers(0, 3))])
        text = f"layers {first}-{last}: {wanted}"
        own = parse_pin(text, option="--pin", num_layers=len(tables.layers))
        found = search([pinned(tables, [own], 64)], 60, num_alternatives=0).best
        expected = min(
            (
                seconds
                for boundaries in exhaustive.all_boundaries(len(tables.layers), tables.pipeline.num_stages)
                for strategies in itertools.product(range(3), repeat=len(tables.layers))
                if all(tables.legal[layer_type, s] for layer_type, s in zip(tables.layers, strategies, strict=True))
                and all(str(tables.strategies[strategies[layer]]) == wanted for layer in range(first, last + 1))
                for seconds, size in [_cost(tables, boundaries, strategies)]
                if size <= 60
            ),
            default=None,
        )
        assert (found is None) == (expected is None), seed
        if found is not None:
            assert found.score_s == pytest.approx(expected, rel=1e-12, abs=1e-12), seed


def _cost(tables, boundaries, strategies):  # type: ignore[no-untyped-def]
    stages = [
        exhaustive.stage_seconds_and_bytes(tables, stage, range(a, b), np.array([strategies]))
        for stage, (a, b) in enumerate(itertools.pairwise(boundaries))
    ]
    times = [seconds.item() for seconds, _ in stages]
    return sum(times) + (tables.pipeline.num_microbatches - 1) * max(times), max(size.item() for _, size in stages)


def test_no_pins_leave_the_tables_as_they_are() -> None:
    tables = random_tables(np.random.default_rng(0))
    assert pinned(tables, [], 64) is tables
    assert replace(tables).layers == tables.layers
