"""The published planner's cuts of a pipeline of unlike stages, rebuilt, and the plans that it finds with them.

Every layer is taken at the bytes of its smallest strategy, and the stages are filled from the last one, each up to
within half a layer of the average. On 16 GPUs layers are then passed on from stages that hold more than 1.3 times
(Swin: 1.5) the average, and a stage left empty is given one. The rule looks at neither time nor budget, and its cuts
change with the space: a larger space can give a slower plan.

Source: PKU-DAIR/Hetu at df32daa. With these cuts all published predictions of T5 come out, and the two of T5-32 on 16
GPUs that the README of `../data/galvatron_2022` names.
"""

import itertools
from collections.abc import Sequence

from galvatron.cells import Cell, fastest_s, least_layer_mb, points_of
from galvatron.cuts import Plan, StageTimes
from galvatron.rules import Point, other_mb
from galvatron.tables import Space

MOST_OVER_AVERAGE = {"t5": 1.3, "swin": 1.5}


def greedy_best(cell: Cell) -> Plan | None:
    """What the published planner finds for a model of unlike layers; None if nothing fits."""
    points = list(points_of(cell))
    bounds = [fastest_s(point, cell.space) / point.batch for point in points]
    best: Plan | None = None
    for bound, index in sorted(zip(bounds, range(len(points)), strict=True)):
        if best is not None and bound * best.throughput >= 1:
            break
        cuts = greedy_cuts(points[index], cell.space)
        if any(first >= end for first, end in itertools.pairwise(cuts)):
            continue
        plan = StageTimes(points[index], cell.space, cell.budget_mb).plan_with(cuts)
        if plan is not None and (best is None or plan.throughput > best.throughput):
            best = plan
    return best


def greedy_cuts(point: Point, space: Space) -> tuple[int, ...]:
    """First layers of the stages and, last, the number of layers; a stage may be left without any."""
    sizes = least_layer_mb(point, space)
    held = _held_mb(point)
    average = (sum(sizes) + sum(held)) / point.num_stages
    counts = _fill_from_the_last(sizes, held, average)
    if point.inputs.num_gpus == 8:
        if counts[0] == 0:
            _pass(counts, 1, 0)
    else:
        _relieve(counts, sizes, held, average * MOST_OVER_AVERAGE[point.inputs.model])
        _give_to_empty(counts, is_last_too=point.inputs.model == "t5")
    return (0, *itertools.accumulate(counts))


def _held_mb(point: Point) -> tuple[float, ...]:
    """What the stages hold besides layers; on 8 GPUs the planner took it at the batch share of a single stage."""
    if point.inputs.num_gpus == 16:
        return other_mb(point)
    whole = Point(inputs=point.inputs, batch=point.batch, num_stages=1)
    return (*other_mb(whole), *(0.0,) * (point.num_stages - 1))


def _fill_from_the_last(sizes: Sequence[float], held: Sequence[float], average: float) -> list[int]:
    counts, rest = [0] * len(held), len(sizes)
    for stage in range(len(held) - 1, 0, -1):
        filled = held[stage]
        while rest and average - filled >= sizes[rest - 1] / 2:
            rest -= 1
            filled += sizes[rest]
            counts[stage] += 1
    counts[0] = rest
    return counts


def _relieve(counts: list[int], sizes: Sequence[float], held: Sequence[float], most_mb: float) -> None:
    for stage in range(len(counts) - 1):
        first = sum(counts[:stage])
        while held[stage] + sum(sizes[first : first + counts[stage]]) > most_mb:
            _pass(counts, stage, stage + 1)


def _give_to_empty(counts: list[int], *, is_last_too: bool) -> None:
    for stage in range(len(counts) - 1):
        while counts[stage] <= 0:
            _pass(counts, stage + 1, stage)
    for stage in range(len(counts) - 1, 0, -1) if is_last_too else ():
        while counts[stage] <= 0:
            _pass(counts, stage - 1, stage)


def _pass(counts: list[int], giver: int, taker: int) -> None:
    counts[giver] -= 1
    counts[taker] += 1
