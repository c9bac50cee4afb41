r"""Cost tables of the search: costs of each layer under each strategy, for one pipeline configuration.

With $l = 1..L$ layers of types $k_l$, strategies $s_l$, stages $i = 1..P$ of consecutive layers and $m$ microbatches,
the step time that the search minimises and the memory that it bounds are

$$T = \sum_i t_i + (mv-1)\,\max_i t_i, \qquad
t_i = c_i + \sum_{l \in i} \Big(t(k_l, s_l) + r(k_l, s_{l-1}, s_l) + \sum_{v:\, l \in R_v} d_v(s_{o_v}, s_l)\Big)$$

$$M_i = o_i + \sum_{l \in i} \big(a(k_l, s_l) + n_i\, b(k_l, s_l)\big) + U_i \le M$$

with $U_i = \max_{l \in i} u(k_l, s_l)$ if nothing is freed and there are no buffers, and else as defined in
`steelyard.cost.memory`.

The first layer of the model has no $r$. The first layer of a later stage has $r$ from the last layer of the stage
before it, because the receiver redistributes. A cross-layer input $v$ is a value that layers $R_v$ read in addition to
the output of the layer before them: an encoder's output read by every decoder layer, a tied embedding's weight read by
the head.

The number of chunks $v$ is 1 except under schedules with chunks. Then the tables are folded (`steelyard.cost.fold`):
a stage holds $v$ identical chunks, and one layer of the tables represents the $v$ layers at the same place of the
chunks. Its time is that of one chunk's pass, its static bytes those of all chunks, and $n_i$ counts passes in flight.
Under a schedule with weight passes all times are those of filling the pipeline, a fraction $f$ (`fill`) of a pass, and
$mv/f$ replaces $mv$: $\sum_i f t_i + (mv-f)\,\max_i t_i$. Every chunk needs a layer, so the stages with the first and
the last layer, which no other chunk has, hold two layers or more, or three if one stage has both.

| symbol | field                | unit  | meaning                                                                   |
|--------|----------------------|-------|---------------------------------------------------------------------------|
| $t$    | `time_s`             | s     | forward + backward of one microbatch, plus 1/m of once-per-step work      |
| $r$    | `switch_s`           | s     | redistribution of one microbatch's activation and its gradient            |
| $d_v$  | `cross_layer_inputs` | s     | redistribution of an input from its source layer $o_v$ to one reader      |
| $c_i$  | `transfer_s`         | s     | send and receive between two stages, 0 for the first stage                |
| $a$    | `static_bytes`, `stage_bytes` | bytes | parameters, gradients, optimizer states                          |
| $b$    | `activation_bytes`   | bytes | saved for backward, per microbatch in flight                              |
| $u$    | `transient_bytes`    | bytes | largest short-lived memory while the layer runs                           |
| $n_i$  | `pipeline`           | –     | passes in flight on stage i: min(m, P − i) for 1F1B, m for GPipe          |
| $v$    | `pipeline`           | –     | parts of the model on every stage                                         |
| $o_i$  | `overhead_of`        | bytes | per device, independent of the layers: CUDA context, buffers              |

With heterogeneous device groups (`Pools`) each strategy belongs to one group, and a stage uses only those of its own
group. $c_i$ and $o$ are then per stage, and $r$ between strategies of two groups applies at their border.

Source: Miao et al. 2022, Eq. 1; Wang et al. 2023 (Galvatron-BMW, arXiv 2307.02031), Eqs. 3–8.
Not modelled: overlap of resharding with compute; memory of cross-layer inputs beyond their readers' own tables.
"""

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steelyard.errors import InvalidProblemError
from steelyard.limits import MOST_BYTES
from steelyard.plan.strategy import Strategy
from steelyard.schedules import PipelineConfig, names_of

LAST = ", last"
"""Suffix of layer types whose layers are the last of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossLayerInput:
    """A value that layers read in addition to the output of the layer before them; each reader redistributes it."""

    source: int
    """Index of the layer that makes the value, counted from 0."""
    readers: tuple[int, ...]
    """Indices of the layers that read it, ascending, all after the source."""
    seconds: NDArray[np.float64]
    """[S, S] per microbatch and reader: strategy of the source, strategy of the reader."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pools:
    """Per-stage values of a pipeline over heterogeneous device groups (pools), numbered in pipeline order from 0."""

    of_strategies: NDArray[np.int64]
    """[S] group of each strategy"""
    of_stages: tuple[int, ...]
    """[P] group of each stage, ascending"""
    transfer_s: tuple[float, ...]
    """[P] send and receive from the stage before, 0 for the first"""
    overhead_bytes: tuple[int, ...]
    """[P] overhead, including the difference in memory to the group with the most"""
    order: tuple[int, ...] = ()
    """Indices of these groups among the available ones"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Received:
    """Activations that stages receive, in bytes of a microbatch on one rank, by the D layouts of `CostTables`."""

    hidden_bytes: NDArray[np.int64]
    """[D] bytes of a layer's output in each layout"""
    layouts: NDArray[np.int64]
    """[D] numbers, equal for layouts between which nothing changes; different for different device groups"""
    kept: tuple[int, ...]
    """[P] number of activations that a stage holds for any layout"""
    is_apart: NDArray[np.bool_]
    """[D, D] whether it arrives in even parts of the receiver's layout"""

    def num_bytes(self, stage: int, in_flight: int) -> NDArray[np.int64]:
        """Bytes [D, D] of received activations on a stage, by the layouts before and after the stage boundary.

        If the layout changes, they include every microbatch in flight, in addition to what the first layer saves.
        """
        arriving = np.where(self.is_apart, self.hidden_bytes, self.hidden_bytes[:, None])
        is_new = self.is_apart | (self.layouts[:, None] != self.layouts)
        found: NDArray[np.int64] = arriving * (self.kept[stage] + in_flight * is_new)
        return found

    def of(self, layouts: NDArray[np.int64]) -> Self:
        """Return the values for these layouts, in order; a layout may occur more than once."""
        return replace(
            self,
            hidden_bytes=self.hidden_bytes[layouts],
            layouts=self.layouts[layouts],
            is_apart=self.is_apart[np.ix_(layouts, layouts)],
        )

    def told_apart(
        self, legal: NDArray[np.bool_], switch: NDArray[np.float64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Return the tables [T, D] and [T, D, D] with one more, which separates senders by layout and bytes."""
        pairs = np.stack([self.layouts, self.hidden_bytes], axis=1)
        numbers = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.float64)
        more = np.repeat(numbers[:, None], len(numbers), axis=1)
        return np.concatenate([legal, np.ones_like(legal[:1])]), np.concatenate([switch, more[None]])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTables:
    """Costs of one pipeline configuration, as arrays over K layer types and S strategies; symbols as in the module."""

    pipeline: PipelineConfig
    """Pipeline configuration; with two chunks or more the tables are folded."""
    layer_types: tuple[str, ...]
    layers: tuple[int, ...]
    """Type index of each of the L layers in order."""
    strategies: tuple[Strategy, ...]
    legal: NDArray[np.bool_]
    """[K, S] whether the strategy may be used for the layer type; if not, entries of the other tables are ignored."""
    time_s: NDArray[np.float64]
    """[K, S]"""
    static_bytes: NDArray[np.int64]
    """[K, S] on every stage"""
    activation_bytes: NDArray[np.int64]
    """[K, S]"""
    transient_bytes: NDArray[np.int64]
    """[K, S]"""
    switch_s: NDArray[np.float64]
    """[K, D, D]: type of the receiving layer, layout of the layer before, layout of the receiving layer."""
    transfer_s: float
    overhead_bytes: int
    layouts: NDArray[np.int64] | None = None
    """[S] index of each strategy's layout for input and output, among D layouts; if None each has its own"""
    cross_layer_inputs: tuple[CrossLayerInput, ...] = ()
    last_types: tuple[int, ...] = ()
    """[K] layer type whose bytes apply if a layer of each type is the last of its stage; if empty, its own type."""
    fill: float = 1.0
    """Fraction of a pass that a stage waits while the pipeline fills or drains; all times are multiplied by it."""
    stage_bytes: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """[K, S] static bytes of stages by their passes in flight, added to those of every stage. Negative ones are also
    subtracted from what layers free."""
    freed_bytes: NDArray[np.int64] | None = None
    """[K, S] held bytes that are freed after the layer's backward pass, minus what it leaves; None: nothing is freed"""
    buffers: NDArray[np.int64] | None = None
    """[3, K, S] bytes gathered of a layer only for the next one, gathered for any other, and left after it; or None"""
    repeats: bool = True
    """Whether there are several passes, so that the last layer of a stage finds the buffer that the first one left."""
    stage_overheads: tuple[int, ...] = ()
    """[P] bytes per device that its layers cannot use, if stages differ without pools"""
    received: Received | None = None
    """Received activations, if they depend on strategies."""
    pools: Pools | None = None
    """Values per stage for heterogeneous device groups; ``transfer_s`` and ``overhead_bytes`` are then the minimum over
    the stages."""

    def __post_init__(self) -> None:
        num_types, num_strategies = len(self.layer_types), len(self.strategies)
        pairs = (num_types, num_strategies)
        if len(self.layout_of) != num_strategies:
            found = f"{len(self.layout_of)} entries"
            raise InvalidProblemError(field="layouts", found=found, expected=f"{num_strategies} entries")
        num_layouts = num_strategies if self.layouts is None else self.switch_s.shape[-1]
        for name, shape in (
            ("legal", pairs),
            ("time_s", pairs),
            ("static_bytes", pairs),
            ("activation_bytes", pairs),
            ("transient_bytes", pairs),
            ("switch_s", (num_types, num_layouts, num_layouts)),
        ):
            table = getattr(self, name)
            if table.shape != shape:
                raise InvalidProblemError(field=name, found=f"shape {table.shape}", expected=f"shape {shape}")
            once = table if table.strides[0] else table[:1]
            if not (once.min(initial=0) >= 0 and once.max(initial=0) < np.inf):
                raise InvalidProblemError(
                    field=name, found="a negative or non-finite entry", expected="finite numbers of zero or more"
                )
        if not self.layers or not all(0 <= layer_type < num_types for layer_type in self.layers):
            raise InvalidProblemError(
                field="layers", found=str(self.layers[:8]), expected=f"one or more indices below {num_types}"
            )
        _check_chunks(self)
        if self.pools is not None:
            _check_pools(self, self.pools)
        for index, side in enumerate(self.cross_layer_inputs):
            _check_cross_layer_inputs(f"side_inputs[{index}]", side, len(self.layers), num_strategies)

    def __str__(self) -> str:
        shape, count = self.pipeline, len(self.strategies)
        types = [each for each in self.layer_types if not each.endswith(LAST)]
        layers = f"{len(self.layers)} layers of {len(types)} types ({', '.join(types)}), {count} strategies"
        return f"{shape.num_stages} stages, {shape.num_microbatches} microbatches, {shape.schedule}: {layers}"

    @property
    def type_names(self) -> tuple[str, ...]:
        """[K] names of the layer types without the suffixes for the last layer of a stage and for chunks."""
        return tuple(name.removesuffix(LAST).partition(" (")[0] for name in self.layer_types)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is freed and there are no buffers: short-lived bytes are then the maximum over layers."""
        return self.freed_bytes is None and self.buffers is None

    @property
    def num_passes(self) -> float:
        """Passes of a stage in units of the tables' times, which are multiplied by ``fill``."""
        return self.pipeline.num_passes / self.fill if self.fill != 1 else self.pipeline.num_passes

    @property
    def layout_of(self) -> NDArray[np.int64]:
        """[S] layout of each strategy."""
        return np.arange(len(self.strategies)) if self.layouts is None else self.layouts

    @property
    def switches(self) -> NDArray[np.float64]:
        """[K, S, S] ``switch_s`` by strategies: large if there are many."""
        found: NDArray[np.float64] = self.switch_s[:, self.layout_of[:, None], self.layout_of]
        return found

    @property
    def are_last(self) -> NDArray[np.bool_]:
        """[K] whether layers of a type may be the last of a stage."""
        found = np.full(len(self.layer_types), not self.last_types)
        found[list(self.last_types)] = True
        return found

    @property
    def buffers_of(self) -> NDArray[np.int64]:
        """[3, K, S] bytes of buffers."""
        return np.zeros((3, *self.legal.shape), dtype=np.int64) if self.buffers is None else self.buffers

    def freed_of(self, in_flight: int) -> NDArray[np.int64]:
        """Bytes [K, S] that are freed after a layer's backward pass, on stages with ``in_flight`` passes in flight."""
        if self.freed_bytes is None:
            return np.zeros_like(self.static_bytes)
        return self.freed_bytes + np.minimum(self.stage_bytes.get(in_flight, 0), 0)

    def moments_of(self, layer_types: Sequence[int], strategies: ArrayLike, in_flight: int) -> NDArray[np.int64]:
        """Bytes [..., layers] beyond the held ones while each of these layers of a stage runs.

        ``strategies`` is [..., layers]; the definition is in `steelyard.cost.memory`.
        """
        chosen, own = np.asarray(strategies), list(layer_types)
        works, freed, once, ahead, left = (
            table[own, chosen] for table in (self.transient_bytes, self.freed_of(in_flight), *self.buffers_of)
        )
        found: NDArray[np.int64] = works.copy()
        before = left[..., :-1].max(axis=-1, initial=0)
        found[..., -1] += self.repeats * np.where(before > 0, before, left[..., -1])
        found[..., 1:] += once[..., :-1]
        found += ahead[..., :-1].max(axis=-1, keepdims=True, initial=0)
        found[..., :-1] += left.max(axis=-1, keepdims=True)
        found[..., :-1] -= freed[..., :0:-1].cumsum(axis=-1)[..., ::-1]
        return found

    def transient_of(self, layer_types: Sequence[int], strategies: ArrayLike, in_flight: int) -> NDArray[np.int64]:
        """Maximum of `moments_of` over the layers, [...]."""
        found: NDArray[np.int64] = self.moments_of(layer_types, strategies, in_flight).max(axis=-1)
        return found

    def static_of(self, in_flight: int) -> NDArray[np.int64]:
        """Static bytes [K, S] on stages with ``in_flight`` passes in flight."""
        return self.static_bytes + self.stage_bytes.get(in_flight, 0)

    def held_bytes(self, in_flight: int) -> NDArray[np.int64]:
        """Static bytes [K, S] plus activations of ``in_flight`` microbatches, at most `MOST_BYTES`."""
        static = self.static_of(in_flight)
        if int(self.activation_bytes.max(initial=0)) <= (MOST_BYTES - int(static.max(initial=0))) // in_flight:
            return static + in_flight * self.activation_bytes
        room = np.maximum(MOST_BYTES - static, 0)
        fits = self.activation_bytes <= room // in_flight
        return static + np.where(fits, in_flight * np.where(fits, self.activation_bytes, 0), room)

    def with_last_types(self, *, apart: Container[int] = (), **tables: NDArray[np.int64]) -> "CostTables":
        """Return the tables with additional layer types, with these [K, S] tables, for the last layer of every stage.

        The layer types ``apart`` are always last and keep their own tables.
        """
        num_types = len(self.layer_types)
        whole: dict[str, Any] = {n: np.concatenate([getattr(self, n), table]) for n, table in tables.items()}
        return replace(
            self.select([*range(num_types)] * 2),
            layer_types=(*self.layer_types, *(name + LAST for name in self.layer_types)),
            last_types=tuple(
                layer_type if layer_type in apart else layer_type + num_types for layer_type in range(num_types)
            )
            * 2,
            **whole,
        )

    def as_plain(self) -> "CostTables":
        """Return upper bounds: tables in which nothing is freed and the last layer of a stage has no separate type."""
        lasts, count = self.last_types or tuple(range(len(self.layer_types))), self.pipeline.num_stages
        names = ("static_bytes", "activation_bytes", "transient_bytes")
        beside = self.transient_bytes + int(np.where(self.legal, self.buffers_of, 0).max(axis=(1, 2), initial=0).sum())
        most: dict[str, Any] = {
            name: np.maximum(table, table[list(lasts)])
            for name, table in zip(names, (self.static_bytes, self.activation_bytes, beside), strict=True)
        }
        kept = [layer_type for layer_type, name in enumerate(self.layer_types) if not name.endswith(LAST)]
        overhead = max(self.overhead_of(stage) for stage in range(count))
        most["static_bytes"] += np.maximum.reduce([np.zeros_like(self.static_bytes), *self.stage_bytes.values()])
        nothing: dict[str, Any] = dict.fromkeys(("freed_bytes", "buffers", "received"))
        whole = replace(self, **most, **nothing, stage_bytes={}, last_types=())
        return replace(whole.select(kept), overhead_bytes=overhead, stage_overheads=())

    def switches_of(self, layer_types: Sequence[int]) -> NDArray[np.float64]:
        """Return ``switch_s`` [layer types, D, D] of these layer types, as a broadcast view if all types share one."""
        if self.switch_s.strides[0]:
            return self.switch_s[list(layer_types)]
        return np.broadcast_to(self.switch_s[0], (len(layer_types), *self.switch_s.shape[1:]))

    def run_types(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return the layer types of these layers as the run of a stage, with the type for the last one."""
        layer_types = tuple(self.layers[layer] for layer in layers)
        return (*layer_types[:-1], self.last_types[layer_types[-1]]) if self.last_types and layer_types else layer_types

    def select(self, layer_types: Sequence[int], layers: Sequence[int] | None = None) -> Self:
        """Return the tables with only these layer types, by index, in this order; one may occur more than once.

        ``layers`` is the index of each layer's type in the result.
        """
        rows = list(layer_types)
        return replace(
            self,
            layer_types=tuple(self.layer_types[layer_type] for layer_type in rows),
            layers=self.layers if layers is None else tuple(layers),
            legal=self.legal[rows],
            time_s=self.time_s[rows],
            static_bytes=self.static_bytes[rows],
            activation_bytes=self.activation_bytes[rows],
            transient_bytes=self.transient_bytes[rows],
            freed_bytes=None if self.freed_bytes is None else self.freed_bytes[rows],
            buffers=None if self.buffers is None else self.buffers[:, rows],
            switch_s=self.switches_of(rows),
            stage_bytes={in_flight: table[rows] for in_flight, table in self.stage_bytes.items()},
        )

    def legal_on(self, stage: int) -> NDArray[np.bool_]:
        """Return whether a stage may use each strategy for each layer type [K, S]: only those of its device group."""
        return self.legal if self.pools is None else self.legal & (self.pools.of_strategies == self.pool_of(stage))

    def pool_of(self, stage: int) -> int:
        """Return the index of a stage's device group."""
        return 0 if self.pools is None else self.pools.of_stages[stage]

    def received_s(self, stage: int) -> float:
        """Seconds to receive from the stage before and to send the gradient back; 0 for the first stage."""
        if self.pools is not None:
            return self.pools.transfer_s[stage]
        return self.transfer_s if stage > 0 else 0.0

    @property
    def all_received_s(self) -> float:
        """Sum of `received_s` over all stages."""
        return (self.pipeline.num_stages - 1) * self.transfer_s if self.pools is None else sum(self.pools.transfer_s)

    def overhead_of(self, stage: int) -> int:
        """Bytes per device of a stage that its layers cannot use."""
        if self.pools is not None:
            return self.pools.overhead_bytes[stage]
        return self.stage_overheads[stage] if self.stage_overheads else self.overhead_bytes

    def rooms(self, budget_bytes: int) -> tuple[int, ...]:
        """Bytes [P] of a budget per device that the layers of each stage may use."""
        return tuple(budget_bytes - self.overhead_of(stage) for stage in range(self.pipeline.num_stages))

    def likeness(self, stage: int) -> tuple[int, int, int, int, float]:
        """Return a key that is equal for stages with the same costs for any layers, except for neighbouring stages."""
        kept = 0 if self.received is None else self.received.kept[stage]
        pool, overhead = self.pool_of(stage), self.overhead_of(stage)
        return self.pipeline.in_flight(stage), pool, overhead, kept, self.received_s(stage)

    def least_layers(self, stage: int) -> int:
        """Minimum number of layers of ``stage``."""
        return 1 + self._num_ends([stage])

    def least_layers_before(self, stage: int) -> int:
        """Minimum total number of layers of the stages before ``stage``."""
        return stage + self._num_ends(range(stage))

    def least_layers_behind(self, stage: int) -> int:
        """Minimum total number of layers of the stages after ``stage``."""
        return self.least_layers_before(self.pipeline.num_stages) - self.least_layers_before(stage + 1)

    def _num_ends(self, stages: Container[int]) -> int:
        """Number of the model's two ends on these stages of folded tables, where they do not fill a chunk."""
        return sum(stage in stages for stage in (0, self.pipeline.stage_of_last)) if self.pipeline.num_chunks > 1 else 0


def _check_chunks(tables: CostTables) -> None:
    pipeline = tables.pipeline
    takes_chunks = pipeline.schedule.takes_chunks
    if takes_chunks != (pipeline.num_chunks > 1) or (takes_chunks and pipeline.num_stages < 2):
        raise InvalidProblemError(
            field="schedule, num_chunks, num_stages",
            found=f"{pipeline.schedule}, {pipeline.num_chunks}, {pipeline.num_stages}",
            expected=f"{' or '.join(names_of(with_chunks=True))} with two or more chunks and stages, or another "
            "schedule with one chunk",
        )
    if takes_chunks and tables.cross_layer_inputs:
        raise InvalidProblemError(
            field="cross_layer_inputs",
            found=str(len(tables.cross_layer_inputs)),
            expected=f"none under {pipeline.schedule}",
        )
    if takes_chunks:
        pipeline.check()


def _check_pools(tables: CostTables, pools: Pools) -> None:
    shapes = len(pools.of_strategies), len(pools.of_stages), len(pools.transfer_s), len(pools.overhead_bytes)
    stages = tables.pipeline.num_stages
    is_joined = max(pools.of_stages, default=0) > 0
    if shapes != (len(tables.strategies), stages, stages, stages) or (is_joined and tables.cross_layer_inputs):
        raise InvalidProblemError(
            field="pools",
            found=f"{shapes} entries and {len(tables.cross_layer_inputs)} cross-layer inputs",
            expected=f"one for each of {len(tables.strategies)} strategies and {stages} stages, and no cross-layer "
            "inputs between device groups",
        )


def _check_cross_layer_inputs(place: str, side: CrossLayerInput, num_layers: int, num_strategies: int) -> None:
    if not 0 <= side.source < num_layers:
        raise InvalidProblemError(
            field=f"{place}.source", found=str(side.source), expected=f"a layer, 0 to {num_layers - 1}"
        )
    positions = (side.source, *side.readers)
    if not side.readers or positions[-1] >= num_layers or any(a >= b for a, b in itertools.pairwise(positions)):
        raise InvalidProblemError(
            field=f"{place}.readers",
            found=str(side.readers[:8]),
            expected=f"one or more layers in ascending order after layer {side.source}, up to {num_layers - 1}",
        )
    shape = (num_strategies, num_strategies)
    if side.seconds.shape != shape:
        raise InvalidProblemError(
            field=f"{place}.seconds", found=f"shape {side.seconds.shape}", expected=f"shape {shape}"
        )
    if not (side.seconds.min(initial=0) >= 0 and side.seconds.max(initial=0) < np.inf):
        raise InvalidProblemError(
            field=f"{place}.seconds",
            found="a negative or non-finite entry",
            expected="finite numbers of zero or more",
        )
