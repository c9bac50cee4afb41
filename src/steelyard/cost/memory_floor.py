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

Left out, so that the walk may be above the floor: what is gathered ahead and what another layer than the embedding
still reduces; what a stage receives beyond its share; all later layers of the pass. Interleaved, the chunks' last
layers.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import context_bytes
from steelyard.cost.inputs import sample_bytes, side_bytes
from steelyard.cost.schedule import PassOrder, pass_order
from steelyard.cost.setting import Setting
from steelyard.cost.stage_memory import LayerMemory, hidden_bytes, layer_memory, reduction_bytes, without_sent
from steelyard.cost.tables import CostTables
from steelyard.plan.strategy import Strategy

IntTable = NDArray[np.int64]


def floor_tables(tables: CostTables, setting: Setting) -> tuple[CostTables, ...]:
    """The same times with bytes that no walk is below; of several, each is a bound of its own.

    ``tables`` are those of the setting, pinned or not. For a framework with states of its own they are a bound already.
    """
    if setting.job.execution.states is not None:
        return (tables,)
    parts = _parts(tables, setting)
    if tables.num_chunks > 1:
        return (_interleaved(tables, setting, parts),)
    flights = [tables.in_flight(stage) for stage in range(tables.num_stages)]
    short = [count for count in flights if setting.num_microbatches <= count]
    if not short:
        return (_at_the_fullest(tables, setting, parts, has_gradients=True),)
    return (
        _at_the_fullest(tables, setting, parts, has_gradients=False),
        _with_all_gradients(tables, setting, parts, in_flight=min(short)),
    )


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


def _parts(tables: CostTables, setting: Setting) -> _Parts:
    names = _Parts.__slots__
    found = {name: np.zeros(tables.legal.shape, dtype=np.int64) for name in names}
    last = len(tables.layers) - 1
    for row, place in {kind: place for place, kind in enumerate(tables.layers)}.items():
        layer = setting.job.chain.num_layers - 1 if place == last else place
        for column in np.flatnonzero(tables.legal[row]).tolist():
            of = _layer_parts(layer, tables.strategies[column], setting, is_head=place == last)
            for name, num_bytes in zip(names, of, strict=True):
                found[name][row, column] = num_bytes
    return _Parts(**found)


def _layer_parts(layer: int, strategy: Strategy, setting: Setting, *, is_head: bool) -> tuple[int, ...]:
    """The fields of `_Parts` in their order, for one layer of the model."""
    chain = setting.job.chain
    memory = layer_memory(chain.layers[layer], strategy, setting)
    sent = 0 if is_head else hidden_bytes(layer, strategy, setting)
    copy = memory.copy if memory.keeps_copy else 0
    freed = memory.freed + (memory.copy if memory.drops_copy else 0)
    return (
        3 * memory.shard + memory.buffers + sample_bytes(chain.kind_of(layer), strategy, setting),
        memory.kept_gradients,
        copy if memory.shards == 1 else 0,
        copy if memory.shards > 1 else 0,
        memory.saved,
        memory.reduced if memory.shards > 1 else 0,
        _autograd_bytes(memory),
        _autograd_bytes(without_sent(memory, strategy, sent)),
        reduction_bytes(memory, is_first=False) - freed,
        reduction_bytes(memory, is_first=True) - freed,
        sent,
    )


def _autograd_bytes(layer: LayerMemory) -> int:
    return layer.backward + layer.made_gradients + (0 if layer.keeps_copy else layer.copy)


def _at_the_fullest(tables: CostTables, setting: Setting, parts: _Parts, *, has_gradients: bool) -> CostTables:
    """As the last layer of a stage works backwards with most microbatches in flight."""
    static = parts.states + parts.replicated_copy + parts.gathered_copy
    if has_gradients:
        static += parts.gradients
    return _with_last_layers(tables, setting, parts, static, (parts.saved, parts.sent), follows_reduction=has_gradients)


def _with_all_gradients(tables: CostTables, setting: Setting, parts: _Parts, *, in_flight: int) -> CostTables:
    """In the second backward pass of a step, or at the end of a step of one microbatch.

    ``in_flight`` is the least number in flight of the stages that have no gradients before.
    """
    if setting.num_microbatches > 1:
        static = parts.states + parts.gradients + parts.replicated_copy + parts.gathered_copy
        saved, sent = (table * (in_flight - 1) // in_flight for table in (parts.saved, parts.sent))
        return _with_last_layers(tables, setting, parts, static, (saved, sent), follows_reduction=True)
    static = parts.states + parts.gradients
    first = tables.layers[0]
    static[first] += parts.reduced[first]
    return replace(
        tables,
        static_bytes=static,
        activation_bytes=np.zeros_like(static),
        transient_bytes=np.zeros_like(static),
        overhead_bytes=context_bytes(setting) + _shared_bytes(setting),
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

    ``in_flight`` is what a layer saves and sends, of every microbatch in flight. In a later backward pass the buffer of the embedding's reduction is still there until the last layer reduces.
    """
    count, (saved, sent) = setting.num_microbatches, in_flight
    first, head = tables.layers[0], tables.layers[-1]
    waiting, reduction = 0, parts.reduction_first
    if follows_reduction:
        waiting = int(parts.reduced[first].max(initial=0))
        static[first] += parts.reduced[first]
        reduction = np.where(parts.reduced > 0, parts.reduction - waiting, parts.reduction)
    last = static + np.maximum(parts.autograd_sending, reduction) + count * parts.sent
    static[head] += np.maximum(parts.autograd, reduction)[head]
    if tables.num_stages > 1:
        static[head] += (count - tables.in_flight(tables.num_stages - 1)) * _least_hidden_bytes(setting)
    floor = replace(
        tables,
        static_bytes=static,
        activation_bytes=saved,
        transient_bytes=np.zeros_like(static),
        overhead_bytes=context_bytes(setting) + _shared_bytes(setting),
    )
    return floor if tables.num_stages == 1 else floor.with_last_kinds(last, saved + sent, apart={head})


def _shared_bytes(setting: Setting) -> int:
    """What all layers of a stage read beside the hidden state, for the one microbatch that is always there."""
    return side_bytes(set(setting.job.chain.kinds) if setting.num_stages == 1 else set(), setting)


def _least_hidden_bytes(setting: Setting) -> int:
    """The least that a rank receives of what flows between two layers, for one microbatch."""
    job = setting.job
    shapes = [(*job.chain.hidden_shape(place, job.seq_len), job.chain.kind_of(place)) for place in _inner(setting)]
    entries = min(sequence * width * kind.num_streams for sequence, width, kind in shapes)
    return setting.microbatch_samples * entries * job.compute_bytes // setting.devices_per_stage


def _inner(setting: Setting) -> range:
    return range(setting.job.chain.num_layers - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkState:
    """A chunk of a stage as one of the stage's backward passes begins."""

    in_flight: int
    has_gradients: bool
    is_begun: bool
    """Whether the copies of replicated layers are there: between the first forward and the last backward pass."""


def _interleaved(tables: CostTables, setting: Setting, parts: _Parts) -> CostTables:
    """As a stage of several chunks begins a backward pass with most passes in flight."""
    stages, count = range(tables.num_stages), tables.num_chunks
    states = [_fullest(_order(stage, setting), setting) for stage in stages]
    ends = {tables.layers[0]: states[0][0], tables.layers[-1]: states[-1][-1]}
    copies = np.full((len(tables.kinds), 1), count)
    gradients = np.full_like(copies, min(sum(each.has_gradients for each in chunks) for chunks in states))
    begun = np.full_like(copies, min(sum(each.is_begun for each in chunks) for chunks in states))
    in_flight = [sum(each.in_flight for each in chunks) for chunks in states]
    saved = np.min([parts.saved * have // tables.in_flight(stage) for stage, have in enumerate(in_flight)], axis=0)
    for kind, stage in ((tables.layers[0], 0), (tables.layers[-1], -1)):
        state = ends[kind]
        copies[kind], gradients[kind], begun[kind] = 1, state.has_gradients, state.is_begun
        saved[kind] = parts.saved[kind] * state.in_flight // tables.in_flight(stages[stage])
    borders = (2 * count - 1) * setting.num_microbatches - max(in_flight)
    return replace(
        tables,
        static_bytes=copies * parts.states + gradients * parts.gradients + begun * parts.replicated_copy,
        activation_bytes=saved,
        transient_bytes=np.zeros_like(saved),
        overhead_bytes=context_bytes(setting) + _shared_bytes(setting) + borders * _least_hidden_bytes(setting),
    )


def _order(stage: int, setting: Setting) -> PassOrder:
    return pass_order(stage, setting.num_stages, setting.num_microbatches, setting.schedule, setting.num_chunks)


def _fullest(order: PassOrder, setting: Setting) -> list[_ChunkState]:
    """The chunks of a stage in one of the backward passes with most passes in flight: where most gradients are kept."""
    changes = np.where(order.is_backward, -1, 1)
    before = np.cumsum(changes) - changes
    fullest = np.flatnonzero(order.is_backward & (before == before[order.is_backward].max()))
    found = [[_state(order, chunk, place, setting) for chunk in range(setting.num_chunks)] for place in fullest]
    return max(found, key=lambda chunks: sum(each.has_gradients + each.is_begun for each in chunks))


def _state(order: PassOrder, chunk: int, place: int, setting: Setting) -> _ChunkState:
    mine = order.chunk[:place] == chunk
    backwards = int((mine & order.is_backward[:place]).sum())
    forwards = int(mine.sum()) - backwards
    return _ChunkState(
        in_flight=forwards - backwards,
        has_gradients=backwards > 0,
        is_begun=forwards > 0 and backwards < setting.num_microbatches,
    )
