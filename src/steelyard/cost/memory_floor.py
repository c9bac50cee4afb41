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

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import context_bytes
from steelyard.cost.inputs import sample_bytes, side_bytes
from steelyard.cost.layer import LayerMemory, layer_memory, rank_samples
from steelyard.cost.setting import Job, Setting
from steelyard.cost.stage_memory import backward_sending, hidden_bytes, made_bytes
from steelyard.cost.tables import CostTables
from steelyard.plan.strategy import Strategy
from steelyard.schedules import PipelineConfig
from steelyard.schedules.passes import Phase

IntTable = NDArray[np.int64]

_LEAST_LAYERS = 4
"""With fewer the layers behind the embedding and before the head are the same, or there are none."""


KnownLayers = dict[tuple[object, ...], LayerMemory]
"""The memory of layers of a job by all that it depends on, shared between settings."""


class Floors:
    """The floors of cost tables of a job, made when first asked for; the budget of the job changes none of them."""

    def __init__(self, job: Job, known: KnownLayers | None = None) -> None:
        self._job = job
        self._made: dict[CostTables, tuple[CostTables, ...]] = {}
        self._known: KnownLayers = {} if known is None else known

    def of(self, tables: CostTables) -> tuple[CostTables, ...]:
        """As `floor_tables` makes them."""
        if tables not in self._made:
            self._made[tables] = floor_tables(tables, self._job, self._known)
        return self._made[tables]

    def of_others(self) -> "Floors":
        """Those of tables of the job that are soon done with; what is known of layers serves them too."""
        return Floors(self._job, self._known)


def floor_tables(tables: CostTables, job: Job, known: KnownLayers | None = None) -> tuple[CostTables, ...]:
    """The same times with bytes that no walk is below; of several, each is a bound of its own.

    ``tables`` are of a pipeline setting of the job; ``known`` saves work between settings. For a framework with states
    of its own the tables are a bound already.
    """
    size = tables.strategies[0].num_devices if tables.strategies else None
    setting = Setting(job=job, pipeline=tables.pipeline, stage_size=size)
    if setting.job.execution.keeps_own_buffers:
        return (tables,)
    known = {} if known is None else known
    if tables.pipeline.num_chunks > 1:
        return (_interleaved(tables, setting, _parts(tables, setting, known)),)
    tables = _with_places(tables)
    parts = _parts(tables, setting, known)
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


def held_floors(
    strategies: tuple[Strategy, ...], legal: NDArray[np.bool_], setting: Setting, known: KnownLayers
) -> IntTable:
    """[3, K, S] bytes that a layer has on its stage at least: always, of each microbatch in flight, and of gradients.

    These it has when most microbatches are in flight, if they are not all.
    """
    found = np.zeros((3, *legal.shape), dtype=np.int64)
    for row, column in np.argwhere(legal).tolist():
        memory = _memory(row, strategies[column], setting, known)
        found[:, row, column] = 3 * memory.shard + memory.buffers, memory.saved, memory.kept_gradients
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """Bytes [K, S] of the rows of tables, 0 where illegal."""

    states: IntTable
    """Parameters, optimizer states and samples."""
    gradients: IntTable
    replicated_copy: IntTable
    """The copy that computes, of layers that keep it throughout a step."""
    gathered_copy: IntTable
    """The same of sharded layers, from the forward to the backward pass."""
    saved: IntTable
    reduced: IntTable
    """Of sharded layers, the buffer that gradients are reduced from."""
    ahead: IntTable
    """Of sharded layers that are gathered again for the backward pass, what is gathered while the next one works."""
    autograd: IntTable
    """What the layer takes while autograd works backwards through it."""
    autograd_sending: IntTable
    """The same where its output goes to another stage."""
    reduction: IntTable
    """What it takes as its gradients are reduced, beside what it has freed by then."""
    reduction_first: IntTable
    """The same in the first backward pass of a step."""
    sent: IntTable
    """The output, for one microbatch."""


def _parts(tables: CostTables, setting: Setting, known: KnownLayers) -> _Parts:
    names = _Parts.__slots__
    found = np.zeros((len(names), *tables.legal.shape), dtype=np.int64)
    last = len(tables.layers) - 1
    for row, place in {kind: place for place, kind in enumerate(tables.layers)}.items():
        layer = setting.job.chain.num_layers - 1 if place == last else place
        for column in np.flatnonzero(tables.legal[row]).tolist():
            strategy = tables.strategies[column]
            memory = _memory(setting.job.chain.layers[layer], strategy, setting, known)
            sent = 0 if place == last else hidden_bytes(layer, strategy, setting)
            made = 0 if place == last else made_bytes(layer, strategy, setting)
            found[:, row, column] = _layer_parts(memory, strategy, sent, made)
            found[0, row, column] += sample_bytes(setting.job.chain.kind_of(layer), strategy, setting)
    return _Parts(**dict(zip(names, found, strict=True)))


def _memory(kind_index: int, strategy: Strategy, setting: Setting, known: KnownLayers) -> LayerMemory:
    shards, tokens, samples = strategy.state_shards, strategy.token_degree, rank_samples(strategy, setting)
    key = (kind_index, strategy.tensor_degree, shards, tokens, strategy.variants, strategy.remat, samples)
    if key not in known:
        known[key] = layer_memory(setting.job.chain.kinds[kind_index], strategy, setting)
    return known[key]


def _layer_parts(memory: LayerMemory, strategy: Strategy, sent: int, made: int) -> tuple[int, ...]:
    """The fields of `_Parts` in their order, samples left out."""
    copy = memory.copy if memory.keeps_copy else 0
    freed = memory.freed + (memory.copy if memory.drops_copy else 0)
    beside = memory.made_gradients + (0 if memory.keeps_copy else memory.copy)
    return (
        3 * memory.shard + memory.buffers,
        memory.kept_gradients,
        copy if memory.shards == 1 else 0,
        copy if memory.shards > 1 else 0,
        memory.saved,
        memory.reduced if memory.shards > 1 else 0,
        memory.copy if memory.shards > 1 and not memory.keeps_copy else 0,
        memory.backward + beside,
        backward_sending(memory, strategy, made) + beside,
        memory.reduction_bytes(is_first=False) - freed,
        memory.reduction_bytes(is_first=True) - freed,
        sent,
    )


def _at_the_fullest(tables: CostTables, setting: Setting, parts: _Parts, *, has_gradients: bool) -> CostTables:
    """As the last layer of a stage works backwards with most microbatches in flight."""
    static = parts.states + parts.replicated_copy + parts.gathered_copy
    if has_gradients:
        static += parts.gradients
    return _with_last_layers(tables, setting, parts, static, (parts.saved, parts.sent), follows_reduction=has_gradients)


def _with_all_gradients(tables: CostTables, setting: Setting, parts: _Parts, *, in_flight: int) -> CostTables:
    """In the second backward pass of a step, or of a step of one microbatch as its last layer works, or behind it.

    ``in_flight`` is the least number in flight of the stages that have no gradients before.
    """
    if setting.pipeline.num_microbatches > 1:
        static = parts.states + parts.gradients + parts.replicated_copy + parts.gathered_copy
        saved, sent = (table * (in_flight - 1) // in_flight for table in (parts.saved, parts.sent))
        return _with_last_layers(tables, setting, parts, static, (saved, sent), follows_reduction=True)
    static = parts.states + parts.gradients
    first = tables.layers[0]
    working = parts.saved + np.maximum(parts.autograd_sending, parts.reduction)
    static[first] = (parts.states + np.maximum(parts.gradients + parts.reduced, working))[first]
    return _floor_of(tables, setting, static, np.zeros_like(static))


def _before_the_head(tables: CostTables, setting: Setting, parts: _Parts) -> CostTables:
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
        overhead_bytes=context_bytes(setting) + _shared_bytes(setting) + received,
    )


def _with_last_layers(
    tables: CostTables,
    setting: Setting,
    parts: _Parts,
    static: IntTable,
    in_flight: tuple[IntTable, IntTable],
    *,
    follows_reduction: bool,
) -> CostTables:
    """Tables in which a layer that is the last of its stage has its working set, and what it sends.

    ``in_flight`` is what a layer saves and sends, of every microbatch in flight. In a later backward pass the buffer of
    the first reduction, of the embedding or the layer behind it, is still there until the last layer reduces.
    """
    count, (saved, sent) = setting.pipeline.num_microbatches, in_flight
    head = tables.layers[-1]
    waiting = _add_first_reduction(tables, parts, static) if follows_reduction else 0
    reduction = parts.reduction if follows_reduction else parts.reduction_first
    reduction = np.where(parts.reduced > 0, reduction - waiting, reduction)
    has_all = setting.job.execution.buffers_every_microbatch
    last = static + np.maximum(parts.autograd_sending, reduction) + (count if has_all else 1) * parts.sent
    static[head] += np.maximum(parts.autograd, reduction)[head]
    if tables.pipeline.num_stages > 1 and has_all:
        static[head] += (count - tables.pipeline.in_flight(tables.pipeline.num_stages - 1)) * _least_hidden_bytes(
            setting
        )
    _add_gathered_ahead(tables, parts, static)
    floor = _floor_of(tables, setting, static, saved)
    return floor if tables.pipeline.num_stages == 1 else floor.with_last_kinds(last, saved + sent, apart={head})


def _add_first_reduction(tables: CostTables, parts: _Parts, static: IntTable) -> int:
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


def _add_gathered_ahead(tables: CostTables, parts: _Parts, static: IntTable) -> None:
    """Adds what FSDP gathers of the layer before the head as a sharded head begins to work backwards."""
    if len(tables.layers) < _LEAST_LAYERS:
        return
    before, head = tables.layers[-2:]
    is_whole = tables.legal[head] & (parts.reduced[head] == 0)
    most = int(min(parts.ahead[before].max(initial=0), static[head][is_whole].min(initial=2**60)))
    static[head] -= np.where(is_whole, most, 0)
    static[before] += np.minimum(parts.ahead[before], most)


def _shared_bytes(setting: Setting) -> int:
    """What all layers of a stage read beside the hidden state, for the one microbatch that is always there."""
    return side_bytes(set(setting.job.chain.kinds) if setting.pipeline.num_stages == 1 else set(), setting)


def _least_hidden_bytes(setting: Setting) -> int:
    """The least that a rank receives of what flows between two layers, for one microbatch."""
    job = setting.job
    entries = min(job.chain.num_flowing(place, job.seq_len) for place in _inner(setting))
    return setting.microbatch_samples * entries * job.compute_bytes // setting.devices_per_stage


def _inner(setting: Setting) -> range:
    return range(setting.job.chain.num_layers - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A stage of several chunks as it begins a backward pass, by chunk."""

    working: int
    """The chunk of the pass."""
    forwards: tuple[int, ...]
    """Forward passes before."""
    backwards: tuple[int, ...]
    num_microbatches: int

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Microbatches in flight."""
        return tuple(each - done for each, done in zip(self.forwards, self.backwards, strict=True))

    @property
    def has_gradients(self) -> tuple[bool, ...]:
        return tuple(done > 0 for done in self.backwards)

    @property
    def is_begun(self) -> tuple[bool, ...]:
        """Whether the copies of replicated layers are there: from the first forward to the last backward pass."""
        pairs = zip(self.forwards, self.backwards, strict=True)
        return tuple(each > 0 and done < self.num_microbatches for each, done in pairs)


def _interleaved(tables: CostTables, setting: Setting, parts: _Parts) -> CostTables:
    """As the last layer of a chunk begins a backward pass with most passes in flight on its stage."""
    moments = [_fullest(stage, setting) for stage in range(tables.pipeline.num_stages)]
    first, head = tables.layers[0], tables.layers[-1]
    shape = (len(tables.kinds), 1)
    gradients, begun, copies = (np.full(shape, tables.pipeline.num_chunks, dtype=np.int64) for _ in range(3))
    gradients[:] = min(sum(moment.has_gradients) for moment in moments)
    begun[:] = min(sum(moment.is_begun) for moment in moments)
    flights = [sum(moment.in_flight) for moment in moments]
    saved = parts.saved.copy()
    for stage, each in enumerate(flights):
        saved = np.minimum(saved, parts.saved * each // tables.pipeline.in_flight(stage))
    for kind, stage, chunk in ((first, 0, 0), (head, tables.pipeline.num_stages - 1, tables.pipeline.num_chunks - 1)):
        moment = moments[stage]
        copies[kind], gradients[kind], begun[kind] = 1, moment.has_gradients[chunk], moment.is_begun[chunk]
        saved[kind] = parts.saved[kind] * moment.in_flight[chunk] // tables.pipeline.in_flight(stage)
    static = copies * parts.states + gradients * parts.gradients + begun * parts.replicated_copy
    received, sent, sent_by_last = _exchanged(moments, setting)
    last = static + np.maximum(parts.autograd_sending, parts.reduction) + sent * parts.sent
    static[head] += sent_by_last * _least_hidden_bytes(setting)
    if moments[-1].working == tables.pipeline.num_chunks - 1:
        static[head] += np.maximum(parts.autograd, parts.reduction)[head]
    floor = _floor_of(tables, setting, static, saved, received=received * _least_hidden_bytes(setting))
    return floor.with_last_kinds(last, saved, apart={head})


def _exchanged(moments: list[_Moment], setting: Setting) -> tuple[int, int, int]:
    """What a stage holds beside what layers save, at least: of others, of its own, and of its own on the last stage."""
    pipeline, last = setting.pipeline, moments[-1]
    if setting.job.execution.buffers_every_microbatch:
        others, flights = pipeline.num_chunks - 1, [sum(moment.in_flight) for moment in moments]
        forwards = min(sum(moment.forwards) for moment in moments[:-1])
        count = pipeline.num_microbatches
        return max(0, others * count - max(flights)), pipeline.num_chunks * count + forwards, others * count
    ahead = (pipeline.schedule.received_ahead(pipeline, stage) for stage in range(pipeline.num_stages))
    kept = (sum(moment.has_gradients[int(stage == 0) :]) for stage, moment in enumerate(moments))
    received = min(sum(each) + own for each, own in zip(ahead, kept, strict=True))
    return received, min(sum(moment.in_flight) for moment in moments[:-1]) + 1, sum(last.in_flight[:-1])


def _fullest(stage: int, setting: Setting) -> _Moment:
    """Of the backward passes that a stage begins with most passes in flight the one with most gradients, or the last.

    On the last stage rather one of the last chunk, which has the head.
    """
    chunks, count = setting.pipeline.num_chunks, setting.pipeline.num_microbatches
    order = setting.pipeline.passes(stage)
    is_backward = order.phase == Phase.BACKWARD
    mine = order.chunk == np.arange(chunks)[:, None]
    before = [np.cumsum(mine & each, axis=1) - (mine & each) for each in (~is_backward, is_backward)]
    forwards, backwards = before
    in_flight = (forwards - backwards).sum(axis=0)
    kept = ((backwards > 0).astype(int) + ((forwards > 0) & (backwards < count))).sum(axis=0)
    has_head = (order.chunk == chunks - 1) & (stage == setting.pipeline.num_stages - 1)
    fullest = is_backward & (in_flight == in_flight[is_backward].max())
    place = max(np.flatnonzero(fullest).tolist(), key=lambda each: (has_head[each], kept[each], each))
    return _Moment(
        working=int(order.chunk[place]),
        forwards=tuple(forwards[:, place].tolist()),
        backwards=tuple(backwards[:, place].tolist()),
        num_microbatches=count,
    )
