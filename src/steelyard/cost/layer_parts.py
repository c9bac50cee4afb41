"""What floors of memory are made of: the bytes of every layer kind under every strategy, and the moments of stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import context_bytes
from steelyard.cost.inputs import side_bytes
from steelyard.cost.layer_memory import LayerStates
from steelyard.cost.layer_row import LayerRow
from steelyard.cost.setting import Setting
from steelyard.cost.tables import CostTables
from steelyard.model.chain import LayerKind
from steelyard.plan.strategy import Remat, Strategy
from steelyard.schedules import PipelineConfig
from steelyard.schedules.passes import Phase

IntTable = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerParts:
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
    beside: IntTable
    """Of several stages, what that of the layer keeps of each microbatch beside, at least: positions, masks."""

    @classmethod
    def of(cls, tables: CostTables, setting: Setting, known: "KnownRows | None" = None) -> Self:
        """Those of tables of a pipeline setting; ``known`` saves work between settings of one job."""
        rows, job, last = {} if known is None else known, setting.job, len(tables.layers) - 1
        size = setting.devices_per_stage, setting.pipeline.num_microbatches, setting.is_piped
        found = np.zeros((len(cls.__slots__), *tables.legal.shape), dtype=np.int64)
        for row, place in {kind: place for place, kind in enumerate(tables.layers)}.items():
            layer = job.chain.num_layers - 1 if place == last else place
            kind, legal = job.chain.kind_of(layer), tables.legal[row]
            flows = job.chain.num_flowing, job.chain.num_made
            out = None if place == last else tuple(each(layer, job.seq_len) for each in flows)
            key = id(tables.strategies), *size, kind.name, out, legal.tobytes()
            if key not in rows:
                rows[key] = tables.strategies, _row(cls.__slots__, kind, tables.strategies, legal, setting, out)
            found[:, row] = rows[key][1]
        return cls(**dict(zip(cls.__slots__, found, strict=True)))


KnownRows = dict[tuple[object, ...], tuple[tuple[Strategy, ...], IntTable]]
"""Rows [fields of `LayerParts`, S] of a job, with the strategies, which keys tell by their identity."""


def _row(
    names: Sequence[str],
    kind: LayerKind,
    strategies: Sequence[Strategy],
    legal: NDArray[np.bool_],
    setting: Setting,
    out: tuple[int, ...] | None,
) -> IntTable:
    """[fields, S] of a layer; ``out`` is how many entries flow out of it and how many it makes, None of the last."""
    job, columns = setting.job, np.flatnonzero(legal)
    whole = np.zeros((len(names), len(legal)), dtype=np.int64)
    if not len(columns):
        return whole
    chosen = [strategies[column] for column in columns.tolist()]
    row = LayerRow.of(kind, chosen, setting)
    saved, entered, reducing, _, backward, read = (each[:, 0] for each in row.work(setting))
    sample_degree, _, sequence_degree = (each[:, 0] for each in row.numbers)
    own = np.array([job.once(each, "parts", partial(_state_parts, each)) for each in row.states], dtype=np.int64).T
    *held, reduces, frees, first, later, beside = own
    found = dict(zip(_HELD, held, strict=True)) | {"saved": saved, "autograd": backward + beside}
    found["states"] = found["states"] + read
    left = reduces * (entered + reducing) - frees * np.maximum(0, saved - entered)
    found |= {"reduction": left + later, "reduction_first": left + first}
    if out is not None:
        copies = np.array([1 if each.remat is Remat.FULL else 2 for each in chosen], dtype=np.int64)
        share = setting.microbatch_samples // sample_degree * job.compute_bytes
        flowing, made = out
        found["sent"] = share * flowing // sequence_degree
        backward = np.maximum(0, backward - copies * (share * made // sequence_degree))
    found["autograd_sending"] = backward + beside
    if setting.is_piped:
        found["beside"] = np.full(len(columns), side_bytes({kind}, setting), dtype=np.int64)
    for place, name in enumerate(names):
        whole[place, columns] = found.get(name, 0)
    return whole


_HELD = ("states", "gradients", "replicated_copy", "gathered_copy", "reduced", "ahead")
"""Fields of `LayerParts` that no number of samples changes, samples of a step left out."""


def _state_parts(states: LayerStates) -> tuple[int, ...]:
    """The fields `_HELD`; whether gradients are reduced, and whether what was saved is freed by then; what the first
    reduction and a later one take beside; and what autograd finds beside what it works with.
    """
    copy, is_sharded = states.copy if states.keeps_copy else 0, states.shards > 1
    dropped = states.copy if states.drops_copy else 0
    first, later = (states.reduced_states(is_first=each) if states.params else 0 for each in (True, False))
    return (
        states.states,
        states.kept_gradients,
        0 if is_sharded else copy,
        copy if is_sharded else 0,
        states.reduced if is_sharded else 0,
        states.copy if is_sharded and states.has_backward and not states.keeps_copy else 0,
        states.params > 0,
        states.frees_saved,
        first - dropped,
        later - dropped,
        states.made_gradients + (0 if states.keeps_copy or not states.has_backward else states.copy),
    )


def shared_overhead(setting: Setting) -> int:
    """What a stage holds whatever its layers: the context, and an only stage what these read beside the state."""
    has_all = setting.pipeline.num_stages == 1
    return context_bytes(setting) + (side_bytes(set(setting.job.chain.kinds), setting) if has_all else 0)


def least_hidden_bytes(setting: Setting) -> int:
    """The least that a rank receives of what flows between two layers, for one microbatch."""
    job = setting.job
    entries = min(job.chain.num_flowing(place, job.seq_len) for place in _inner(setting))
    return setting.microbatch_samples * entries * job.compute_bytes // setting.devices_per_stage


def _inner(setting: Setting) -> range:
    return range(setting.job.chain.num_layers - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMoment:
    """A stage of several chunks as it begins a backward pass, by chunk."""

    working: int
    """The chunk of the pass."""
    forwards: tuple[int, ...]
    """Forward passes before."""
    backwards: tuple[int, ...]
    follow_forward: tuple[bool, ...]
    """Whether the pass before was a forward one."""
    num_microbatches: int

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Microbatches in flight."""
        return tuple(each - done for each, done in zip(self.forwards, self.backwards, strict=True))

    @property
    def has_gathered(self) -> tuple[bool, ...]:
        """Whether sharded layers that keep the copy that computes have it: from the forward to the backward pass."""
        pairs = enumerate(zip(self.in_flight, self.follow_forward, strict=True))
        return tuple(chunk == self.working or (count > 0 and follows) for chunk, (count, follows) in pairs)

    @property
    def has_gradients(self) -> tuple[bool, ...]:
        """Whether gradients are kept by then."""
        return tuple(done > 0 for done in self.backwards)

    @property
    def is_begun(self) -> tuple[bool, ...]:
        """Whether the copies of replicated layers are there: from the first forward to the last backward pass."""
        pairs = zip(self.forwards, self.backwards, strict=True)
        return tuple(each > 0 and done < self.num_microbatches for each, done in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExchange:
    """Activations and gradients, at least, that stages of several chunks hold beside what layers save."""

    received: list[int]
    """[P]"""
    sent: list[int]
    """[P - 1]"""
    sent_by_last: int


def stage_exchange(moments: list[StageMoment], setting: Setting) -> StageExchange:
    """What stages hold of others and what they sent themselves at these moments."""
    pipeline, last, flights = setting.pipeline, moments[-1], [sum(moment.in_flight) for moment in moments]
    if setting.job.execution.buffers_every_microbatch:
        others, count = pipeline.num_chunks - 1, pipeline.num_microbatches
        return StageExchange(
            received=[max(0, others * count - each) for each in flights],
            sent=[pipeline.num_chunks * count + sum(moment.forwards) for moment in moments[:-1]],
            sent_by_last=others * count,
        )
    ahead = (pipeline.schedule.received_ahead(pipeline, stage) for stage in range(pipeline.num_stages))
    kept = (sum(moment.has_gradients[int(stage == 0) :]) for stage, moment in enumerate(moments))
    return StageExchange(
        received=[sum(each) + own for each, own in zip(ahead, kept, strict=True)],
        sent=[each + 1 for each in flights[:-1]],
        sent_by_last=sum(last.in_flight[:-1]),
    )


def static_in_chunks(
    tables: CostTables, parts: LayerParts, moments: list[StageMoment], stages: Sequence[int]
) -> IntTable:
    """[K, S] what a layer on one of these stages of several chunks has throughout a pass, at least at its moment."""
    gradients, begun, gathered, copies = np.zeros((4, len(tables.kinds), 1), dtype=np.int64)
    own = [moments[stage] for stage in stages]
    copies[:] = tables.pipeline.num_chunks
    gathered[:] = min(sum(moment.has_gathered) for moment in own)
    gradients[:] = min(sum(moment.has_gradients) for moment in own)
    begun[:] = min(sum(moment.is_begun) for moment in own)
    for kind, moment, chunk in model_ends(tables, moments):
        copies[kind], gathered[kind] = 1, moment.has_gathered[chunk]
        gradients[kind], begun[kind] = moment.has_gradients[chunk], moment.is_begun[chunk]
    held: IntTable = copies * parts.states + gradients * parts.gradients + begun * parts.replicated_copy
    held += gathered * parts.gathered_copy
    return held


def saved_in_chunks(tables: CostTables, parts: LayerParts, moments: list[StageMoment]) -> IntTable:
    """[K, S] what layers on stages of several chunks save of each pass in flight, at least."""
    flights = [tables.pipeline.in_flight(stage) for stage in range(len(moments))]
    pairs = zip(moments, flights, strict=True)
    saved: IntTable = np.minimum.reduce([parts.saved * sum(moment.in_flight) // each for moment, each in pairs])
    for (kind, moment, chunk), each in zip(model_ends(tables, moments), (flights[0], flights[-1]), strict=True):
        saved[kind] = parts.saved[kind] * moment.in_flight[chunk] // each
    return saved


def model_ends(tables: CostTables, moments: list[StageMoment]) -> tuple[tuple[int, StageMoment, int], ...]:
    """The kinds of the first and the last layer of the model, the moments of their stages, and their chunks."""
    return (tables.layers[0], moments[0], 0), (tables.layers[-1], moments[-1], tables.pipeline.num_chunks - 1)


def fullest_moments(setting: Setting) -> list[StageMoment]:
    """[P] of the stages of several chunks, the moments at which they hold most microbatches."""
    return [_fullest(stage, setting.pipeline) for stage in range(setting.pipeline.num_stages)]


@lru_cache(maxsize=4096)
def _fullest(stage: int, pipeline: PipelineConfig) -> StageMoment:
    """Of the backward passes that a stage begins with most passes in flight the one with most gradients, or the last.

    On the last stage rather one of the last chunk, which has the head.
    """
    chunks, count = pipeline.num_chunks, pipeline.num_microbatches
    order = pipeline.passes(stage)
    is_backward = order.phase == Phase.BACKWARD
    mine = order.chunk == np.arange(chunks)[:, None]
    before = [np.cumsum(mine & each, axis=1) - (mine & each) for each in (~is_backward, is_backward)]
    forwards, backwards = before
    in_flight = (forwards - backwards).sum(axis=0)
    kept = ((backwards > 0).astype(int) + ((forwards > 0) & (backwards < count))).sum(axis=0)
    has_head = (order.chunk == chunks - 1) & (stage == pipeline.num_stages - 1)
    fullest = is_backward & (in_flight == in_flight[is_backward].max())
    place = max(np.flatnonzero(fullest).tolist(), key=lambda each: (has_head[each], kept[each], each))
    last = [np.flatnonzero(own[:place]) for own in mine]
    return StageMoment(
        working=int(order.chunk[place]),
        forwards=tuple(forwards[:, place].tolist()),
        backwards=tuple(backwards[:, place].tolist()),
        follow_forward=tuple(len(own) > 0 and not is_backward[own[-1]] for own in last),
        num_microbatches=count,
    )
