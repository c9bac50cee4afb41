r"""Bounds from below of what a plan takes, as tables that add up: what every walk through its stages passes.

The walk (`steelyard.cost.stage_memory`) is a maximum over moments, so what a stage holds at any one of them is a bound
from below. Two moments are told apart. As the last layer of a stage begins a backward pass with most microbatches in
flight, nothing of them has been freed:

$$M \ge \sum_j \big(p_j + o_j + k_j + [m > n]\,g_j + n\,b_j\big) + u_\text{last} + \text{buffers}$$

Where no gradients are kept by then ($m \le n$) they are at the next backward pass, with one microbatch less in flight,
and at the end of the step. A floor holds what depends on one layer and its strategy, with two places of the model that
are known: the embedding is the first layer of the first stage, and a layer that is the last of a stage has a row of
its own (`CostTables.last_kinds`) with its working set and what it sends. So no plan that a floor refuses is accepted by
the walk, and the fastest plan within a floor is a bound of all that are.

| symbol  | bytes                    | meaning                                                     |
|---------|--------------------------|-------------------------------------------------------------|
| $p, o, g, b, k, u$ | see `stage_memory` | of a layer                                            |
| $n$     | `CostTables.in_flight`   | most microbatches in flight on the stage                    |

Left out, so that the walk may be above the floor: what the last layer of a stage finds gathered ahead and still being
reduced of layers whose place is not known, what a stage receives beyond its share, and all later layers of the pass but
the one before the head of a single stage.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.layer_memory import layer_memory
from steelyard.cost.layer_parts import (
    KnownRows,
    LayerParts,
    fullest_moments,
    least_hidden_bytes,
    saved_in_chunks,
    shared_overhead,
    stage_exchange,
    static_in_chunks,
)
from steelyard.cost.setting import Job, Setting
from steelyard.cost.tables import CostTables
from steelyard.cost.working import WorkingBytes, working_bytes
from steelyard.plan.strategy import Strategy
from steelyard.schedules import PipelineConfig

IntTable = NDArray[np.int64]

_LEAST_LAYERS = 4
"""With fewer the layers behind the embedding and before the head are the same, or there are none."""


class Floors:
    """The floors of cost tables of a job, made when first asked for; the budget of the job changes none of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._made: dict[CostTables, tuple[CostTables, ...]] = {}
        self._rows: KnownRows = {}

    def of(self, tables: CostTables) -> tuple[CostTables, ...]:
        """As `floor_tables` makes them."""
        if tables not in self._made:
            self._made[tables] = floor_tables(tables, self._job, self._rows)
        return self._made[tables]

    def working(self, tables: CostTables) -> WorkingBytes | None:
        """As `working_bytes` makes them."""
        return working_bytes(tables, self._job)

    def of_others(self) -> "Floors":
        """Those of tables of the job that are soon done with."""
        return Floors(self._job)


def floor_tables(tables: CostTables, job: Job, known: KnownRows | None = None) -> tuple[CostTables, ...]:
    """The same times with bytes that no walk is below; of several, each is a bound of its own.

    ``tables`` are of a pipeline setting of the job. For a framework with states of its own they are a bound already.
    ``known`` saves work between settings of one job.
    """
    size = tables.strategies[0].num_devices if tables.strategies else None
    setting = Setting(job=job, pipeline=tables.pipeline, stage_size=size)
    if setting.job.execution.keeps_own_buffers:
        return (tables,)
    if tables.pipeline.num_chunks > 1:
        return (_interleaved(tables, setting, LayerParts.of(tables, setting, known)),)
    tables = _with_places(tables)
    parts = LayerParts.of(tables, setting, known)
    flights = [tables.pipeline.in_flight(stage) for stage in range(tables.pipeline.num_stages)]
    short = [count for count in flights if setting.pipeline.num_microbatches <= count]
    floors = [_at_the_fullest(tables, setting, parts, has_gradients=not short)]
    if short:
        floors.append(_with_all_gradients(tables, setting, parts, in_flight=min(short)))
    if tables.pipeline.num_stages == 1 and len(tables.layers) >= _LEAST_LAYERS:
        floors.append(_before_the_head(tables, setting, parts))
    return tuple(floors)


def floor_likeness(pipeline: PipelineConfig) -> tuple[int, ...]:
    """The same for pipelines without chunks whose stages of one size have the same floors, times left aside."""
    count, flights = pipeline.num_microbatches, list(map(pipeline.in_flight, range(pipeline.num_stages)))
    return count, min(pipeline.num_stages, 2), min((each for each in flights if count <= each), default=0), flights[-1]


def held_floors(strategies: tuple[Strategy, ...], legal: NDArray[np.bool_], setting: Setting) -> IntTable:
    """[3, K, S] bytes that a layer has on its stage at least: always, of each microbatch in flight, and of gradients.

    These it has when most microbatches are in flight, if they are not all.
    """
    found = np.zeros((3, *legal.shape), dtype=np.int64)
    for row, column in np.argwhere(legal).tolist():
        memory = layer_memory(setting.job.chain.kinds[row], strategies[column], setting)
        found[:, row, column] = memory.states, memory.saved, memory.kept_gradients
    return found


def _with_places(tables: CostTables) -> CostTables:
    """The tables with kinds of their own for the layer behind the embedding and the one before the head."""
    if len(tables.layers) < _LEAST_LAYERS:
        return tables
    places, num_kinds = (1, len(tables.layers) - 2), len(tables.kinds)
    source = [*range(num_kinds), *(tables.layers[place] for place in places)]
    layers = list(tables.layers)
    for number, place in enumerate(places):
        layers[place] = num_kinds + number
    return tables.select(kinds=source, layers=layers)


def _at_the_fullest(tables: CostTables, setting: Setting, parts: LayerParts, *, has_gradients: bool) -> CostTables:
    """As the last layer of a stage works backwards with most microbatches in flight."""
    static = parts.states + parts.replicated_copy + parts.gathered_copy
    if has_gradients:
        static += parts.gradients
    in_flight = parts.saved, parts.sent + parts.beside
    return _with_last_layers(tables, setting, parts, static, in_flight, follows_reduction=has_gradients)


def _with_all_gradients(tables: CostTables, setting: Setting, parts: LayerParts, *, in_flight: int) -> CostTables:
    """In the second backward pass of a step, or of a step of one microbatch as its last layer works, or behind it.

    ``in_flight`` is the least number in flight of the stages that have no gradients before.
    """
    if setting.pipeline.num_microbatches > 1:
        static = parts.states + parts.gradients + parts.replicated_copy + parts.gathered_copy
        saved, sent = (table * (in_flight - 1) // in_flight for table in (parts.saved, parts.sent + parts.beside))
        return _with_last_layers(tables, setting, parts, static, (saved, sent), follows_reduction=True)
    static = parts.states + parts.gradients
    first = tables.layers[0]
    working = parts.saved + np.maximum(parts.autograd_sending, parts.reduction)
    static[first] = (parts.states + np.maximum(parts.gradients + parts.reduced, working))[first]
    return _floor_of(tables, setting, static, np.zeros_like(static))


def _before_the_head(tables: CostTables, setting: Setting, parts: LayerParts) -> CostTables:
    """As the layer before the head works backwards on the only stage, while the head still reduces.

    With several microbatches in the second backward pass.
    """
    before, head = tables.layers[-2:]
    static = parts.states + parts.replicated_copy + parts.gathered_copy
    saved = parts.saved.copy()
    static[head] -= parts.gathered_copy[head]
    static[before] += parts.autograd[before]
    static[head] += parts.gradients[head] + parts.reduced[head]
    saved[head] = 0
    if setting.pipeline.num_microbatches > 1:
        static += np.where(np.arange(len(static))[:, None] == head, 0, parts.gradients)
    if setting.pipeline.num_microbatches <= 2:  # the pass is the last one of the step
        static[head] -= parts.replicated_copy[head]
    return _floor_of(tables, setting, static, saved)


def _floor_of(
    tables: CostTables, setting: Setting, static: IntTable, saved: IntTable, *, received: int = 0
) -> CostTables:
    return replace(
        tables,
        static_bytes=static,
        activation_bytes=saved,
        transient_bytes=np.zeros_like(static),
        overhead_bytes=shared_overhead(setting) + received,
    )


def _with_last_layers(
    tables: CostTables,
    setting: Setting,
    parts: LayerParts,
    static: IntTable,
    in_flight: tuple[IntTable, IntTable],
    *,
    follows_reduction: bool,
) -> CostTables:
    """Tables in which a layer that is the last of its stage has its working set, and what it sends.

    ``in_flight`` is what a layer saves, and what it sends and its part keeps beside, of every microbatch in flight. In
    a later backward pass the buffer of the first reduction, of the embedding or the layer behind it, is still there
    until the last layer reduces.
    """
    count, (saved, beside) = setting.pipeline.num_microbatches, in_flight
    head = tables.layers[-1]
    waiting = _add_first_reduction(tables, parts, static) if follows_reduction else 0
    reduction = parts.reduction if follows_reduction else parts.reduction_first
    reduction = np.where(parts.reduced > 0, reduction - waiting, reduction)
    has_all = setting.job.execution.buffers_every_microbatch
    last = static + np.maximum(parts.autograd_sending, reduction) + (count if has_all else 1) * parts.sent
    static[head] += np.maximum(parts.autograd, reduction)[head]
    if tables.pipeline.num_stages > 1 and has_all:
        static[head] += (count - tables.pipeline.in_flight(tables.pipeline.num_stages - 1)) * least_hidden_bytes(
            setting
        )
    _add_gathered_ahead(tables, parts, static)
    if tables.pipeline.num_stages == 1:
        return _floor_of(tables, setting, static, saved)
    floor = _floor_of(tables, setting, static, _with_head(saved, beside, head))
    return floor.with_last_kinds(last, saved + beside, apart={head})


def _with_head(saved: IntTable, beside: IntTable, head: int) -> IntTable:
    """What layers save, and of the head also what its stage keeps beside."""
    return np.where(np.arange(len(saved))[:, None] == head, saved + beside, saved)


def _add_first_reduction(tables: CostTables, parts: LayerParts, static: IntTable) -> int:
    """Adds the buffer of the embedding's reduction, or of the layer behind it where that one is not sharded.

    Returns the most that was added. Where both are sharded they count together no more than that of the embedding.
    """
    first = tables.layers[0]
    is_sharded = parts.reduced[first] > 0
    static[first] += parts.reduced[first]
    if len(tables.layers) < _LEAST_LAYERS:
        return int(parts.reduced[first].max(initial=0))
    second = tables.layers[1]
    most = int(min(parts.reduced[second].max(initial=0), static[first][is_sharded].min(initial=2**60)))
    static[first] -= np.where(is_sharded, most, 0)
    static[second] += np.minimum(parts.reduced[second], most)
    return max(int(parts.reduced[first].max(initial=0)), most)


def _add_gathered_ahead(tables: CostTables, parts: LayerParts, static: IntTable) -> None:
    """Adds what FSDP gathers of the layer before the head as a sharded head begins to work backwards."""
    if len(tables.layers) < _LEAST_LAYERS:
        return
    before, head = tables.layers[-2:]
    is_whole = tables.legal[head] & (parts.reduced[head] == 0)
    most = int(min(parts.ahead[before].max(initial=0), static[head][is_whole].min(initial=2**60)))
    static[head] -= np.where(is_whole, most, 0)
    static[before] += np.minimum(parts.ahead[before], most)


def _interleaved(tables: CostTables, setting: Setting, parts: LayerParts) -> CostTables:
    """As the last layer of a chunk begins a backward pass with most passes in flight on its stage."""
    moments, pipeline = fullest_moments(setting), tables.pipeline
    exchange, hidden = stage_exchange(moments, setting), least_hidden_bytes(setting)
    head, inner = tables.layers[-1], range(pipeline.num_stages - 1)
    flights = [pipeline.in_flight(stage) for stage in range(pipeline.num_stages)]
    saved, received = saved_in_chunks(tables, parts, moments), min(exchange.received)
    by_flight = {}
    for in_flight in dict.fromkeys(flights):
        alike = [stage for stage, each in enumerate(flights) if each == in_flight]
        static = static_in_chunks(tables, parts, moments, alike)
        more = (min(exchange.received[stage] for stage in alike) - received) * hidden
        sent = min(exchange.sent[stage] for stage in set(alike).intersection(inner) or inner)
        last = static + np.maximum(parts.autograd_sending, parts.reduction) + sent * parts.sent + more
        static[head] += exchange.sent_by_last * hidden
        if moments[-1].working == pipeline.num_chunks - 1:
            static[head] += np.maximum(parts.autograd, parts.reduction)[head]
        by_flight[in_flight] = np.stack([static, last])
    static, last = np.minimum.reduce(list(by_flight.values()))
    floor = _floor_of(tables, setting, static, _with_head(saved, parts.beside, head), received=received * hidden)
    floor = floor.with_last_kinds(last, saved + parts.beside, apart={head})
    held = {in_flight: np.concatenate(both) - floor.static_bytes for in_flight, both in by_flight.items()}
    return replace(floor, stage_bytes=held)
