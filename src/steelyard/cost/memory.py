r"""What a rank of a stage holds at most: the one definition, by which the search chooses and a plan is predicted.

A stage is fullest as it begins to work backwards with most microbatches in flight, $n$ with that of the pass. As layer
$l$ of its layers $1..L$ works, those behind it have freed what they saved and dropped, and left their gradients:

$$M = o + \sum_{j=1}^L h_j + \max_l \Big(u_l + a_{l-1} + r_{l+1} - \sum_{j>l} f_j\Big), \qquad
h = p + s + g + c + n b, \quad f = b + c'$$

FSDP gathers the sharded layer that works next, $a$, and holds the buffer of the last reduction until the next one,
$r$: the last layer, which works first, that of the first layer, which the backward pass before reduced last, or its
own where no other has one. Where parts are frozen no layer may reduce behind an embedding, and all that it reduced is
there.

So that layers can be chosen one by one, all count the most of $a_1..a_{L-1}$ and of $r_1..r_L$, the last layer that of
$r_1..r_{L-1}$ or $r_L$, and none with one microbatch; the copy of an embedding counts for the layer behind it alone.
Where neighbours are alike, as most are, this is exact, and else from above.

| symbol    | bytes of a rank | what                                                                          |
|-----------|-----------------|-------------------------------------------------------------------------------|
| $p, s, g$ | `LayerStates`   | parameters, optimizer states and samples; gradients that are kept             |
| $c$       | `LayerStates`   | the copy that computes, of layers that keep one; $c'$ of sharded ones alone   |
| $b$       | traced          | saved by one microbatch                                                       |
| $u$       | `_rows`         | the most of forward, backward and reduction, with the copy and new gradients  |
| $a$       | `_rows`         | the copy of a sharded layer that is gathered ahead, none where it keeps one   |
| $r$       | `_rows`         | the buffer that a sharded layer's gradients are reduced from                  |
| $o$       | `_overheads`    | the process, side inputs of microbatches in flight, activations that arrived  |

Before its first backward pass a stage has no gradients. With one microbatch $h$ has none and $f$ is less by them; a
stage that holds all microbatches in flight has of a layer either those or what the last one saved, and $f$ is what the
latter is more. The last layer of a stage has rows of its own with what it sends. A stage of several chunks holds what
its passes in flight saved, the states of all chunks, and a buffer for each that pauses.

A framework with states of its own (`Execution.keeps_own_buffers`) frees nothing earlier and leaves no buffers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.execution import StateBytes
from steelyard.cost.inputs import side_bytes
from steelyard.cost.layer_load import layer_profile
from steelyard.cost.layer_memory import LayerStates
from steelyard.cost.layer_row import LayerRow
from steelyard.cost.setting import MASTER_BYTES, Setting
from steelyard.cost.tables import CostTables, Received
from steelyard.limits import MOST_BYTES
from steelyard.model.chain import LayerKind, LayerRole
from steelyard.plan.shared import SLICES_PER_RANK
from steelyard.plan.strategy import Remat, Strategy
from steelyard.schedules import USUAL
from steelyard.units import MIB

IntTable = NDArray[np.int64]
TERMS = ("parameters", "gradients", "optimizer", "samples", "gathered parameters", "activations")
"""What layers hold, by the order of `LayerRows.terms`."""

CUDA_CONTEXT_BYTES = 1024 * MIB
"""Context and libraries of a GPU process and its NCCL buffers: 0.5 to 1 GiB on current drivers."""
PIPELINE_CHANNEL_BYTES = 1024 * MIB
"""Buffers of the NCCL channels to the stages before and behind: about 0.5 GiB for each neighbour."""
_SLICES_HELD = 3
"""The sum, what is added to it, and the same in the order of the rows where a matrix is divided twice."""
_NEVER = -(2**12) * MOST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank: what it holds by term, of each microbatch in flight, and what it works with."""

    static_bytes: dict[str, int]
    activation_bytes: int
    transient_bytes: int


def layer_bytes(kind: LayerKind, strategy: Strategy, setting: Setting) -> LayerBytes:
    """Those of a layer of this kind under a legal strategy."""
    kinds = setting.job.chain.kinds
    legal = np.array([[each == kind] for each in kinds])
    rows = layer_rows(setting, (strategy,), legal)
    *static, saved = rows.terms[:, kinds.index(kind), 0].tolist()
    held = {name: num_bytes for name, num_bytes in zip(TERMS, static, strict=False) if num_bytes}
    return LayerBytes(static_bytes=held, activation_bytes=saved, transient_bytes=int(rows.works[kinds.index(kind), 0]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRows:
    """Bytes [K, S] of every kind of layer under every strategy, 0 where illegal, for a number of microbatches."""

    terms: IntTable
    """[6, K, S] what a layer holds by `TERMS`, activations those of one microbatch"""
    freed: IntTable
    works: IntTable
    ends: IntTable
    """What it works with where it is the last of a stage."""
    first_reduction: IntTable
    """The most of ``works`` in the first of several backward passes."""
    ahead: IntTable
    left: IntTable
    sent: IntTable
    """What it hands to another stage, of one microbatch."""
    gathered: IntTable
    """The whole copy of a sharded layer, which a chunk of several has as it pauses."""


def layer_rows(setting: Setting, strategies: Sequence[Strategy], legal: NDArray[np.bool_]) -> LayerRows:
    """Those of a pipeline setting, which depend on its schedule in nothing."""
    kinds, found = setting.job.chain.kinds, np.zeros((14, *legal.shape), dtype=np.int64)
    for row, kind in enumerate(kinds):
        columns = np.flatnonzero(legal[row])
        if len(columns):
            chosen = [strategies[column] for column in columns.tolist()]
            price = _own_rows if setting.job.execution.keeps_own_buffers else _rows
            found[:, row, columns] = price(kind, chosen, setting)
    found = np.clip(found, _NEVER, MOST_BYTES)
    names = ("freed", "works", "ends", "first_reduction", "ahead", "left", "sent", "gathered")
    return LayerRows(terms=found[:6], **dict(zip(names, found[6:], strict=True)))


def _rows(kind: LayerKind, chosen: Sequence[Strategy], setting: Setting) -> IntTable:
    """[14, S] the fields of `LayerRows`."""
    job, row = setting.job, LayerRow.of(kind, chosen, setting)
    saved, entered, reducing, forward, backward, read = row.work(setting)
    states = np.array([job.once(each, "states", partial(_numbers, each)) for each in row.states]).T
    shard, gradients, optimizer, copy, keeps, shards, made, reduced, first, later, trains, drops, moves = states
    is_sharded, one = shards > 1, setting.pipeline.num_microbatches == 1
    kept, own, gathered = keeps * copy, (1 - keeps) * copy, is_sharded * copy
    is_awaited = job.chain.freeze is not None and kind.role is LayerRole.EMBEDDING
    left = is_sharded * (reduced + trains * (made + copy) * is_awaited)
    freed = saved + np.where(is_sharded | one, kept, 0) - (gradients if one else 0)
    before = 0 if kind.role is LayerRole.EMBEDDING else np.maximum(0, copy - forward)
    forward = forward + own + np.where(is_sharded, copy + before, 0)
    waiting, flowing, handed = _entries(kind, setting)
    sample_degree, _, sequence_degree = row.numbers
    share = setting.microbatch_samples // sample_degree * job.compute_bytes
    backward = backward + share * waiting // sequence_degree
    copies = np.array([1 if each.remat is Remat.FULL else 2 for each in chosen])
    sending = np.maximum(0, backward - copies * (share * handed // sequence_degree))
    beside = np.where(moves, made + own, _NEVER)
    rest = entered + reducing - drops * np.maximum(0, saved - entered) - is_sharded * kept
    reduction, reduction_first = (np.where(trains, rest + each, _NEVER) for each in (first if one else later, first))
    tied = np.array([_tied_bytes(kind, each, setting) for each in chosen])
    tied = np.where(tied > 0, tied + np.maximum(0, -freed) - kept, _NEVER)
    inner = np.maximum.reduce([forward, backward + beside, tied])
    ends = np.maximum.reduce([forward, sending + beside, reduction, tied])
    found = [shard, gradients, optimizer, read, kept, saved, freed]
    found += [np.maximum(inner, reduction - left), ends, np.maximum(inner, reduction_first - left)]
    found += [(1 - keeps) * gathered, left, share * flowing // sequence_degree, gathered]
    return np.stack(np.broadcast_arrays(*found)).astype(np.int64)


def _numbers(states: LayerStates) -> tuple[int, ...]:
    first, later = (states.reduced_states(is_first=each) for each in (True, False))
    optimizer, moves = states.states - states.shard, states.has_backward
    held = states.shard, states.kept_gradients, optimizer, states.copy, states.keeps_copy, states.shards
    return (
        *held,
        states.made_gradients,
        states.reduced,
        first,
        later,
        states.params > 0 and moves,
        states.frees_saved,
        moves,
    )


def _entries(kind: LayerKind, setting: Setting) -> tuple[int, int, int]:
    """Of a sample: what waits as a layer of a kind works backwards for those behind it, what flows out of one to
    another stage, and what it makes of that; the most of all its layers, of what it makes the least.
    """
    chain, seq_len = setting.job.chain, setting.job.seq_len

    def of_kind() -> tuple[int, int, int]:
        places = [place for place in range(chain.num_layers) if chain.kind_of(place) == kind]
        inner = [place for place in places if place < chain.num_layers - 1]
        waiting = max(_most_waiting(chain.num_read_behind, place, chain.num_layers, seq_len) for place in places)
        flows = max((chain.num_flowing(place, seq_len) for place in inner), default=0)
        return waiting, flows, min((chain.num_made(place, seq_len) for place in inner), default=0)

    waiting, flowing, handed = setting.job.once(chain, ("entries", kind.name), of_kind)
    return (waiting, flowing, handed) if setting.is_piped else (waiting, 0, 0)


def _most_waiting(
    read_behind: Callable[[Sequence[int], int], Iterable[tuple[int, int]]], place: int, count: int, seq_len: int
) -> int:
    spans = [range(first, end) for first in {0, place} for end in range(place + 1, count + 1)]
    return max((num for span in spans for at, num in read_behind(span, seq_len) if span[at] == place), default=0)


def _tied_bytes(kind: LayerKind, strategy: Strategy, setting: Setting) -> int:
    """What a rank needs to sum the gradients of the vocabulary's matrix where its copies are divided in other ways.

    When the backward passes have ended, and with them the copies that compute.
    """
    chain = setting.job.chain
    is_tied = any(chain.kind_of(layer) == kind for shared in chain.summed for layer, _ in shared.copies)
    if not is_tied or kind.role is LayerRole.BLOCK:
        return 0
    width = -(-chain.hidden_size // (SLICES_PER_RANK * strategy.tensor_degree))
    return _SLICES_HELD * MASTER_BYTES * chain.vocab_size * width


def _own_rows(kind: LayerKind, chosen: Sequence[Strategy], setting: Setting) -> IntTable:
    """The same for a framework with states of its own.

    Gradients that it adds up late, and what the optimizer's step takes, count as far as the layer saves less.
    """
    execution, job = setting.job.execution, setting.job
    assert isinstance(execution.states, StateBytes), "no other keeps buffers of its own"
    saved, _, _, forward, backward, read = LayerRow.of(kind, chosen, setting).work(setting)
    found = np.zeros((14, len(chosen)), dtype=np.int64)
    for place, strategy in enumerate(chosen):
        layer = layer_profile(kind, strategy, setting)
        kept = execution.states.kept_bytes(
            layer.num_params, strategy, execution.shard_degree, expert_params=layer.expert_params
        )
        late = (
            kept["parameters"] * job.compute_bytes // execution.states.parameters if execution.accumulates_late else 0
        )
        more = max(late, execution.step_bytes(kept["parameters"], strategy.data_degree)) - int(saved[place])
        found[:3, place] = kept["parameters"], kept["gradients"] + max(0, more), kept["optimizer"]
        bucket = execution.bucket_bytes if strategy.data_degree > 1 else 0
        share = setting.microbatch_samples // (strategy.sample_degree * strategy.sequence_degree)
        found[12, place] = share * _entries(kind, setting)[1] * job.compute_bytes * execution.kept_transfers
        found[7:10, place] = max(int(forward[place]), int(backward[place]), 0) + bucket
    found[3], found[5] = read, saved
    return found


def memory_tables(setting: Setting, strategies: Sequence[Strategy], rows: LayerRows) -> dict[str, Any]:
    """The fields of `CostTables` by which it has the bytes of layers that are not the last of a stage."""
    pipeline, has_several = setting.pipeline, setting.pipeline.num_microbatches > 1
    count, flights = pipeline.num_microbatches, list(map(pipeline.in_flight, range(pipeline.num_stages)))
    static, saved = rows.terms[:5].sum(axis=0), rows.terms[5]
    if not has_several:
        static = static - rows.terms[1]
    is_short = has_several and count in flights and pipeline.num_chunks == 1
    found: dict[str, Any] = {
        "static_bytes": static,
        "activation_bytes": saved,
        "transient_bytes": np.maximum(rows.works, rows.first_reduction) if is_short else rows.works,
        "overhead_bytes": 0,
    }
    if not setting.job.execution.keeps_own_buffers:
        paused = (pipeline.num_chunks - 1) * rows.left + (rows.gathered if pipeline.num_chunks > 1 else 0)
        is_first = np.array([[each.role is LayerRole.EMBEDDING] for each in setting.job.chain.kinds])
        buffers = is_first * rows.ahead, ~is_first * rows.ahead, rows.left + paused
        found |= {"freed_bytes": rows.freed, "buffers": np.stack(buffers), "repeats": has_several}
        found |= {"stage_bytes": {count: -np.minimum(saved, rows.terms[1])} if is_short else {}}
    return found


def with_memory(tables: CostTables, setting: Setting, rows: LayerRows) -> CostTables:
    """Tables of a pipeline setting without chunks with the bytes of its layers, and those of its stages."""
    has_own = setting.job.execution.keeps_own_buffers
    found = memory_tables(setting, tables.strategies, rows)
    static, saved, works = (found[f"{name}_bytes"] for name in ("static", "activation", "transient"))
    head, is_alone = tables.layers[-1], tables.layers.count(tables.layers[-1]) == 1
    copies = np.array([each.hidden.copies for each in tables.strategies])
    beside = (copies - 1) * exchanged_bytes(setting)
    works, ends = works + beside, rows.ends + beside
    once, each = _times_sent(setting)
    last_static, last_saved = static + once * rows.sent, saved + each * rows.sent
    if is_alone:
        works[head] = ends[head]
    limits = (np.minimum(table, MOST_BYTES) for table in (static, saved, works))
    own = dict(zip(("static_bytes", "activation_bytes", "transient_bytes"), limits, strict=True))
    overheads = _overheads(setting)
    whole = replace(
        tables,
        **(dict(found) | own | {"overhead_bytes": min(overheads), "stage_overheads": overheads}),
        received=None if has_own or setting.pipeline.num_chunks > 1 else _received(setting, tables.strategies),
    )
    if has_own and not rows.sent.any():
        return whole
    return whole.with_last_kinds(
        apart={head} if is_alone else (),
        static_bytes=np.minimum(last_static, MOST_BYTES),
        activation_bytes=np.minimum(last_saved, MOST_BYTES),
        transient_bytes=np.minimum(ends, MOST_BYTES),
    )


def _times_sent(setting: Setting) -> tuple[int, int]:
    """How often a stage holds what its last layer sends, once and for each microbatch in flight.

    The gradient of a pass arrives in as much. Between chunks `_exchanged` counts it.
    """
    pipeline, execution = setting.pipeline, setting.job.execution
    if pipeline.num_stages == 1 or pipeline.num_chunks > 1:
        return 0, 0
    if execution.keeps_own_buffers:
        return 0, 1
    if not execution.buffers_every_microbatch:
        return 1, 1
    count = pipeline.num_microbatches
    return (2 * count, 0) if pipeline.schedule.keeps_sends else (count, 1)


def _received(setting: Setting, strategies: Sequence[Strategy]) -> Received:
    """What stages hold of those before: the last gradient that was sent, and what has arrived ahead."""
    pipeline, job = setting.pipeline, setting.job
    count, chain = pipeline.num_microbatches, job.chain
    entries = max((chain.num_flowing(place, job.seq_len) for place in range(chain.num_layers - 1)), default=0)
    hidden = [
        setting.microbatch_samples // each.sample_degree * entries * job.compute_bytes // each.sequence_degree
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


def _overheads(setting: Setting) -> tuple[int, ...]:
    """[P] bytes of a device that no layer accounts for: the process, side inputs, and what chunks exchange."""
    pipeline, job = setting.pipeline, setting.job
    key = "side", setting.microbatch_samples
    has_own = job.execution.keeps_own_buffers
    side = 0 if has_own else job.once(job.chain, key, lambda: side_bytes(set(job.chain.kinds), setting))
    exchanged = 0 if has_own else exchanged_bytes(setting)
    flights = map(pipeline.in_flight, range(pipeline.num_stages))
    return tuple(min(context_bytes(setting) + each * side + exchanged, MOST_BYTES) for each in flights)


def context_bytes(setting: Setting) -> int:
    """Bytes of the process and its communicators on a GPU; a CPU has none of its own."""
    if not setting.job.cluster.device.is_gpu:
        return 0
    return CUDA_CONTEXT_BYTES + (PIPELINE_CHANNEL_BYTES if setting.pipeline.num_stages > 1 else 0)


def exchanged_bytes(setting: Setting) -> int:
    """What stages of several chunks exchange beside what layers save, divided over all ranks of a stage."""
    pipeline, share = setting.pipeline, setting.activation_bytes // setting.devices_per_stage
    count, chunks = pipeline.num_microbatches, pipeline.num_chunks
    if chunks == 1:
        return 0
    if setting.job.execution.buffers_every_microbatch:
        return 4 * chunks * count * share
    stages = range(pipeline.num_stages)
    ahead = max(sum(pipeline.schedule.received_ahead(pipeline, stage)) for stage in stages)
    return (max(map(pipeline.in_flight, stages)) + 1 + 2 * chunks + ahead) * share


def plan_memory(
    parts: Sequence[range], strategies: Sequence[Strategy], settings: Sequence[Setting]
) -> list[dict[str, int]]:
    """Bytes on a rank of each stage by term; they add up to what the search holds against the budget.

    ``parts`` are the layers of each part of the pipeline, ``strategies`` those of all layers, ``settings`` one a stage.
    """
    chain, chosen = settings[0].job.chain, dict[int, dict[tuple[int, Strategy], None]]()
    for stage, setting in enumerate(settings):
        for part in parts[stage :: len(settings)]:
            chosen.setdefault(id(setting), {}).update(
                ((chain.layers[layer], strategies[layer]), None) for layer in part
            )
    made = {id(setting): _of_pairs(setting, list(chosen[id(setting)])) for setting in settings}
    found = []
    for stage, setting in enumerate(settings):
        mine = parts[stage :: len(settings)]
        before = strategies[mine[0][0] - 1] if stage and settings[stage - 1] is setting else None
        found.append(_stage_terms(*made[id(setting)], stage, mine, strategies, setting, before))
    return found


def _of_pairs(setting: Setting, pairs: Sequence[tuple[int, Strategy]]) -> tuple[CostTables, LayerRows]:
    """Tables in which these kinds have these strategies, and no times."""
    used = tuple(dict.fromkeys(strategy for _, strategy in pairs))
    chain, count = setting.job.chain, len(used)
    legal = np.zeros((len(chain.kinds), count), dtype=bool)
    for kind, strategy in pairs:
        legal[kind, used.index(strategy)] = True
    nothing, rows = np.zeros(legal.shape, dtype=np.int64), layer_rows(setting, used, legal)
    pipeline = setting.pipeline
    tables = CostTables(
        pipeline=replace(pipeline, num_chunks=1, schedule=USUAL) if pipeline.num_chunks > 1 else pipeline,
        kinds=tuple(kind.name for kind in chain.kinds),
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
    return with_memory(tables, setting, rows), rows


def _stage_terms(
    tables: CostTables,
    rows: LayerRows,
    stage: int,
    parts: Sequence[range],
    strategies: Sequence[Strategy],
    setting: Setting,
    before: Strategy | None,
) -> dict[str, int]:
    """Bytes of tensors of a stage by term; ``before`` is the strategy of the layer before it in its own pool."""
    pipeline, chain = setting.pipeline, setting.job.chain
    in_flight, place = pipeline.in_flight(stage), {each: number for number, each in enumerate(tables.strategies)}
    layers = [layer for part in parts for layer in part]
    kinds, columns = [chain.layers[layer] for layer in layers], [place[strategies[layer]] for layer in layers]
    held = rows.terms[:, kinds, columns].sum(axis=1)
    terms = dict(zip(TERMS, held.tolist(), strict=True))
    samples = terms.pop("samples")
    spared = tables.stage_bytes.get(in_flight, np.zeros_like(tables.static_bytes))[kinds, columns].sum()
    terms["gradients"] = int(terms["gradients"] + spared) if pipeline.num_microbatches > 1 else 0
    runs = _runs(parts, chain.num_layers) if pipeline.num_chunks > 1 else list(parts)
    working = 0
    for run in runs:
        own = [place[strategies[layer]] for layer in run]
        working = max(working, int(tables.transient_of(_run_kinds(tables, run), own, in_flight)))
    terms["activations"] = _activations(tables, parts, strategies, setting, stage, place)
    buffers = tables.overhead_of(stage) - context_bytes(setting)
    last = layers[-1]
    if last < chain.num_layers - 1:
        once, each = _times_sent(setting)
        buffers += (once + each * in_flight) * int(rows.sent[kinds[-1], columns[-1]])
    if stage and tables.received is not None:
        first = columns[0]
        if before is None:
            buffers += int(tables.received.hidden_bytes[first]) * (tables.received.kept[stage] + in_flight)
        else:
            buffers += int(tables.received.num_bytes(stage, in_flight)[place[before], first])
    return terms | {"working set": working + samples, "pipeline buffers": buffers}


def _run_kinds(tables: CostTables, run: Sequence[int]) -> list[int]:
    kinds = [tables.layers[layer] for layer in run]
    return [*kinds[:-1], tables.last_kinds[kinds[-1]]] if tables.last_kinds else kinds


def _runs(parts: Sequence[range], num_layers: int) -> list[list[int]]:
    """The layers of each chunk, with the first and the last of the model where the stage has them."""
    ends = {0, num_layers - 1}
    mine = {layer for part in parts for layer in part} & ends
    runs = [[layer for layer in part if layer not in ends] for part in parts]
    first, last = ([0] if 0 in mine else []), ([num_layers - 1] if num_layers - 1 in mine else [])
    return [[*first, *run, *last] for run in runs]


def _activations(
    tables: CostTables,
    parts: Sequence[range],
    strategies: Sequence[Strategy],
    setting: Setting,
    stage: int,
    place: Mapping[Strategy, int],
) -> int:
    """What a stage has saved of the passes in flight, of chunks as if all were the fullest."""
    pipeline, last = setting.pipeline, len(strategies) - 1
    in_flight = pipeline.in_flight(stage)

    def saved(layer: int) -> int:
        return int(tables.activation_bytes[tables.layers[layer], place[strategies[layer]]])

    if pipeline.num_chunks == 1:
        return in_flight * sum(saved(layer) for part in parts for layer in part)
    found = in_flight * max(sum(saved(layer) for layer in part if layer not in (0, last)) for part in parts)
    for chunk, part in enumerate(parts):
        for layer in {0, last}.intersection(part):
            found += -(-pipeline.passes(stage).in_flight(chunk) * saved(layer) // in_flight) * in_flight
    return found


def fullest_layer(
    parts: Sequence[range], strategies: Sequence[Strategy], stage: int, setting: Setting
) -> tuple[int, int]:
    """The place of the layer at work when a stage holds most, and how many layers it has; of chunks the fullest one."""
    chain, mine = setting.job.chain, parts[stage :: setting.pipeline.num_stages]
    pairs = list(dict.fromkeys((chain.layers[layer], strategies[layer]) for part in mine for layer in part))
    tables, _ = _of_pairs(setting, pairs)
    found = []
    for run in _runs(mine, chain.num_layers) if setting.pipeline.num_chunks > 1 else mine:
        own = [tables.strategies.index(strategies[layer]) for layer in run]
        moments = tables.moments_of(_run_kinds(tables, run), own, setting.pipeline.in_flight(stage))
        found.append((int(moments.max()), int(moments.argmax()), len(run)))
    return max(found)[1:]
