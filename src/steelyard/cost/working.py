r"""What a stage holds as each of its layers works backwards, as tables of one layer and its neighbours.

The floors of `steelyard.cost.memory_floor` take one moment, before anything of a backward pass is freed. Here every
layer has its own, so that what inner layers work with counts where they stand. Of the layers $j$ of a stage, in the
backward pass that begins with most microbatches in flight, as layer $l$ works:

$$M \ge o + \sum_j h_j - \sum_{j > l} f_j + \max\big(u_l + r_{l+},\; v_l\big) + a_{l-}, \qquad h = s + n b$$

| symbol | field                | bytes                                                                              |
|--------|----------------------|------------------------------------------------------------------------------------|
| $s$    | `static_bytes`       | there throughout the pass                                                          |
| $b$    | `saved_bytes`        | saved by a microbatch, of which $n$ are in flight                                  |
| $f$    | `freed_bytes`        | gone once the layer has worked; negative where gradients that it leaves are more   |
| $u$    | `working_bytes`      | what it takes while autograd works through it                                      |
| $v$    | `reducing_bytes`     | of a sharded layer, what it takes as its gradients are reduced                     |
| $a$    | `ahead_bytes`        | of a sharded layer, gathered ahead as the next sharded one behind it works         |
| $r$    | `reduced_bytes`      | of a sharded layer, reduced while those up to the next one work; -1 of others      |
| $o$    | `overhead_bytes`     | of the stage, whatever its layers                                                  |

Left out, so that the walk may be above: all other passes, what a later microbatch finds of the one before it, what is
gathered ahead for that one, and what a stage receives beyond its share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.layer_parts import (
    LayerParts,
    fullest_moments,
    least_hidden_bytes,
    model_ends,
    saved_in_chunks,
    shared_overhead,
    stage_exchange,
    static_in_chunks,
)
from steelyard.cost.setting import Job, Setting
from steelyard.cost.tables import CostTables

IntTable = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkingBytes:
    """The bytes of the module's table, each [2, K, S]: of an inner layer of a stage, and of its last one."""

    static_bytes: IntTable
    saved_bytes: IntTable
    freed_bytes: IntTable
    working_bytes: IntTable
    reducing_bytes: IntTable
    ahead_bytes: IntTable
    reduced_bytes: IntTable
    overhead_bytes: tuple[int, ...]
    """[P]"""
    reduces_again: bool
    """Whether as the last layers work the first sharded one is still being reduced, of the backward pass before."""

    def held_bytes(self, in_flight: int) -> IntTable:
        """[2, K, S] with so many microbatches in flight."""
        return self.static_bytes + in_flight * self.saved_bytes


TABLES = tuple(each.name for each in fields(WorkingBytes) if each.name.endswith("_bytes"))[:-1]


def joined_bytes(parts: Sequence[WorkingBytes], overhead_bytes: Sequence[int]) -> WorkingBytes:
    """Those of several pools side by side."""
    tables = {name: np.concatenate([getattr(part, name) for part in parts], axis=2) for name in TABLES}
    again = all(part.reduces_again for part in parts)
    return WorkingBytes(**tables, overhead_bytes=tuple(overhead_bytes), reduces_again=again)


def working_bytes(tables: CostTables, job: Job) -> WorkingBytes | None:
    """Those of cost tables of a pipeline setting of the job; None for a framework with states of its own."""
    size = tables.strategies[0].num_devices if tables.strategies else None
    setting = Setting(job=job, pipeline=tables.pipeline, stage_size=size)
    if setting.job.execution.keeps_own_buffers:
        return None
    parts = LayerParts.of(tables, setting)
    return _in_chunks(tables, setting, parts) if tables.pipeline.num_chunks > 1 else _in_one(tables, setting, parts)


def _in_one(tables: CostTables, setting: Setting, parts: LayerParts) -> WorkingBytes:
    """Of stages that each hold one part of the model."""
    pipeline = tables.pipeline
    is_short = any(pipeline.num_microbatches <= pipeline.in_flight(stage) for stage in range(pipeline.num_stages))
    static = parts.states + parts.replicated_copy + parts.gathered_copy + (0 if is_short else parts.gradients)
    freed = parts.saved + parts.gathered_copy - (parts.gradients if is_short else 0)
    freed += parts.replicated_copy if pipeline.num_microbatches <= 2 else 0  # the pass may be the last one of the step
    num_sent = pipeline.num_microbatches if setting.job.execution.buffers_every_microbatch else 1
    overhead = shared_overhead(setting)
    return _tables(tables, parts, static, parts.saved, freed, (num_sent, 1), is_short, overhead)


def _in_chunks(tables: CostTables, setting: Setting, parts: LayerParts) -> WorkingBytes:
    """Of stages that hold several: the least that any stage has."""
    moments, pipeline = fullest_moments(setting), tables.pipeline
    exchange = stage_exchange(moments, setting)
    at_work = np.ones((len(tables.kinds), 1), dtype=np.int64)
    for kind, moment, chunk in model_ends(tables, moments):
        at_work[kind] = moment.working == chunk
    may_be_last = any(each.backwards[each.working] + 1 == pipeline.num_microbatches for each in moments)
    static = static_in_chunks(tables, parts, moments, range(pipeline.num_stages))
    freed = at_work * (parts.saved + parts.gathered_copy + (parts.replicated_copy if may_be_last else 0))
    overhead = shared_overhead(setting) + min(exchange.received) * least_hidden_bytes(setting)
    saved, sent = saved_in_chunks(tables, parts, moments), min(exchange.sent)
    found = _tables(tables, parts, static, saved, freed, (sent, 0), False, overhead)
    idle = (at_work == 0)[None]
    return replace(
        found,
        working_bytes=np.where(idle, 0, found.working_bytes),
        reducing_bytes=np.where(idle, 0, found.reducing_bytes),
        ahead_bytes=np.where(idle, 0, found.ahead_bytes),
        reduced_bytes=np.where(idle, -1, found.reduced_bytes),
        reduces_again=all(moment.has_gradients[moment.working] for moment in moments),
    )


def _tables(
    tables: CostTables,
    parts: LayerParts,
    static: IntTable,
    saved: IntTable,
    freed: IntTable,
    num_sent: tuple[int, int],
    is_first: bool,
    overhead: int,
) -> WorkingBytes:
    """With the rows of last layers: these send, ``num_sent`` at least and of each microbatch in flight.

    ``is_first`` for the first backward pass of a step.
    """
    is_sharded, head = parts.reduced > 0, tables.layers[-1]
    reduction = parts.reduction_first if is_first else parts.reduction
    sent = parts.sent.copy()
    sent[head] = 0
    autograd = np.stack([parts.autograd, parts.autograd_sending])
    autograd[1, head] = parts.autograd[head]
    return WorkingBytes(
        static_bytes=np.stack([static, static + num_sent[0] * sent]),
        saved_bytes=np.stack([saved, saved + num_sent[1] * sent + parts.beside]),
        freed_bytes=np.stack([freed, freed]),
        working_bytes=np.where(is_sharded, autograd, np.maximum(autograd, reduction)),
        reducing_bytes=np.stack([np.where(is_sharded, reduction, 0)] * 2),
        ahead_bytes=np.stack([parts.ahead] * 2),
        reduced_bytes=np.stack([np.where(is_sharded, parts.reduced, -1)] * 2),
        overhead_bytes=(overhead,) * tables.pipeline.num_stages,
        reduces_again=not is_first,
    )
