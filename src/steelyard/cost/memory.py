r"""Peak memory of a rank of a stage: the single definition for the search and for predictions.

A stage reaches its peak when it begins a backward pass with the most microbatches in flight, $n$ including that of the
pass. When layer $l$ of its layers $1..L$ runs, later layers have freed saved and dropped tensors and left gradients:

$$M = o + \sum_{j=1}^L h_j + \max_l \Big(u_l + a_{l-1} + r_{l+1} - \sum_{j>l} f_j\Big), \qquad
h = p + s + g + c + n b, \quad f = b + c'$$

FSDP gathers the sharded layer that runs next, $a$, and holds the buffer of the last reduction until the next one, $r$.
The last layer, whose backward pass is first, finds the buffer of the first layer, which the previous backward pass
reduced last, or its own if no other layer has one. If parts are frozen, it is possible that no layer after an embedding
reduces; then everything that the embedding reduced stays.

To make layers independent of each other, every layer counts the maximum of $a_1..a_{L-1}$ and of $r_1..r_L$, the last
layer that of $r_1..r_{L-1}$ or else $r_L$, and none with one microbatch; the copy of an embedding counts only for the
layer after it. This is exact for identical neighbours, which most are, and otherwise an upper bound.

| symbol    | bytes of a rank | meaning                                                                        |
|-----------|-----------------|--------------------------------------------------------------------------------|
| $p, s, g$ | `LayerStates`   | parameters, optimizer states and samples; gradients that are kept, or whole    |
| $c$       | `LayerStates`   | compute-dtype copy of layers that keep one; $c'$ only of sharded ones          |
| $b$       | traced          | saved by one microbatch                                                        |
| $u$       | `_rows`         | maximum of forward, backward and reduction, with the copy and new gradients    |
| $u$       | `layer_rows`    | plus communicators of the layer: a stage has the maximum over its layers       |
| $a$       | `_rows`         | copy of a sharded layer that is gathered ahead, none if it keeps one           |
| $r$       | `_rows`         | buffer that a sharded layer's gradients are reduced from                       |
| $o$       | `_overheads`    | CUDA context, shared inputs of microbatches in flight, arrived activations     |

Before its first backward pass a stage has no gradients. With one microbatch $h$ has none and $f$ is smaller by them. A
stage that holds all microbatches in flight has either the gradients of a layer or what its last microbatch saved, and
$f$ is the excess of the latter. The last layer of a stage has its own rows, which include what it sends. A stage with
several chunks holds what its passes in flight saved, each of its own chunk, the states of all chunks, and a buffer for
each paused chunk.

Copies from the host during the optimizer step count as work of a layer without its $f$, because by then all layers have
freed theirs.

Under a schedule with weight passes a block holds $w$ from its backward pass to its weight pass: the inputs of its
linear layers and the gradients of their outputs. On a stage with $i$ pending weight passes when a backward pass begins,
$h$ is larger by $i\,w$ and $f$ smaller by $w$. $u$ is unchanged, because inputs are freed as gradients accumulate.
torch's split backward passes (`Execution.splits_whole`) keep all saved tensors in addition.

Layers kept whole (ZeRO-1, with several microbatches) free and reduce only in the last backward pass, with one
microbatch in flight: $f = b$ and $r = 0$, because the whole gradients and $c$ that a layer frees offset its reduction.

A framework with its own buffers (`Execution.keeps_own_buffers`) frees nothing earlier and leaves no buffers. Its
states, context and communicators lie outside torch's allocator, which reserves no slack for them: within a budget
divided by 1 + slack, they count divided by 1 + slack too (`LayerRows.counted`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.context import (
    apart_slack,
    context_bytes,
    counted_bytes,
    counted_context_bytes,
)
from steelyard.cost.job import Job, JobConfig, layer_precision, side_bytes
from steelyard.cost.layer_load import held_params, layer_profile, rank_samples
from steelyard.cost.layer_memory import LayerRow, layer_states, own_params, tied_params
from steelyard.cost.tables import CostTables, Received
from steelyard.limits import MOST_BYTES
from steelyard.model.chain import LayerRole, LayerType
from steelyard.plan.stages import SLICES_PER_RANK
from steelyard.plan.strategy import Remat, Strategy
from steelyard.schedules import USUAL

IntTable = NDArray[np.int64]
TERMS = ("parameters", "gradients", "optimizer", "optimizer step", "samples", "gathered parameters", "activations")
"""Memory terms of layers, in the order of `LayerRows.terms`."""

_SLICES_HELD = 3
"""Slices held while tied gradients are summed: the sum, the addend, and the latter in row order if the matrix is
divided twice."""
_NEVER = -(2**12) * MOST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRows:
    """Bytes [K, S] of every layer type under every strategy, 0 if illegal, for one number of microbatches."""

    terms: IntTable
    """[7, K, S] bytes of a layer by `TERMS`; activations are those of one microbatch."""
    freed: IntTable
    works: IntTable
    ends: IntTable
    """Working memory of the last layer of a stage."""
    first_reduction: IntTable
    """Working memory, as ``works``, in the first of several backward passes."""
    ahead: IntTable
    left: IntTable
    sent: IntTable
    """Bytes sent to another stage per microbatch."""
    gathered: IntTable
    """Gathered copy of a sharded layer, which a paused chunk holds."""
    communicators: IntTable
    """Part of ``works``, ``ends`` and ``first_reduction`` in buffers of communicators."""

    @property
    def of_tensors(self) -> "LayerRows":
        """The rows without communicators."""
        return self._with_communicators(np.zeros_like(self.communicators))

    def counted(self, job: Job) -> "LayerRows":
        """The rows with what lies outside torch's allocator as `counted_bytes`."""
        if not (apart := job.execution.kept_apart):
            return self
        is_apart = np.array([[[name in apart]] for name in TERMS])
        terms = np.where(is_apart, counted_bytes(self.terms, job), self.terms)
        return replace(self, terms=terms)._with_communicators(counted_bytes(self.communicators, job))

    def _with_communicators(self, new: IntTable) -> "LayerRows":
        change = new - self.communicators
        works, ends, first = (each + change for each in (self.works, self.ends, self.first_reduction))
        return replace(self, works=works, ends=ends, first_reduction=first, communicators=new)


def layer_rows(
    config: JobConfig,
    strategies: Sequence[Strategy],
    legal: NDArray[np.bool_],
    possible: NDArray[np.bool_] | None = None,
) -> LayerRows:
    """Return the rows of a pipeline configuration, which are independent of its schedule.

    ``possible`` [K, S] are the strategies that are legal with some number of microbatches. Given these, configurations
    that differ only in this number share what is independent of it.
    """
    layer_types, found = config.job.chain.layer_types, np.zeros((15, *legal.shape), dtype=np.int64)
    groups = np.zeros(legal.shape, dtype=np.int64)
    for row, layer_type in enumerate(layer_types):
        columns = np.flatnonzero((legal if possible is None else possible)[row])
        if len(columns):
            made = LayerRow.of(layer_type, tuple([strategies[column] for column in columns.tolist()]), config)
            found[:, row, columns] = (_own_rows if config.job.execution.keeps_own_buffers else _rows)(made, config)
            groups[row, columns] = made.communicators
    found, groups = np.where(legal, np.clip(found, _NEVER, MOST_BYTES), 0), np.where(legal, groups, 0)
    found[8:11] += groups
    names = ("freed", "works", "ends", "first_reduction", "ahead", "left", "sent", "gathered")
    return LayerRows(terms=found[:7], communicators=groups, **dict(zip(names, found[7:], strict=True)))


def _rows(row: LayerRow, config: JobConfig) -> IntTable:
    """Return the fields of `LayerRows`, as rows [15, S]."""
    job, layer_type = config.job, row.layer_type
    saved, entered, reducing, forward, backward, read, on_host = row.work(config)
    shard, gradients, optimizer, copy, keeps, whole, shards, is_sharded, *others = row.states
    made, reduced, first, later, trains, drops, moves, step, fetched = others
    one = config.pipeline.num_microbatches == 1
    is_moved = is_sharded & (whole == 0)
    kept, own, gathered = keeps * copy, (1 - keeps) * copy, is_moved * copy
    is_awaited = job.chain.freeze is not None and layer_type.role is LayerRole.EMBEDDING
    left = is_moved * (reduced + trains * (made + copy) * is_awaited)
    freed = saved + np.where(is_moved | one, kept, 0) - (gradients if one else 0)
    before = 0 if layer_type.role is LayerRole.EMBEDDING else np.maximum(0, copy - forward)
    gathering = np.maximum(0, copy + before - whole * gradients)  # before all gradients if it stays for the step
    arriving = np.where(shards > 1, gathering + fetched, is_sharded * np.maximum(0, fetched - forward))
    forward = forward + own + arriving
    waiting, flowing, handed = _entries(layer_type, config)
    sample_degree, _, sequence_degree = row.numbers
    share = config.microbatch_samples // sample_degree * job.compute_bytes
    backward = backward + share * waiting // sequence_degree
    copies = np.array([1 if each.remat is Remat.FULL else 2 for each in row.chosen])
    sending = np.maximum(0, backward - copies * (share * handed // sequence_degree))
    beside = np.where(moves, made + own, _NEVER)
    rest = entered + reducing + on_host - drops * np.maximum(0, saved - entered) - is_sharded * kept
    reduction, reduction_first = (np.where(trains, rest + each, _NEVER) for each in (first if one else later, first))
    tied = _tied_bytes(layer_type, row.chosen, config)
    tied = np.where(tied > 0, tied + np.maximum(0, -freed) - kept, _NEVER)
    stepping = np.where(step > 0, step - freed, _NEVER)
    inner = np.maximum.reduce([forward, backward + beside, tied, stepping])
    ends = np.maximum.reduce([forward, sending + beside, reduction, tied, stepping])
    found = [shard, (not one) * gradients, optimizer, 0, read, kept, saved, freed]
    found += [np.maximum(inner, reduction - left), ends, np.maximum(inner, reduction_first - left)]
    found += [(shards > 1) * ((1 - keeps) * gathered + fetched), left, share * flowing // sequence_degree, gathered]
    return np.stack(np.broadcast_arrays(*found)).astype(np.int64)


def _entries(layer_type: LayerType, config: JobConfig) -> tuple[int, int, int]:
    """Return entries per sample for a layer type: cross-layer inputs of later layers whose gradients wait during its
    backward pass, activations that it sends to another stage, and the part of these that it makes itself.

    The first two are the maximum over all layers of the type, the last is the minimum.
    """
    chain, seq_len = config.job.chain, config.job.seq_len

    def of_type() -> tuple[int, int, int]:
        places = [place for place in range(chain.num_layers) if chain.type_of(place) == layer_type]
        inner = [place for place in places if place < chain.num_layers - 1]
        waiting = max(_most_waiting(chain.num_read_behind, place, chain.num_layers, seq_len) for place in places)
        flows = max((chain.num_flowing(place, seq_len) for place in inner), default=0)
        return waiting, flows, min((chain.num_made(place, seq_len) for place in inner), default=0)

    waiting, flowing, handed = config.job.once(("entries", layer_type.name), of_type)
    return (waiting, flowing, handed) if config.is_piped else (waiting, 0, 0)


def _most_waiting(
    read_behind: Callable[[Sequence[int], int], Iterable[tuple[int, int]]], place: int, count: int, seq_len: int
) -> int:
    spans = [range(first, end) for first in {0, place} for end in range(place + 1, count + 1)]
    return max((num for span in spans for at, num in read_behind(span, seq_len) if span[at] == place), default=0)


def _tied_bytes(layer_type: LayerType, chosen: Sequence[Strategy], config: JobConfig) -> IntTable:
    """Bytes [S] that a rank needs to sum the gradients of the tied vocabulary matrix if its copies are sharded
    differently.

    Needed after the backward passes, when compute-dtype copies are freed.
    """
    chain = config.job.chain
    is_tied = any(chain.type_of(layer) == layer_type for shared in chain.summed for layer, _ in shared.copies)
    if not is_tied or layer_type.role is LayerRole.BLOCK or tied_params(layer_type, chosen[0], config):
        return np.zeros(len(chosen), dtype=np.int64)
    width = [-(-chain.hidden_size // (SLICES_PER_RANK * each.tensor_degree)) for each in chosen]
    return _SLICES_HELD * config.job.effects.weight_bytes * chain.vocab_size * np.array(width, dtype=np.int64)


def _own_rows(row: LayerRow, config: JobConfig) -> IntTable:
    """Return the rows of `_rows` for a framework with its own buffers.

    Gradients that are accumulated late, and temporaries of the optimizer step, count only beyond the layer's saved
    bytes.
    """
    execution, job, layer_type, chosen = config.job.execution, config.job, row.layer_type, row.chosen
    saved, _, _, forward, backward, read, _ = row.work(config)
    key = "own states", layer_type.name, config.is_piped, chosen
    states = job.once(key, lambda: np.array([_own_states(layer_type, each, config) for each in chosen]).T)
    trained, parameters, gradients, optimizer, stepping = states
    freed = gradients * (execution.frees_gradients and not config.has_several)
    late = np.maximum(0, job.compute_bytes * trained * execution.accumulates_late + freed - saved)
    step = np.maximum(0, freed + stepping - saved - late)
    working = np.maximum.reduce([forward, backward, np.zeros_like(saved)])
    sample_degree, _, sequence_degree = row.numbers
    share = config.microbatch_samples // (sample_degree * sequence_degree)
    sent = share * _entries(layer_type, config)[1] * job.compute_bytes * execution.kept_transfers
    found = [parameters, gradients - freed + late, optimizer, step, read, 0, saved, 0, *[working] * 3, 0, 0, sent, 0]
    return np.stack(np.broadcast_arrays(*found)).astype(np.int64)


def _own_states(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> tuple[int, ...]:
    """Return the number of trained parameters that a rank keeps, and bytes of its parameters, gradients, optimizer
    states, and temporaries of the optimizer step."""
    execution, job = config.job.execution, config.job
    layer = own_params(layer_type, layer_profile(layer_type, strategy, config), strategy, config)
    assert execution.states is not None, "no other keeps buffers of its own"
    trained, states, shards = layer.trained, execution.states, execution.shard_degree
    kept = states.kept_bytes(
        trained.num_params, strategy, shards, expert_params=trained.expert_params, effects=job.effects
    )
    frozen = states.of_frozen.kept_bytes(
        layer.frozen_params, strategy, shards, expert_params=layer.frozen_expert_params
    )
    parameters = kept["parameters"] + frozen["parameters"] + layer.buffer_bytes * job.chain.has_adapters
    if layer_type.role is LayerRole.BLOCK and layer_precision(job.precision) != job.precision:
        parameters += execution.low_copies * held_params(layer.trained, strategy)
    return (
        kept["parameters"] // states.parameters,
        parameters,
        kept["gradients"],
        kept["optimizer"] + job.effects.layer_state_bytes * (trained.num_params > 0),
        execution.step_bytes(kept["parameters"], strategy.data_degree),
    )


def memory_tables(config: JobConfig, strategies: Sequence[Strategy], rows: LayerRows) -> dict[str, Any]:
    """Return the fields of `CostTables` for bytes of layers that are not the last of a stage."""
    pipeline, has_several = config.pipeline, config.pipeline.num_microbatches > 1
    count, flights = pipeline.num_microbatches, list(map(pipeline.in_flight, range(pipeline.num_stages)))
    static, saved = rows.terms[:6].sum(axis=0), rows.terms[6]
    is_short = has_several and count in flights and pipeline.num_chunks == 1
    found: dict[str, Any] = {
        "static_bytes": static,
        "activation_bytes": saved,
        "transient_bytes": np.maximum(rows.works, rows.first_reduction) if is_short else rows.works,
        "overhead_bytes": 0,
    }
    if not config.job.execution.keeps_own_buffers:
        paused = (pipeline.num_chunks - 1) * rows.left + (rows.gathered if pipeline.num_chunks > 1 else 0)
        is_first = np.array([[each.role is LayerRole.EMBEDDING] for each in config.job.chain.layer_types])
        buffers = is_first * rows.ahead, ~is_first * rows.ahead, rows.left + paused
        found |= {"freed_bytes": rows.freed, "buffers": np.stack(buffers), "repeats": has_several}
        found |= {"stage_bytes": {count: -np.minimum(saved, rows.terms[1])} if is_short else {}}
    return found


def _waiting_bytes(tables: CostTables, config: JobConfig) -> IntTable:
    """Bytes [K, S] per microbatch that a block holds until its weight pass: operands and results of linear layers."""
    found = np.zeros(tables.legal.shape, dtype=np.int64)
    for row, layer_type in enumerate(config.job.chain.layer_types):
        for column in np.flatnonzero(tables.legal[row]) if layer_type.role is LayerRole.BLOCK else ():
            strategy = tables.strategies[column]
            layer = layer_profile(layer_type, strategy, config)
            line = layer.forward.matmul_bytes + layer.attention_bytes * -1
            found[row, column] = line.per_sample * rank_samples(strategy, config.microbatch_samples)
    return found


def _with_weight_passes(found: dict[str, Any], tables: CostTables, config: JobConfig) -> dict[str, Any]:
    """Return the fields of `memory_tables` under a schedule with weight passes."""
    pipeline, waits = config.pipeline, _waiting_bytes(tables, config)
    if config.job.execution.splits_whole:
        waits = np.where(waits, waits + found["activation_bytes"], 0)
    stage_bytes: dict[int, IntTable] = {}
    for stage in range(pipeline.num_stages):
        in_flight, waiting = pipeline.in_flight(stage), pipeline.waiting(stage)
        # these wait at the moment of the most passes in flight, the others in place of passes in flight
        beside = pipeline.schedule.unfinished(pipeline, stage) - in_flight
        replaced = beside * waits + (waiting - beside) * np.maximum(waits - found["activation_bytes"], 0)
        stage_bytes[in_flight] = np.maximum(replaced, stage_bytes.get(in_flight, 0))
    return found | {
        "stage_bytes": stage_bytes,
        "freed_bytes": found["freed_bytes"] - waits,
    }


def with_memory(tables: CostTables, config: JobConfig, rows: LayerRows) -> CostTables:
    """Add the bytes of layers and stages to the tables of a pipeline configuration without chunks."""
    has_own = config.job.execution.keeps_own_buffers
    found = memory_tables(config, tables.strategies, rows)
    if config.pipeline.schedule.splits_backward:
        found = _with_weight_passes(found, tables, config)
    static, saved, works = (found[f"{name}_bytes"] for name in ("static", "activation", "transient"))
    head, is_alone = tables.layers[-1], tables.layers.count(tables.layers[-1]) == 1
    copies = np.array([each.hidden.copies for each in _of_layouts(tables)])[tables.layout_of]
    beside = (copies - 1) * exchanged_bytes(config)
    works, ends = works + beside, rows.ends + beside
    once, each = _times_sent(config)
    last_static, last_saved = static + once * rows.sent, saved + each * rows.sent
    if is_alone:
        works[head] = ends[head]
    limits = (np.minimum(table, MOST_BYTES) for table in (static, saved, works))
    own = dict(zip(("static_bytes", "activation_bytes", "transient_bytes"), limits, strict=True))
    overheads = _overheads(config)
    whole = replace(
        tables,
        **(dict(found) | own | {"overhead_bytes": min(overheads), "stage_overheads": overheads}),
        received=None if has_own or config.pipeline.num_chunks > 1 else _received(config, tables),
    )
    if has_own and not rows.sent.any():
        return whole
    return whole.with_last_types(
        apart={head} if is_alone else (),
        static_bytes=np.minimum(last_static, MOST_BYTES),
        activation_bytes=np.minimum(last_saved, MOST_BYTES),
        transient_bytes=np.minimum(ends, MOST_BYTES),
    )


def _times_sent(config: JobConfig) -> tuple[int, int]:
    """Return the number of buffers of a stage's sent activation: fixed, and per microbatch in flight.

    Received gradients have buffers of the same size. `exchanged_bytes` counts those between chunks.
    """
    pipeline, execution = config.pipeline, config.job.execution
    if pipeline.num_stages == 1 or pipeline.num_chunks > 1:
        return 0, 0
    if execution.keeps_own_buffers:
        return 0, 1
    if not execution.buffers_every_microbatch:
        return 1, 1
    count = pipeline.num_microbatches
    return (2 * count, 0) if pipeline.schedule.keeps_sends else (count, 1)


def _of_layouts(tables: CostTables) -> list[Strategy]:
    """Return a strategy of each layout [D]."""
    return [tables.strategies[first] for first in np.unique(tables.layout_of, return_index=True)[1]]


def _received(config: JobConfig, tables: CostTables) -> Received:
    """Return the buffers of stages for the stage before: the last sent gradient and activations that arrived early."""
    pipeline, job = config.pipeline, config.job
    strategies = _of_layouts(tables)
    count, chain = pipeline.num_microbatches, job.chain
    entries = max((chain.num_flowing(place, job.seq_len) for place in range(chain.num_layers - 1)), default=0)
    hidden = [
        config.microbatch_samples // each.sample_degree * entries * job.compute_bytes // each.sequence_degree
        for each in strategies
    ]
    places = {each: number for number, each in enumerate(dict.fromkeys(each.hidden for each in strategies))}
    kept = [int(count > 1)] * pipeline.num_stages
    if job.execution.buffers_every_microbatch:
        sent = count if pipeline.schedule.keeps_sends else int(count > 1)
        kept = [count - pipeline.in_flight(stage) + sent for stage in range(pipeline.num_stages)]
    return Received(
        hidden_bytes=np.array(hidden, dtype=np.int64),
        layouts=np.array([places[each.hidden] for each in strategies], dtype=np.int64),
        kept=tuple(kept),
        is_apart=np.zeros((len(strategies), len(strategies)), dtype=bool),
    )


def _overheads(config: JobConfig) -> tuple[int, ...]:
    """Bytes [P] per device that no layer accounts for: CUDA context, buckets of gradients, shared inputs, and
    exchanges between chunks."""
    pipeline, job = config.pipeline, config.job
    key = "side", config.microbatch_samples
    has_own = job.execution.keeps_own_buffers
    side = 0 if has_own else job.once(key, lambda: side_bytes(set(job.chain.layer_types), config))
    exchanged = 0 if has_own else exchanged_bytes(config)
    alone = counted_context_bytes(config) + _bucket_bytes(config) + exchanged
    return tuple(min(alone + pipeline.in_flight(stage) * side, MOST_BYTES) for stage in range(pipeline.num_stages))


def _bucket_bytes(config: JobConfig) -> int:
    """Bytes of an engine's buckets of gradients, which only a stage of several devices has."""
    return config.job.execution.bucket_bytes * (config.devices_per_stage > 1)


def exchanged_bytes(config: JobConfig) -> int:
    """Bytes per rank of buffers that stages with several chunks exchange, in addition to what layers save."""
    pipeline, share = config.pipeline, config.activation_bytes // config.devices_per_stage
    count, chunks = pipeline.num_microbatches, pipeline.num_chunks
    if chunks == 1:
        return 0
    if config.job.execution.buffers_every_microbatch:
        return 4 * chunks * count * share
    stages = range(pipeline.num_stages)
    ahead = max(sum(pipeline.schedule.received_ahead(pipeline, stage)) for stage in stages)
    return (max(map(pipeline.in_flight, stages)) + 1 + 2 * chunks + ahead) * share


def plan_memory(
    parts: Sequence[range], strategies: Sequence[Strategy], configs: Sequence[JobConfig]
) -> list[dict[str, int]]:
    """Bytes on a rank of each stage by term; their sum is what the search compares with the budget.

    ``parts``: layers of each part of the pipeline; ``strategies``: one per layer; ``configs``: one per stage.
    """
    chain, chosen = configs[0].job.chain, dict[JobConfig, dict[tuple[int, Strategy], None]]()
    for stage, config in enumerate(configs):
        for part in _on_stage(parts, stage, config):
            chosen.setdefault(config, {}).update(((chain.layers[layer], strategies[layer]), None) for layer in part)
    made = {config: _of_pairs(config, list(pairs)) for config, pairs in chosen.items()}
    found = []
    for stage, config in enumerate(configs):
        mine = _on_stage(parts, stage, config)
        before = strategies[mine[0][0] - 1] if stage and configs[stage - 1] is config else None
        found.append(_stage_terms(*made[config], stage, mine, strategies, config, before))
    return found


def host_bytes(parts: Sequence[range], strategies: Sequence[Strategy], configs: Sequence[JobConfig]) -> list[int]:
    """Bytes in host memory for a rank of each stage; arguments as of `plan_memory`."""
    if not configs[0].job.effects.uses_host:
        return [0] * len(configs)
    found = []
    for stage, config in enumerate(configs):
        mine = _on_stage(parts, stage, config)
        of_parts = [sum(_on_host(layer, strategies[layer], config) for layer in part) for part in mine]
        states, saved = np.stack(of_parts).T
        found.append(int(states.sum()) + config.pipeline.passes(stage).in_flight(saved.tolist()))
    return found


def _on_stage(parts: Sequence[range], stage: int, config: JobConfig) -> list[range]:
    return [parts[part] for part in config.pipeline.parts_of(stage)]


def _on_host(layer: int, strategy: Strategy, config: JobConfig) -> NDArray[np.int64]:
    """Bytes [2] of a layer in host memory: its states, and what it saves there per microbatch."""
    layer_type = config.job.chain.type_of(layer)
    saved = LayerRow.of(layer_type, (strategy,), config).work(config).on_host
    return np.array([layer_states(layer_type, strategy, config).host, int(saved[0])])


def _of_pairs(config: JobConfig, pairs: Sequence[tuple[int, Strategy]]) -> tuple[CostTables, CostTables, LayerRows]:
    """Build tables without times for pairs of layer type and strategy.

    Return them with and without communicators, and their rows.
    """
    used = tuple(dict.fromkeys(strategy for _, strategy in pairs))
    chain, count = config.job.chain, len(used)
    legal = np.zeros((len(chain.layer_types), count), dtype=bool)
    for layer_type, strategy in pairs:
        legal[layer_type, used.index(strategy)] = True
    nothing, rows = np.zeros(legal.shape, dtype=np.int64), layer_rows(config, used, legal)
    pipeline = config.pipeline
    tables = CostTables(
        pipeline=replace(pipeline, num_chunks=1, schedule=USUAL) if pipeline.num_chunks > 1 else pipeline,
        layer_types=tuple(layer_type.name for layer_type in chain.layer_types),
        layers=chain.layers,
        strategies=used,
        legal=legal,
        time_s=np.zeros(legal.shape),
        static_bytes=nothing,
        activation_bytes=nothing,
        transient_bytes=nothing,
        switch_s=np.zeros((len(legal), count, count)),
        transfer_s=0.0,
        overhead_bytes=0,
    )
    counted = rows.counted(config.job)
    return with_memory(tables, config, counted), with_memory(tables, config, counted.of_tensors), rows


def _stage_terms(
    tables: CostTables,
    of_tensors: CostTables,
    rows: LayerRows,
    stage: int,
    parts: Sequence[range],
    strategies: Sequence[Strategy],
    config: JobConfig,
    before: Strategy | None,
) -> dict[str, int]:
    """Bytes of a stage by term; ``before`` is the strategy of the previous layer if it is in the same device group."""
    pipeline, chain = config.pipeline, config.job.chain
    in_flight, place = pipeline.in_flight(stage), {each: number for number, each in enumerate(tables.strategies)}
    layers = [layer for part in parts for layer in part]
    layer_types, columns = [chain.layers[layer] for layer in layers], [place[strategies[layer]] for layer in layers]
    held = rows.terms[:, layer_types, columns].sum(axis=1)
    terms = dict(zip(TERMS, held.tolist(), strict=True))
    samples = terms.pop("samples")
    if pipeline.num_chunks == 1 and in_flight in tables.stage_bytes:
        terms["gradients"] += int(tables.stage_bytes[in_flight][layer_types, columns].sum())
    runs = _runs(parts, chain.num_layers) if pipeline.num_chunks > 1 else list(parts)
    chosen = [[place[strategies[layer]] for layer in run] for run in runs]
    most, working = (
        max(int(each.transient_of(each.run_types(run), own, in_flight)) for run, own in zip(runs, chosen, strict=True))
        for each in (tables, of_tensors)
    )
    buffers = 0 if config.job.execution.keeps_own_buffers else exchanged_bytes(config)
    read = tables.overhead_of(stage) - counted_context_bytes(config) - _bucket_bytes(config) - buffers
    terms["gradients"] += _bucket_bytes(config)
    terms["activations"] = _activations(tables, parts, strategies, config, stage, place) + read
    last = layers[-1]
    if last < chain.num_layers - 1:
        once, each = _times_sent(config)
        buffers += (once + each * in_flight) * int(rows.sent[layer_types[-1], columns[-1]])
    if stage and tables.received is not None:
        first = columns[0]
        if before is None:
            buffers += int(tables.received.hidden_bytes[first]) * (tables.received.kept[stage] + in_flight)
        else:
            buffers += int(tables.received.num_bytes(stage, in_flight)[place[before], first])
    communicators = int((1 + apart_slack(config.job)) * (most - working))  # the tables have them as `counted_bytes`
    context = context_bytes(config) + communicators
    return terms | {"working set": working + samples, "pipeline buffers": buffers, "context": context}


def _runs(parts: Sequence[range], num_layers: int) -> list[list[int]]:
    """Return the layers of each chunk, with the first and the last layer of the model if the stage has them."""
    ends = {0, num_layers - 1}
    mine = {layer for part in parts for layer in part} & ends
    runs = [[layer for layer in part if layer not in ends] for part in parts]
    first, last = ([0] if 0 in mine else []), ([num_layers - 1] if num_layers - 1 in mine else [])
    return [[*first, *run, *last] for run in runs]


def _activations(
    tables: CostTables,
    parts: Sequence[range],
    strategies: Sequence[Strategy],
    config: JobConfig,
    stage: int,
    place: Mapping[Strategy, int],
) -> int:
    """Bytes saved by a stage for its passes in flight."""
    pipeline = config.pipeline
    in_flight = pipeline.in_flight(stage)

    def saved(layer: int, table: IntTable = tables.activation_bytes) -> int:
        return int(table[tables.layers[layer], place[strategies[layer]]])

    if pipeline.num_chunks == 1:
        return in_flight * sum(saved(layer) for part in parts for layer in part)
    found = pipeline.passes(stage).in_flight([sum(map(saved, part)) for part in parts])
    if (waiting := tables.stage_bytes.get(in_flight)) is not None:
        found += max(sum(saved(layer, waiting) for layer in part) for part in parts)
    return found
