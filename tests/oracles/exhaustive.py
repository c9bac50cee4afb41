"""Slow and obvious answers: exhaustive search straight from the definition in `CostTables`."""

import itertools
from collections.abc import Iterator

import numpy as np

from steelyard.cost.tables import CostTables


def all_boundaries(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut the layers into stages of one layer or more."""
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *cuts, num_layers)


def all_choices(tables: CostTables) -> np.ndarray:
    """Every choice of one legal strategy per layer, as rows (choice, layer)."""
    legal = [np.flatnonzero(tables.legal[layer_type]) for layer_type in tables.layers]
    return np.stack(np.meshgrid(*legal, indexing="ij"), axis=-1).reshape(-1, len(legal))


def stage_seconds_and_bytes(
    tables: CostTables, stage: int, layers: range, choices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Time of one microbatch and peak bytes of a stage for every choice, by the formulas of the docstring."""
    pools = tables.pools
    received_s = tables.transfer_s if pools is None else pools.transfer_s[stage]
    seconds = np.full(len(choices), received_s if stage > 0 else 0.0)
    in_flight, layout = tables.pipeline.in_flight(stage), tables.layout_of
    total = np.full(len(choices), tables.overhead_of(stage))
    if stage > 0 and tables.received is not None:
        before, first = choices[:, layers.start - 1], choices[:, layers.start]
        total += tables.received.num_bytes(stage, in_flight)[layout[before], layout[first]]
    held, freed, works, buffers = [], [], [], []
    for layer in layers:
        layer_type, strategy = tables.layers[layer], choices[:, layer]
        seconds += tables.time_s[layer_type, strategy]
        if layer > 0:
            seconds += tables.switch_s[layer_type, layout[choices[:, layer - 1]], layout[strategy]]
        for side in tables.cross_layer_inputs:
            if layer in side.readers:
                seconds += side.seconds[choices[:, side.source], strategy]
        layer_type = tables.last_types[layer_type] if tables.last_types and layer == layers[-1] else layer_type
        held.append(
            tables.static_of(in_flight)[layer_type, strategy]
            + in_flight * tables.activation_bytes[layer_type, strategy]
        )
        freed.append(tables.freed_of(in_flight)[layer_type, strategy])
        works.append(tables.transient_bytes[layer_type, strategy])
        buffers.append(tables.buffers_of[:, layer_type, strategy])
    return seconds, total + sum(held) + most_at_once(tables.repeats, freed, works, buffers)


def most_at_once(
    repeats: bool,
    freed: list[np.ndarray],
    works: list[np.ndarray],
    buffers: list[np.ndarray],
) -> np.ndarray:
    """The most of all layers of a stage: each with its work and buffers when all behind it have freed what they do."""
    last = len(works) - 1
    nothing = np.zeros_like(works[0])
    found = []
    for place, own in enumerate(works):
        most = own + (buffers[place - 1][0] if place else 0)
        for behind in range(place + 1, last + 1):
            most = most - freed[behind]
        most = most + np.maximum.reduce([nothing, *(sizes[1] for sizes in buffers[:-1])])
        if place < last:
            most = most + np.maximum.reduce([sizes[2] for sizes in buffers])
        elif repeats:
            left = np.maximum.reduce([nothing, *(sizes[2] for sizes in buffers[:-1])])
            most = most + np.where(left > 0, left, buffers[last][2])
        found.append(most)
    return np.maximum.reduce(found)


def all_plans(tables: CostTables) -> Iterator[tuple[float, int]]:
    """Step time and peak bytes of every plan."""
    for boundaries in all_boundaries(len(tables.layers), tables.pipeline.num_stages):
        if all(b - a >= tables.least_layers(stage) for stage, (a, b) in enumerate(itertools.pairwise(boundaries))):
            yield from plans_with(tables, boundaries)


def plans_with(tables: CostTables, boundaries: tuple[int, ...]) -> Iterator[tuple[float, int]]:
    """Step time and peak bytes of every plan with these cuts."""
    choices = all_choices(tables)
    if tables.pools is not None:
        stage_of = np.searchsorted(boundaries[1:], np.arange(len(tables.layers)), side="right")
        wanted = np.array(tables.pools.of_stages)[stage_of]
        choices = choices[(tables.pools.of_strategies[choices] == wanted).all(axis=1)]
        if len(choices) == 0:
            return
    stages = [
        stage_seconds_and_bytes(tables, stage, range(a, b), choices)
        for stage, (a, b) in enumerate(itertools.pairwise(boundaries))
    ]
    times, sizes = (np.stack(values) for values in zip(*stages, strict=True))
    steps = times.sum(axis=0) + (tables.pipeline.num_passes - 1) * times.max(axis=0)
    yield from zip(steps.tolist(), sizes.max(axis=0).tolist(), strict=True)


def fastest(plans: list[tuple[float, int]], budget_bytes: int) -> float | None:
    """The least step time among the plans that fit; None if none does."""
    return min((seconds for seconds, num_bytes in plans if num_bytes <= budget_bytes), default=None)


def least_budget(plans: list[tuple[float, int]]) -> int | None:
    """The smallest budget for which some plan fits; None if there is no plan at all."""
    return min((num_bytes for _, num_bytes in plans), default=None)


def frontier(plans: list[tuple[float, int]]) -> list[tuple[int, float]]:
    """The (peak bytes, step time) pairs that no other plan beats, bytes rising."""
    kept: list[tuple[int, float]] = []
    for num_bytes, seconds in sorted((num_bytes, seconds) for seconds, num_bytes in plans):
        if not kept or seconds < kept[-1][1]:
            kept.append((num_bytes, seconds))
    return kept
